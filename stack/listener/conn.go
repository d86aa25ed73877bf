package listener

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
)

// A Conn is an accepted TCP client: a non-blocking socket on the runtime
// poller. It satisfies relay.Conn. Read and Write may run at the same time,
// each in one goroutine; the other methods may be called at any time, also
// twice. Its own memory is some 300 bytes; it holds no buffer.
type Conn struct {
	file   *os.File
	raw    rawConn
	local  netip.AddrPort
	remote netip.AddrPort
}

// LocalAddr is the host address and port that the client connected to.
func (c *Conn) LocalAddr() netip.AddrPort { return c.local }

// RemoteAddr is the client's address and port.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.remote }

// Gone reports whether the connection is dead: the client reset it, or it ended
// in another error. Nothing is consumed. A client that only ended its stream is
// not gone: it may wait for an answer. After Close, Gone is true.
func (c *Conn) Gone() bool {
	gone := true
	_ = c.raw.Control(func(fd uintptr) { gone = goneFD(fd) })
	return gone
}

// WaitGone waits until Gone (nil), ctx is done (its error), or the connection is
// closed on our side (net.ErrClosed). Nothing is consumed. Read must not run
// meanwhile: it would wait for WaitGone to return.
func (c *Conn) WaitGone(ctx context.Context) error {
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.file.SetReadDeadline(time.Unix(1, 0)) // in the past: wakes the wait
		close(woken)
	})
	err := c.raw.Read(goneFD)
	if !stop() {
		<-woken
		_ = c.file.SetReadDeadline(time.Time{})
		if err != nil && ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			return ctx.Err()
		}
	}
	return c.opError("poll", err)
}

// Read returns io.EOF when the client ended its stream, an error matching
// syscall.ECONNRESET when it reset the connection, net.ErrClosed after Close.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.file.Read(p)
	return n, c.opError("read", err)
}

// Write sends all of p. It returns an error matching syscall.EPIPE or
// ECONNRESET when the client is gone, net.ErrClosed after Close.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.file.Write(p)
	return n, c.opError("write", err)
}

// SyscallConn gives the descriptor for reads and writes of another shape. A
// function given to it must not wait for anything: Close and Abort wait for it.
// After Close its methods return net.ErrClosed.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return &c.raw, nil }

// A rawConn is a file's, with package net's error for a closed one; package os
// lets one through there that nobody can test for.
type rawConn struct{ file syscall.RawConn }

func (r *rawConn) Control(f func(fd uintptr)) error    { return rawError(r.file.Control(f)) }
func (r *rawConn) Read(f func(fd uintptr) bool) error  { return rawError(r.file.Read(f)) }
func (r *rawConn) Write(f func(fd uintptr) bool) error { return rawError(r.file.Write(f)) }

func rawError(err error) error {
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return net.ErrClosed // on the poller there is no third
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
	return c.close()
}

func (c *Conn) close() error {
	if err := c.file.Close(); !errors.Is(err, os.ErrClosed) {
		return c.opError("close", err)
	}
	return nil
}

// opError makes an error of package os, or of a bare system call, one of
// package net, which is what those who handle connections test for.
func (c *Conn) opError(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	if wrapped := (*fs.PathError)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	if errors.Is(err, os.ErrClosed) {
		err = net.ErrClosed
	}
	return &net.OpError{Op: op, Net: "tcp", Source: net.TCPAddrFromAddrPort(c.local), Addr: net.TCPAddrFromAddrPort(c.remote), Err: err}
}
