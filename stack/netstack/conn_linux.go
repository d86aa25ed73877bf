package netstack

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"github.com/culvertnet/culvert/stack/relay"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// probeSize is the longest read into a buffer of ours: what one request or
	// answer needs. It saves asking the socket how much it holds.
	probeSize = 16 << 10
	// bulkSize is the most that is read into the endpoint at once: 45 × 1448,
	// the segments of a usual link that fit one super-frame beside the most
	// headers gVisor reserves (65535 - 160 - 1). A longer write would go out as
	// one full segment and one crumb.
	bulkSize = 45 * 1448
	// gatherSize and gatherVecs bound one writev(2) to the client.
	gatherSize = 1 << 20
	gatherVecs = 256
)

var probes = sync.Pool{New: func() any { return new([probeSize]byte) }}

// A socketReader is the state of one readFromSocket.
type socketReader struct {
	c     *Conn
	total int64
	err   error // what ended the copy; io.EOF for the client's end
	fd    int
	left  int // bytes the socket is known to hold, for Len
	held  bytes.Reader
	buf   *[probeSize]byte // of held, while not empty
}

// readFromSocket copies from the client's socket to the endpoint. Small reads
// pass through a buffer; once one has filled it, read(2) goes straight into the
// chunks that the endpoint will send.
func (c *Conn) readFromSocket(raw syscall.RawConn) (int64, error) {
	r := socketReader{c: c}
	pump := r.pump
	for r.err == nil {
		if err := raw.Read(pump); err != nil {
			if c.closed.Load() {
				return r.total, net.ErrClosed
			}
			return r.total, &relay.ClientError{Err: err}
		}
		if r.err == nil {
			// The endpoint has no room.
			<-c.writable
			if c.closed.Load() {
				r.err = net.ErrClosed
			}
		}
	}
	r.drop()
	if r.err == io.EOF {
		return r.total, nil
	}
	return r.total, r.err
}

// pump copies until the socket holds nothing (false: wait for more), or until
// the endpoint has no room or the copy has ended (true).
func (r *socketReader) pump(fd uintptr) bool {
	r.fd = int(fd)
	for {
		if r.held.Len() == 0 && !r.probe() {
			return r.err != nil
		}
		for r.held.Len() > 0 {
			if !r.write(&r.held) {
				return true
			}
		}
		full := r.buf != nil && r.held.Size() == probeSize
		r.drop()
		for full {
			n, err := unix.IoctlGetInt(r.fd, unix.TIOCINQ)
			if err != nil || n <= 0 {
				break // nothing there, or the end: probe tells
			}
			if r.c.ep.Readiness(waiter.WritableEvents)&waiter.WritableEvents == 0 {
				return true
			}
			r.left = min(n, bulkSize)
			if !r.write(r) {
				return true
			}
		}
	}
}

// probe reads what is there into a buffer. It returns false when nothing is, or
// when the stream has ended (err).
func (r *socketReader) probe() bool {
	r.buf = probes.Get().(*[probeSize]byte)
	n, err := ignoringEINTR(func() (int, error) { return unix.Read(r.fd, r.buf[:]) })
	if n > 0 {
		r.held.Reset(r.buf[:n])
		return true
	}
	r.drop()
	switch {
	case err == unix.EAGAIN:
	case err != nil:
		r.err = &relay.ClientError{Err: err}
	default:
		r.err = io.EOF
	}
	return false
}

// write gives p to the endpoint. It returns false when there is no room, or on
// an error (err).
func (r *socketReader) write(p tcpip.Payloader) bool {
	n, err := r.c.ep.Write(p, tcpip.WriteOptions{})
	r.total += n
	r.c.written.Add(int(n))
	switch err.(type) {
	case nil:
		return n > 0
	case *tcpip.ErrWouldBlock:
		return false
	case *tcpip.ErrBadBuffer:
		// Bytes of this call are lost: the flow must not go on.
		r.err = &relay.ClientError{Err: errShort}
	default:
		r.err = wrapError(err)
	}
	if r.c.closed.Load() {
		r.err = net.ErrClosed
	}
	return false
}

// drop returns the buffer.
func (r *socketReader) drop() {
	if r.buf != nil {
		probes.Put(r.buf)
		r.buf = nil
	}
	r.held.Reset(nil)
}

