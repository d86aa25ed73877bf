//go:build !linux

package socketfile

import "errors"

// A Claim is the right to bind at a path.
type Claim struct{}

// New returns errors.ErrUnsupported.
func New(string) (*Claim, error) { return nil, errors.ErrUnsupported }

// Bound returns errors.ErrUnsupported.
func (*Claim) Bound() error { return errors.ErrUnsupported }

// Release does nothing.
func (*Claim) Release() error { return nil }

// Private returns errors.ErrUnsupported.
func Private(uintptr) error { return errors.ErrUnsupported }
