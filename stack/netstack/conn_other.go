//go:build !linux

package netstack

import "errors"

// Copies between sockets are Linux's.
type (
	socketReader struct{}
	socketWriter struct{}
)

func (r *socketReader) init(*flowCopy) {}
func (w *socketWriter) init(*flowCopy) {}

func (r *socketReader) pump(int) (outcome, error) { return copyOver, errors.ErrUnsupported }
func (w *socketWriter) pump(int) (outcome, error) { return copyOver, errors.ErrUnsupported }
