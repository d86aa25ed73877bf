// Package socketfile gives one process at a time a path to bind a unix socket
// at: it replaces the file that a dead process left, never takes a live one's,
// and removes at the end only what is its own. It opens no socket that carries
// data and does not bind.
//
// # Theory of operation
//
// A claim is an flock(2) on PATH.lock, held for the claim's life: the kernel
// lets go of it when the process dies, however it dies, and of two starts at the
// same moment exactly one gets it. The lock file is removed by whoever holds the
// lock, so a process that waited for a file just removed looks again.
//
// A socket file at the path is stale when nothing is bound to it. That is asked
// for without disturbing who may be there: connect(2) with a socket of a type
// that neither a stream nor a datagram socket accepts fails with EPROTOTYPE when
// one is bound to the file and with ECONNREFUSED when none is. This finds
// programs that know nothing of the lock.
package socketfile

import "errors"

// MaxPath is the longest path of a unix socket, in bytes: sun_path has 108, one
// of them the terminating NUL (unix(7)).
const MaxPath = 107

// ErrInUse says that a live process has the path, or something that is not a
// socket is there.
var ErrInUse = errors.New("socket path in use")
