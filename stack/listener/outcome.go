package listener

import (
	"errors"
	"net/netip"
	"time"
)

// A State is what became of a publish.
type State uint8

// The states, in the words of `culvert ls`.
const (
	Pending   State = iota + 1 // wanted, not yet possible; Detail says what is waited for
	Forwarded                  // every socket is bound and serves
	Skipped                    // never possible; not retried
	Failed                     // not possible now; retried at RetryAt
)

// String returns "pending", "forwarded", "skipped" or "failed".
func (s State) String() string {
	switch s {
	case Pending:
		return "pending"
	case Forwarded:
		return "forwarded"
	case Skipped:
		return "skipped"
	case Failed:
		return "failed"
	}
	return "unknown"
}

// Causes of an Outcome, for errors.Is.
var (
	// ErrConflict says that another owner of ours has the host port.
	ErrConflict = errors.New("host port belongs to another publish")
	// ErrInUse says that another process has the host port (EADDRINUSE).
	ErrInUse = errors.New("host port is in use")
	// ErrDenied says that the kernel refused the bind (EACCES, EPERM).
	ErrDenied = errors.New("host port is not permitted")
	// ErrNoAddress says that the host has no such address (EADDRNOTAVAIL).
	ErrNoAddress = errors.New("host has no such address")
	// ErrNoVM says that the VM is not there.
	ErrNoVM = errors.New("the VM is not there")
)

// An Outcome is what became of a Spec, one for each spec an owner stated.
type Outcome struct {
	Spec  Spec
	State State
	// Detail is the sentence for people; empty when forwarded, but for the note
	// that the host lacks one family of two (FB-059).
	Detail string
	// Err is the cause, for errors.Is; nil when forwarded.
	Err error
	// Bound is where sockets are bound, as the kernel tells: all of them when
	// forwarded, those that worked when failed (C-5). A range counts its first
	// port's sockets.
	Bound []netip.AddrPort
	// RetryAt is when a failed bind is tried again; zero otherwise.
	RetryAt time.Time
	// Since is when State was entered.
	Since time.Time
}
