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
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
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

// A socketReader pumps from the client's socket to the endpoint. Small reads
// pass through a buffer; once one has filled it, read(2) goes straight into the
// chunks that the endpoint will send.
type socketReader struct {
	k    *flowCopy
	c    *Conn
	try  func(fd uintptr)
	out  outcome
	err  error // what ended the copy; io.EOF for the client's end
	turn int   // bytes left of this turn
	fd   int
	left int // bytes the socket is known to hold, for Len
	held bytes.Reader
	buf  *[probeSize]byte // of held, while not empty
}

func (r *socketReader) init(k *flowCopy) { r.k, r.c, r.try = k, k.conn, r.move }

// pump is a direction's.
func (r *socketReader) pump(budget int) (outcome, error) {
	r.turn = budget
	if r.out == waitGuest {
		r.c.growSend()
	}
	switch {
	case r.c.closed.Load():
		r.err = net.ErrClosed
	case tcp.EndpointState(r.c.ep.State()) == tcp.StateError:
		r.err = syscall.ECONNRESET
	case r.k.deaf.Load():
		r.err = r.k.clientGone(errDeaf)
	default:
		if err := r.k.client.Control(r.try); err != nil {
			r.err = r.k.clientGone(err)
		}
	}
	if r.err == nil {
		return r.out, nil
	}
	r.drop()
	if r.err == io.EOF {
		return copyOver, nil
	}
	return copyOver, r.err
}

// move copies until the socket holds nothing, the endpoint has no room, the turn
// is over or the stream.
func (r *socketReader) move(fd uintptr) {
	r.fd = int(fd)
	fresh := false // what is held was read just now
	for {
		if r.held.Len() == 0 {
			if !r.probe() {
				r.out = waitClient
				return
			}
			fresh = true
		}
		for r.held.Len() > 0 {
			if !r.write(&r.held) {
				r.out = waitGuest
				return
			}
		}
		full := r.buf != nil && r.held.Size() == probeSize
		r.drop()
		if fresh && !full && !r.k.finished.Load() {
			// A read that found less than it asked for found all (epoll(7)); what
			// comes is an event, and so is the end, unless it was one already. What
			// came while the guest had no room was one, too, that nobody looked at.
			r.out = waitClient
			return
		}
		for full {
			n, err := unix.IoctlGetInt(r.fd, unix.TIOCINQ)
			if err != nil || n <= 0 {
				break // nothing there, or the end: probe tells
			}
			if r.c.ep.Readiness(waiter.WritableEvents)&waiter.WritableEvents == 0 {
				r.out = waitGuest
				return
			}
			r.left = min(n, bulkSize)
			if !r.write(r) {
				r.out = waitGuest
				return
			}
			if r.turn <= 0 {
				r.out = moreToMove
				return
			}
		}
		if r.turn <= 0 {
			r.out = moreToMove
			return
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
	r.turn -= int(n)
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

// errDeaf says that a client's socket cannot be watched.
var errDeaf = errors.New("client's socket cannot be watched")

// A socketWriter pumps what the guest sends to the client's socket: the received
// chunks are gathered in place, written with writev(2), and consumed as far as
// the socket took them.
type socketWriter struct {
	k       *flowCopy
	c       *Conn
	try     func(fd uintptr)
	out     outcome
	err     error // what ended the copy; io.EOF for the guest's end
	turn    int   // bytes left of this turn
	watched bool  // the socket is watched for room
}

func (w *socketWriter) init(k *flowCopy) { w.k, w.c, w.try = k, k.conn, w.move }

// pump is a direction's.
func (w *socketWriter) pump(budget int) (outcome, error) {
	w.turn = budget
	if w.k.deaf.Load() {
		w.err = w.k.clientGone(errDeaf)
	} else if w.k.reset.Load() {
		w.err = w.k.clientGone(unix.ECONNRESET)
	} else if err := w.k.client.Control(w.try); err != nil {
		w.err = w.k.clientGone(err)
	}
	if w.err == nil && w.out == waitClient && !w.watched {
		w.watched = true
		if err := w.k.client.WatchWrite(); err != nil {
			w.err = w.k.clientGone(err)
		}
	}
	switch w.err {
	case nil:
		return w.out, nil
	case io.EOF:
		return copyOver, nil
	}
	return copyOver, w.err
}

// move copies until nothing is left, the socket takes no more, the turn is over
// or the stream.
func (w *socketWriter) move(fd uintptr) {
	g := gathers.Get().(*gather)
	defer g.release()
	w.out = moreToMove
	for w.turn > 0 && w.once(int(fd), g) {
	}
}

// once gathers, writes and consumes one batch. It reports whether there may be
// more of both; out or err say why not.
func (w *socketWriter) once(fd int, g *gather) (again bool) {
	c := w.c
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.closed.Load() {
		w.err = net.ErrClosed
		return false
	}
	g.reset()
	if _, err := c.ep.Read(g, tcpip.ReadOptions{Peek: true}); err != nil {
		switch err.(type) {
		case *tcpip.ErrWouldBlock:
			w.out = waitGuest
		case *tcpip.ErrClosedForReceive:
			w.err = c.endOfStream()
		default:
			w.err = wrapError(err)
		}
		return false
	}
	n, err := ignoringEINTR(func() (int, error) { return writev(fd, g.vecs) })
	if n > 0 {
		g.left = n
		_, _ = c.ep.Read((*discard)(g), tcpip.ReadOptions{})
		w.turn -= n
		c.read.Add(n)
		c.moderate(n)
		return true
	}
	if err == unix.EAGAIN {
		w.out = waitClient
		return false
	}
	w.err = &relay.ClientError{Err: err}
	return false
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
