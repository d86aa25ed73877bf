package listener

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
)

// A Conn is an accepted TCP client: a non-blocking socket that its Group's
// goroutine for clients watches once somebody waits for it (Watch, or Read and
// the others that block). It satisfies relay.Conn and relay.Watcher.
// Read and Write may run at the same time, each in one goroutine;
// the other methods may be called at any time, also twice. Its own memory is some
// 200 bytes; it holds no buffer.
type Conn struct {
	set    *clientSet
	local  netip.AddrPort
	remote netip.AddrPort

	mu     sync.RWMutex // held for reading during system calls on fd
	fd     int
	closed bool
	events uint32      // what the set watches for; 0 when it is not in there
	ready  func(Ready) // see Watch
	waits  *waits      // of calls that block; made with the first
}

// Ready says what became of a Conn that is watched.
type Ready uint8

// What there is to try, and the end of it.
const (
	ReadyRead   Ready = 1 << iota // there may be something to read, or an end or error to be told
	ReadyWrite                    // there may be room to write
	ReadyEnd                      // behind what a read finds, there is the end, an error, or more (urgent data)
	ReadyClosed                   // it was closed on our side
)

// waits wake the calls that block: a wake-up that nobody waits for is kept.
type waits struct{ read, write chan struct{} }

func (w *waits) wake(r Ready) {
	for _, of := range []struct {
		r  Ready
		ch chan struct{}
	}{{ReadyRead, w.read}, {ReadyWrite, w.write}} {
		if r&(of.r|ReadyClosed) != 0 {
			select {
			case of.ch <- struct{}{}:
			default:
			}
		}
	}
}

// LocalAddr is the host address and port that the client connected to.
func (c *Conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr is the client's address and port.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.remote }

// Watch has ready called whenever a read may find something new, from a goroutine
// that serves many: it must not wait, and may read and write. What is there already
// is reported too. ReadyClosed comes from within Close or Abort. Watching again
// puts the new function in the old one's place.
//
// It fails with net.ErrClosed after Close, and when the user's epoll watches have
// run out (epoll(7), max_user_watches).
func (c *Conn) Watch(ready func(Ready)) error { return c.opError("watch", c.watch(ready)) }

// WatchWrite has ready called for room to write, too, from now on. It is for when a
// write has found none: a socket nearly always has some.
func (c *Conn) WatchWrite() error { return c.opError("watch", c.watchWrite()) }

// Gone reports whether the connection is dead: the client reset it, or it ended
// in another error. Nothing is consumed. A client that only ended its stream is
// not gone: it may wait for an answer. After Close, Gone is true.
func (c *Conn) Gone() bool {
	gone := true
	_ = c.Control(func(fd uintptr) { gone = goneFD(fd) })
	return gone
}

// WaitGone waits until Gone (nil), ctx is done (its error), or the connection is
// closed on our side (net.ErrClosed). Nothing is consumed. Read must not run
// meanwhile.
func (c *Conn) WaitGone(ctx context.Context) error { return c.opError("poll", c.waitGone(ctx)) }

// Read returns io.EOF when the client ended its stream, an error matching
// syscall.ECONNRESET when it reset the connection, net.ErrClosed after Close.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.read(p)
	return n, c.opError("read", err)
}

// Write sends all of p. It returns an error matching syscall.EPIPE or
// ECONNRESET when the client is gone, net.ErrClosed after Close.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.write(p)
	return n, c.opError("write", err)
}

// Control calls f with the descriptor, for system calls that do not wait; Close and
// Abort wait for f. f calls no method of c. After Close it returns net.ErrClosed.
func (c *Conn) Control(f func(fd uintptr)) error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return net.ErrClosed
	}
	f(uintptr(c.fd))
	return nil
}

// CloseRead says that nothing more will be read: Read returns io.EOF.
func (c *Conn) CloseRead() error { return c.opError("shutdown", c.shutdownRead()) }

// CloseWrite ends our stream: the client reads what was sent and then EOF.
func (c *Conn) CloseWrite() error { return c.opError("shutdown", c.shutdownWrite()) }

// KeepAlive has a silent client probed, so that one that is gone ends the
// connection within 90 s (C-14). Connections are so from the start, by
// inheritance from the listening socket; this is for one where it was undone.
func (c *Conn) KeepAlive() error { return c.opError("setsockopt", c.keepAlive()) }

// Abort resets the connection and frees it: the client reads what it has not
// yet read no more, and ECONNRESET. It unblocks Read, Write and WaitGone, which
// return net.ErrClosed. The kernel does the same to every Conn that is left when
// the process dies.
func (c *Conn) Abort() { _ = c.close() }

// Close ends the connection and frees it. The kernel goes on to deliver what
// was written; it resets instead when there is data that was not read. Close
// unblocks like Abort.
func (c *Conn) Close() error {
	c.endInOrder()
	return c.opError("close", c.close())
}

// opError makes an error of a bare system call one of package net, which is what
// those who handle connections test for.
func (c *Conn) opError(op string, err error) error {
	if err == nil || err == io.EOF || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: net.TCPAddrFromAddrPort(c.local), Addr: net.TCPAddrFromAddrPort(c.remote), Err: err}
}
