//go:build !linux

package eventfd

import "errors"

// New returns ErrUnsupported.
func New() (fd int, err error) { return -1, errors.ErrUnsupported }

// A Kick is the end that is waited for.
type Kick struct{}

// NewKick returns ErrUnsupported.
func NewKick(int) (*Kick, error) { return nil, errors.ErrUnsupported }

// Wait returns ErrUnsupported.
func (k *Kick) Wait(func() bool) error { return errors.ErrUnsupported }

// Interrupt does nothing.
func (k *Kick) Interrupt() {}

// Close returns ErrUnsupported.
func (k *Kick) Close() error { return errors.ErrUnsupported }

// A Call is the end that is signalled.
type Call struct{}

// NewCall returns ErrUnsupported.
func NewCall(int) (*Call, error) { return nil, errors.ErrUnsupported }

// Signal does nothing.
func (c *Call) Signal() {}

// Close returns ErrUnsupported.
func (c *Call) Close() error { return errors.ErrUnsupported }
