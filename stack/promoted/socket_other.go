//go:build !linux

package promoted

import (
	"errors"
	"syscall"
)

// Supported reports whether there can be promoted flows: they are Linux's.
func Supported() bool { return false }

var errAgain error = syscall.EAGAIN

func (c *Conn) read([]byte) (int, error)      { return 0, errors.ErrUnsupported }
func (c *Conn) peek([]byte, int) (int, error) { return 0, errors.ErrUnsupported }
func (c *Conn) discard()                      {}
func (c *Conn) readFull([]byte) bool          { return false }
func (c *Conn) write([][]byte) (int, error)   { return 0, errors.ErrUnsupported }