// Len implements tcpip.Payloader: never more than the socket holds, for gVisor
// asks until it has as much.
func (r *socketReader) Len() int { return r.left }

// Read implements tcpip.Payloader by read(2) into the endpoint's own memory.
func (r *socketReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := ignoringEINTR(func() (int, error) { return unix.Read(r.fd, p) })
	if err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, errShort
	}
	r.left -= n
	return n, nil
}

// A socketWriter is the state of one writeToSocket.
type socketWriter struct {
	c     *Conn
	total int64
	err   error // what ended the copy; io.EOF for the guest's end
	wait  bool  // nothing received: wait for the endpoint
}

// writeToSocket copies what the guest sends to the client's socket: the
// received chunks are gathered in place, written with writev(2), and consumed as
// far as the socket took them.
func (c *Conn) writeToSocket(raw syscall.RawConn) (int64, error) {
	w := socketWriter{c: c}
	pump := w.pump
	for w.err == nil {
		if err := raw.Write(pump); err != nil {
			if c.closed.Load() {
				return w.total, net.ErrClosed
			}
			return w.total, &relay.ClientError{Err: err}
		}
		if w.err == nil && w.wait {
			<-c.readable
			if c.closed.Load() {
				w.err = net.ErrClosed
			}
		}
	}
	if w.err == io.EOF {
		return w.total, nil
	}
	return w.total, w.err
}

// pump copies until the socket takes no more (false: wait for room), or until
// nothing is left or the copy has ended (true).
func (w *socketWriter) pump(fd uintptr) bool {
	g := gathers.Get().(*gather)
	defer g.release()
	for {
		done, again := w.once(int(fd), g)
		if !again {
			return done
		}
	}
}

// once gathers, writes and consumes one batch. again says that there may be
// more of both; done is pump's result if not.
func (w *socketWriter) once(fd int, g *gather) (done, again bool) {
	c := w.c
	c.reading.Lock()
	defer c.reading.Unlock()
	w.wait = false
	if c.closed.Load() {
		w.err = net.ErrClosed
		return true, false
	}
	g.reset()
	if _, err := c.ep.Read(g, tcpip.ReadOptions{Peek: true}); err != nil {
		switch err.(type) {
		case *tcpip.ErrWouldBlock:
			w.wait = true
		case *tcpip.ErrClosedForReceive:
			w.err = c.endOfStream()
		default:
			w.err = wrapError(err)
		}
		return true, false
	}
	n, err := ignoringEINTR(func() (int, error) { return writev(fd, g.vecs) })
	if n > 0 {
		g.left = n
		_, _ = c.ep.Read((*discard)(g), tcpip.ReadOptions{})
		w.total += int64(n)
		c.read.Add(n)
		c.moderate(n)
		return false, true
	}
	if err == unix.EAGAIN {
		return false, false
	}
	w.err = &relay.ClientError{Err: err}
	return true, false
}

// moderate lets the receive buffer grow with what the client takes.
func (c *Conn) moderate(n int) { c.ep.ModerateRecvBuf(n) }

// A gather is an io.Writer that keeps where the bytes lie instead of copying
// them.
type gather struct {
	vecs []unix.Iovec
	size int
	left int // for discard
}

var gathers = sync.Pool{New: func() any { return &gather{vecs: make([]unix.Iovec, 0, gatherVecs)} }}

// errFull ends a look at received bytes.
var errFull = errors.New("gathered enough")

func (g *gather) Write(p []byte) (int, error) {
	if len(g.vecs) == gatherVecs || g.size >= gatherSize {
		return 0, errFull
	}
	if len(p) > 0 {
		g.vecs = append(g.vecs, iovec(p))
		g.size += len(p)
	}
	return len(p), nil
}

func (g *gather) reset() {
	clear(g.vecs)
	g.vecs, g.size = g.vecs[:0], 0
}

func (g *gather) release() {
	g.reset()
	gathers.Put(g)
}

// A discard is a gather as the io.Writer that consumes left bytes.
type discard gather

func (d *discard) Write(p []byte) (int, error) {
	n := min(len(p), d.left)
	d.left -= n
	if n < len(p) {
		return n, errFull
	}
	return n, nil
}

// ignoringEINTR repeats a system call that a signal interrupted.
func ignoringEINTR(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}
