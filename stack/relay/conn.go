package relay

import (
	"context"
	"sync/atomic"
	"time"
)

// A Side is one end of a TCP flow: the client's socket on the host, or the endpoint
// towards the guest. Its methods may be called at any time, also twice.
type Side interface {
	// CloseWrite ends our stream: the peer reads what was sent and then EOF.
	CloseWrite() error
	// KeepAlive probes a silent peer from now on, so that one that is gone ends
	// the connection within 90 s (C-14).
	KeepAlive() error
	// Abort resets the connection and frees it. It unblocks Read and Write,
	// which then return an error matching net.ErrClosed.
	Abort()
	// Close ends the connection in order and frees it. It unblocks like Abort.
	Close() error
}

// A Conn is a Side that is read and written. Read and Write may run at the same
// time, each in one goroutine.
type Conn interface {
	Side
	// Read returns io.EOF when the peer ended its stream, and an error matching
	// syscall.ECONNRESET when it reset the connection: never one for the other
	// (C-13).
	Read(p []byte) (int, error)
	// Write sends all of p. It fails with syscall.EPIPE or ECONNRESET when the
	// peer is gone.
	Write(p []byte) (int, error)
	// CloseRead says that nothing more will be read.
	CloseRead() error
}

// A Watcher is a Side whose death shows without reading it, and without
// consuming the error that tells of it. TCP asks the sides that are Watchers; a
// side that is not is found out by the next byte for it.
type Watcher interface {
	// Gone reports whether the connection is dead: the peer reset it or
	// vanished. A peer that only ended its stream is not gone. Where both
	// streams have ended it may report either.
	Gone() bool
	// WaitGone waits until Gone (nil), ctx is done (its error), or the
	// connection is closed on our side (net.ErrClosed). Read does not run
	// meanwhile.
	WaitGone(ctx context.Context) error
}

// Ready says what became of a Pollable.
type Ready uint8

// What there is to try, and the end of it.
const (
	ReadyRead   Ready = 1 << iota // there may be something to read, or an end or error to be told
	ReadyWrite                    // there may be room to write
	ReadyEnd                      // behind what a read finds, there is the end, an error, or more (urgent data)
	ReadyClosed                   // it was closed on our side
)

// A Pollable is a Conn that says when it is worth another try, so that waiting
// for it takes no goroutine.
type Pollable interface {
	Conn
	// Control calls f with the descriptor, for system calls that do not wait.
	// Close and Abort wait for f. After them it returns net.ErrClosed.
	Control(f func(fd uintptr)) error
	// Watch has ready called whenever a read may find something new, from a
	// goroutine that serves many: it must not wait, and may read and write. What
	// is there already is reported too. ReadyClosed comes from within Close or
	// Abort, under whatever its caller holds.
	Watch(ready func(Ready)) error
	// WatchWrite has ready called for room to write, too, from now on. It is for
	// when a write has found none.
	WatchWrite() error
}

// A GuestConn is the guest's end of a TCP flow. It does the copying.
type GuestConn interface {
	Side
	// Copy begins to copy both ways between itself and the client, which has to
	// be a Pollable where the implementation holds no goroutine for it. ended is
	// called once for each way, from any goroutine and under no lock: with nil at
	// the end of the stream that comes from that side, or with what broke it, an
	// error of the client's side in a *ClientError.
	Copy(client Conn, ended func(from Half, err error))
	// SetMeters makes the connection count the payload bytes it takes from the
	// guest on read, and those it accepts towards the guest on written, as they
	// pass. It is called before the first copy.
	SetMeters(read, written *Meter)
	// Resumed returns when a pause of the guest last ended: now while there is
	// one, zero if there never was. A paused guest cannot answer, so nothing is
	// held against it, and a pause's end begins all waiting anew (C-28).
	Resumed() time.Time
	// LocalAddr is the flow's source as the guest sees it, "IP:port".
	LocalAddr() string
}

// A Meter counts the bytes of one direction of a flow and knows when the last
// of them passed. It is safe for concurrent use; the zero value counts from 0.
type Meter struct {
	bytes atomic.Uint64
	last  atomic.Int64 // nanoseconds since began
}

// began is what Meters measure time from; time.Since reads the monotonic clock.
var began = time.Now()

// Add counts n bytes, now. A nil Meter counts nothing.
func (m *Meter) Add(n int) {
	if m == nil || n <= 0 {
		return
	}
	m.bytes.Add(uint64(n))
	m.last.Store(int64(time.Since(began)))
}

// Bytes returns how many bytes were counted.
func (m *Meter) Bytes() uint64 { return m.bytes.Load() }

// Last returns when the last byte was counted, zero for never.
func (m *Meter) Last() time.Time {
	last := m.last.Load()
	if last == 0 {
		return time.Time{}
	}
	return began.Add(time.Duration(last))
}

// A ClientError is an error of the client's side of a copy, so that the end of
// a flow can be laid at the right door.
type ClientError struct{ Err error }

func (e *ClientError) Error() string { return "client: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *ClientError) Unwrap() error { return e.Err }
