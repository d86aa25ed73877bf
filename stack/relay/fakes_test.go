package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A stream is one direction of a connection in memory.
type stream struct {
	data  []byte
	limit int  // how much it holds
	ended bool // the writer closed it in order
}

// A wire is a TCP connection in memory: two streams, and the reset of both. It
// behaves as Linux does, with all that a relay can trip over: what was sent
// before a reset can be read, the reset is told once, and after that reads find
// an end of stream.
type wire struct {
	mu     sync.Mutex
	change *sync.Cond
	to     [2]stream // to[i] is what end i reads
	ends   [2]*end
}

// An end is one side of a wire: a Conn, a GuestConn and a Watcher.
type end struct {
	wire *wire
	i    int

	// Under wire.mu.
	err       error // to be told, once
	dead      bool  // reset by the peer
	closed    bool
	aborted   bool // closed by Abort
	keepAlive int
	closeWr   int
	shutRead  bool

	read, written *Meter
	pause         pause
}

// A pause says when a guest was last resumed.
type pause struct {
	mu     sync.Mutex
	paused bool
	ended  time.Time
}

func (p *pause) set(paused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused, p.ended = paused, time.Now()
}

func (p *pause) resumed() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused {
		return time.Now()
	}
	return p.ended
}

var (
	_ GuestConn = (*end)(nil)
	_ Watcher   = (*end)(nil)
)

// newWire returns both ends of a connection each of whose streams holds limit
// bytes.
func newWire(limit int) (ours, peer *end) {
	w := &wire{}
	w.change = sync.NewCond(&w.mu)
	for i := range w.ends {
		w.ends[i] = &end{wire: w, i: i}
		w.to[i].limit = limit
	}
	return w.ends[0], w.ends[1]
}

func (e *end) peer() *end { return e.wire.ends[1-e.i] }

// state returns the error of a read or write, if there is one. mu is held.
func (e *end) state() error {
	switch {
	case e.closed:
		return net.ErrClosed
	case e.err != nil:
		err := e.err
		e.err = nil
		return err
	}
	return nil
}

func (e *end) Read(p []byte) (int, error) {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	in := &e.wire.to[e.i]
	for {
		if !e.closed && len(in.data) > 0 {
			n := copy(p, in.data)
			in.data = in.data[n:]
			e.read.Add(n)
			e.wire.change.Broadcast()
			return n, nil
		}
		if err := e.state(); err != nil {
			return 0, err
		}
		if e.dead || in.ended || e.shutRead {
			return 0, io.EOF
		}
		e.wire.change.Wait()
	}
}

func (e *end) Write(p []byte) (total int, err error) {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	out := &e.wire.to[1-e.i]
	for len(p) > 0 {
		if err := e.state(); err != nil {
			return total, err
		}
		if e.dead || out.ended {
			return total, syscall.EPIPE
		}
		n := min(len(p), out.limit-len(out.data))
		if n == 0 {
			e.wire.change.Wait()
			continue
		}
		out.data = append(out.data, p[:n]...)
		e.written.Add(n)
		total, p = total+n, p[n:]
		e.wire.change.Broadcast()
	}
	return total, nil
}

func (e *end) CloseRead() error {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	e.shutRead = true
	e.wire.change.Broadcast()
	return nil
}

func (e *end) CloseWrite() error {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	if e.closed {
		return net.ErrClosed
	}
	if e.dead {
		return syscall.ENOTCONN
	}
	e.closeWr++
	e.wire.to[1-e.i].ended = true
	e.wire.change.Broadcast()
	return nil
}

func (e *end) KeepAlive() error {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	e.keepAlive++
	return nil
}

func (e *end) Abort() { e.finish(true) }

func (e *end) Close() error {
	e.finish(false)
	return nil
}

func (e *end) finish(abort bool) {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	if e.closed {
		return
	}
	e.closed, e.aborted = true, abort
	if abort || len(e.wire.to[e.i].data) > 0 { // unread data makes a reset of it
		e.peer().lose(syscall.ECONNRESET)
	} else {
		e.wire.to[1-e.i].ended = true
	}
	e.wire.change.Broadcast()
}

// lose ends the connection under e: the peer reset it, or a probe found nobody.
// mu is held.
func (e *end) lose(err error) {
	if !e.closed && !e.dead {
		e.dead, e.err = true, err
	}
}

// vanish makes e's peer unreachable; e finds out by probing, at once.
func (e *end) vanish() {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	e.lose(syscall.ETIMEDOUT)
	e.wire.change.Broadcast()
}

func (e *end) Gone() bool {
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	return e.gone()
}

// gone is what poll(2) calls POLLHUP: true as well when both streams have ended.
func (e *end) gone() bool {
	return e.closed || e.dead || e.wire.to[0].ended && e.wire.to[1].ended
}

func (e *end) WaitGone(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() {
		e.wire.mu.Lock()
		defer e.wire.mu.Unlock()
		e.wire.change.Broadcast()
	})()
	e.wire.mu.Lock()
	defer e.wire.mu.Unlock()
	for {
		switch {
		case e.closed:
			return net.ErrClosed
		case e.gone():
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		}
		e.wire.change.Wait()
	}
}

func (e *end) SetMeters(read, written *Meter) { e.read, e.written = read, written }

func (e *end) LocalAddr() string { return "198.18.0.1:1024" }

func (e *end) Resumed() time.Time { return e.pause.resumed() }

func (e *end) Copy(client Conn, ended func(Half, error)) {
	go func() {
		_, err := io.Copy(writerOnly{e}, readerOnly{clientReader{client}})
		ended(HalfClient, err)
	}()
	go func() {
		_, err := io.Copy(writerOnly{clientWriter{client}}, readerOnly{e})
		ended(HalfGuest, err)
	}()
}

type (
	readerOnly   struct{ io.Reader }
	writerOnly   struct{ io.Writer }
	clientReader struct{ io.Reader }
	clientWriter struct{ io.Writer }
)

func (c clientReader) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = &ClientError{Err: err}
	}
	return n, err
}

func (c clientWriter) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	if err != nil {
		err = &ClientError{Err: err}
	}
	return n, err
}

// A blind end is one that cannot be watched.
type blind struct{ GuestConn }

// A bed is a relay under test, between a client and a server.
type bed struct {
	client, server  *end // the peers
	ourC, ourG      *end // what TCP has
	toGuest, toHost Meter
	halves          []Half
	ended           chan End
}

// start runs TCP over two wires whose streams hold limit bytes. It is called in
// a synctest bubble.
func start(tb testing.TB, limit int, o Options) *bed {
	tb.Helper()
	b := &bed{ended: make(chan End, 1)}
	b.ourC, b.client = newWire(limit)
	b.ourG, b.server = newWire(limit)
	o.ToGuest, o.ToHost = &b.toGuest, &b.toHost
	o.Halved = func(h Half) { b.halves = append(b.halves, h) }
	go func() { b.ended <- TCP(b.ourC, b.ourG, o) }()
	return b
}

// running reports whether TCP has not returned.
func (b *bed) running() bool {
	select {
	case e := <-b.ended:
		b.ended <- e
		return false
	default:
		return true
	}
}

// isReset reports whether err is what a peer sees of a reset.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
