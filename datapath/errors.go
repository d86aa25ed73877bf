package datapath

import (
	"errors"
	"os"
)

var (
	// ErrClosed says that our own side closed the attachment or listener.
	ErrClosed = os.ErrClosed
	// ErrPeerGone says that the guest's side of the attachment has gone: its
	// process ended, its socket closed, its interface or namespace was deleted.
	ErrPeerGone = errors.New("the guest's side of the attachment is gone")
	// ErrUnsupported says that this system cannot do what was asked.
	ErrUnsupported = errors.ErrUnsupported
)
