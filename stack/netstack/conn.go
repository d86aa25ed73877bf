package netstack

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// A Conn is the guest's end of a TCP flow: gVisor's endpoint as a
// relay.GuestConn. One goroutine may Read and one Write, or Copy does both; the
// other methods may be called at any time.
type Conn struct {
	stack *Stack
	ep    tcpip.Endpoint
	peer  netip.Addr
	queue waiter.Queue

	events             waiter.Entry
	readable, writable notifier                 // of calls that wait
	dialing            atomic.Pointer[dialing]  // until the guest has answered
	copy               atomic.Pointer[flowCopy] // once there are copies

	closed  atomic.Bool // Close or Abort was called
	settled sync.Once   // the flow was taken off the books
	worked  atomic.Bool // the reader is at work on it; see inline.go
	tuple   tuple       // of inline.go; under inlined.mu

	// reading is held while received bytes are looked at in place: what the
	// endpoint has received may be freed only between two looks.
	reading sync.Mutex

	read, written *relay.Meter // see SetMeters
}

var _ relay.GuestConn = (*Conn)(nil)

func newConn(s *Stack, peer netip.Addr) *Conn {
	c := &Conn{stack: s, peer: peer, readable: make(notifier, 1), writable: make(notifier, 1)}
	c.events.Init((*connEvents)(c), waiter.ReadableEvents|waiter.WritableEvents|waiter.EventHUp|waiter.EventErr)
	c.queue.EventRegister(&c.events)
	s.book(peer)
	return c
}

// A connEvents is a Conn as the listener of its endpoint's events.
type connEvents Conn

// NotifyEvent implements waiter.EventListener. It is called under gVisor's locks
// and only leaves word.
func (e *connEvents) NotifyEvent(mask waiter.EventMask) {
	c := (*Conn)(e)
	if k := c.copy.Load(); k != nil {
		k.guestReady(mask)
		if mask&(waiter.EventHUp|waiter.EventErr) != 0 {
			c.readable.wake() // for WaitGone
		}
		return
	}
	if d := c.dialing.Load(); d != nil {
		c.stack.runner.add(d)
	}
	if mask&(waiter.ReadableEvents|waiter.EventHUp|waiter.EventErr) != 0 {
		c.readable.wake()
	}
	if mask&(waiter.WritableEvents|waiter.EventHUp|waiter.EventErr) != 0 {
		c.writable.wake()
	}
}

// book counts a flow to peer and admits peer's packets.
func (s *Stack) book(peer netip.Addr) {
	s.flows.Add(1)
	s.budget.add(1)
	s.link.filter.allow(peer)
}

// unbook ends one book.
func (s *Stack) unbook(peer netip.Addr) {
	s.link.filter.release(peer)
	s.budget.add(-1)
	s.flows.Add(-1)
}

func (c *Conn) settle() { c.settled.Do(func() { c.stack.unbook(c.peer) }) }

// SetMeters implements relay.GuestConn.
func (c *Conn) SetMeters(read, written *relay.Meter) { c.read, c.written = read, written }

// Read implements relay.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		w := tcpip.SliceWriter(p)
		c.reading.Lock()
		res, err := c.ep.Read(&w, tcpip.ReadOptions{})
		c.reading.Unlock()
		if err == nil {
			c.read.Add(res.Count)
			return res.Count, nil
		}
		if err := c.awaitReadable(err); err != nil {
			return 0, err
		}
	}
}

// awaitReadable waits if err says that nothing is there yet, and returns the
// error of the stream otherwise.
func (c *Conn) awaitReadable(err tcpip.Error) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	switch err.(type) {
	case *tcpip.ErrWouldBlock:
		<-c.readable
		return nil
	case *tcpip.ErrClosedForReceive:
		return c.endOfStream()
	}
	return wrapError(err)
}

// endOfStream returns what the end of received bytes means. gVisor tells of a
// reset once, to whichever side asks first; the other one finds nothing more to
// read, which must not pass for the guest's end (C-13). The state tells for good.
func (c *Conn) endOfStream() error {
	if tcp.EndpointState(c.ep.State()) == tcp.StateError {
		return syscall.ECONNRESET
	}
	return io.EOF
}

// Write implements relay.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	r := bytes.NewReader(p)
	for r.Len() > 0 {
		n, err := c.ep.Write(r, tcpip.WriteOptions{})
		c.written.Add(int(n))
		if err := c.awaitWritable(n, err); err != nil {
			return len(p) - r.Len(), err
		}
	}
	return len(p), nil
}

// awaitWritable waits if a write of n bytes and err says that there is no room,
// and returns the error of the stream otherwise.
func (c *Conn) awaitWritable(n int64, err tcpip.Error) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	switch err.(type) {
	case nil:
		if n > 0 {
			return nil
		}
	case *tcpip.ErrWouldBlock:
	default:
		return wrapError(err)
	}
	<-c.writable
	return nil
}

// CloseRead implements relay.Conn.
func (c *Conn) CloseRead() error { return wrapError(c.ep.Shutdown(tcpip.ShutdownRead)) }

// CloseWrite implements relay.Conn.
func (c *Conn) CloseWrite() error { return wrapError(c.ep.Shutdown(tcpip.ShutdownWrite)) }

// KeepAlive implements relay.Conn.
func (c *Conn) KeepAlive() error {
	idle, interval := tcpip.KeepaliveIdleOption(keepAliveIdle), tcpip.KeepaliveIntervalOption(keepAliveInterval)
	if err := c.ep.SetSockOpt(&idle); err != nil {
		return wrapError(err)
	}
	if err := c.ep.SetSockOpt(&interval); err != nil {
		return wrapError(err)
	}
	if err := c.ep.SetSockOptInt(tcpip.KeepaliveCountOption, keepAliveCount); err != nil {
		return wrapError(err)
	}
	c.ep.SocketOptions().SetKeepAlive(true)
	return nil
}

// Abort implements relay.Conn.
func (c *Conn) Abort() { c.finish(c.ep.Abort) }

// Close implements relay.Conn. Received bytes that nobody read make it a reset,
// as on Linux.
func (c *Conn) Close() error {
	c.finish(c.ep.Close)
	return nil
}

// finish ends the endpoint with end, the first time, and wakes who waits for it.
func (c *Conn) finish(end func()) {
	if !c.closed.CompareAndSwap(false, true) {
		return
	}
	c.reading.Lock()
	end()
	c.reading.Unlock()
	c.outline()
	if d := c.dialing.Load(); d != nil {
		c.stack.runner.add(d)
	}
	if k := c.copy.Load(); k != nil {
		k.wakeBoth()
	}
	c.readable.wake()
	c.writable.wake()
	c.settle()
}

// Resumed implements relay.GuestConn.
func (c *Conn) Resumed() time.Time { return c.stack.clock.resumed() }

// LocalAddr returns the flow's source as the guest sees it.
func (c *Conn) LocalAddr() string {
	a, err := c.ep.GetLocalAddress()
	if err != nil {
		return ""
	}
	return addrPort(a).String()
}
