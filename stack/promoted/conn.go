package promoted

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/culvertnet/culvert/stack/relay"
)

// States of a Conn, fewer than TCP's: which ends of stream have passed says the rest.
type state uint8

const (
	synSent state = iota
	open
	dead // reset, by either side, or given up: nothing more is sent
)

// A Conn is one promoted flow: the guest's end of it, as a relay.GuestConn. All
// methods are safe for concurrent use.
type Conn struct {
	table  *Table
	key    key
	remote netip.AddrPort
	port   uint16
	done   func(relay.GuestConn, error) // nil once it was called

	mu    sync.Mutex
	state state
	err   error // what killed it
	sender
	receiver
	clocks
	head head // of the frames to the guest

	client   relay.Pollable // nil before Copy, and after Close
	fd       int            // the client's, within Control
	sending  func(fd uintptr)
	taking   func(fd uintptr)
	ended    func(relay.Half, error)
	toGuest  stream
	toHost   stream
	closed   bool          // Close or Abort was called
	freed    atomic.Bool   // set under mu
	reads    bool          // and its client had not read everything then
	batch    *Batch        // that is to settle it, if there is one
	late     bool          // in the loop's list of those that acknowledge late
	queued   bool          // in the Table's turns
	awaiting bool          // waits for room on the link
	gone     chan struct{} // closed when the flow is dead; nil while nobody waits for that

	fromGuest, towards *relay.Meter // see SetMeters
}

// A stream is one direction of a flow's payload.
type stream struct {
	over bool  // nothing more passes
	told bool  // and ended was called
	err  error // with this
}

func (s *stream) end(err error) {
	if !s.over {
		s.over, s.err = true, err
	}
}

var (
	_ relay.GuestConn = (*Conn)(nil)
	_ relay.Watcher   = (*Conn)(nil)
)

func newConn(t *Table, dst netip.AddrPort, done func(relay.GuestConn, error)) *Conn {
	return &Conn{table: t, remote: dst, done: done}
}

// begin makes c what connect and the guest's segments need, which may come from now on.
func (c *Conn) begin(k key, port uint16) {
	c.key, c.port = k, port
	c.head.init(&c.table.opts, port, c.remote)
	c.una = c.table.isn(k)
	c.nxt, c.max = c.una+1, c.una+1
	c.mss = leastMSS
	c.rto = firstRTO
}

// connect sends the first segment.
func (c *Conn) connect() {
	c.lock()
	if c.state == synSent { // and not closed before it began
		c.sendSYN()
		c.resend.set(c, c.rto)
	}
	c.unlock()
}

// take takes a segment of a batch, and reports whether b has to settle what comes of it:
// not if it was told so before, or another reader's batch was.
func (c *Conn) take(b *Batch, s *Segment) bool {
	c.mu.Lock() // and not lock: this is what gathers
	defer c.unlock()
	c.heard = c.table.opts.Clock.Now()
	c.unanswered = 0
	switch {
	case c.freed.Load():
		return false
	case c.state == synSent:
		c.takeAnswer(s)
	case c.state == dead:
		return false
	default:
		c.takeOpen(s)
	}
	if c.batch == nil && !c.freed.Load() {
		c.batch = b
		return true
	}
	if c.batch != b {
		c.flush() // now, or the frame would be gone when the other batch ends
	}
	return false
}

// takeAnswer takes the answer to our first segment (RFC 9293, 3.10.7.3).
func (c *Conn) takeAnswer(s *Segment) {
	if s.has(flagACK) && s.ack != c.una+1 {
		// The guest remembers another flow on these ports: it is told, and asked again.
		if !s.has(flagRST) {
			c.sendReset(s.ack)
			c.sendSYN()
		}
		return
	}
	switch {
	case s.has(flagRST):
		if s.has(flagACK) {
			c.table.resets.Add(1)
			c.die(syscall.ECONNREFUSED)
		}
		return
	case !s.has(flagSYN) || !s.has(flagACK):
		return
	}
	c.state = open
	c.una = s.ack
	c.startReceiving(s)
	c.startSending(s)
	c.resend.stop()
	// By itself, as kernels do: gVisor as a guest (runsc) puts what comes with it behind
	// an end of stream that follows, and drops that, which costs the flow a second.
	c.ackNow = true
	c.acknowledge()
}

// settle answers the segments of a batch. Where there is a loop it runs on it.
func (c *Conn) settle() {
	c.lock()
	c.batch = nil
	if c.state == open && c.done != nil {
		done := c.done
		c.done = nil
		c.mu.Unlock()
		done(c, nil) // and so perhaps Copy
		c.lock()
	}
	c.pushInTurn()
	if l := c.table.loop; l == nil || !c.ackNow || int(c.rcvNxt-c.ackSent) >= lateBytes {
		c.acknowledge()
	} else {
		if !c.late {
			c.late = true
			l.late = append(l.late, late{c, l.round})
		}
		if int(c.rcvNxt-c.ackSent) >= ackBytes {
			c.delay.setOnce(c, ackDelay) // a round of many flows in bulk takes long
		}
	}
	c.unlock()
}

// turn has c move what it may at once.
func (c *Conn) turn() {
	c.lock()
	c.queued = false
	c.push(turnBytes)
	c.acknowledge()
	c.unlock()
}

// Room implements Waiter.
func (c *Conn) Room() {
	c.lock()
	c.awaiting = false
	c.waited = 0
	c.resend.advance(c, c.rto)
	switch {
	case c.state == synSent && !c.freed.Load():
		c.sendSYN()
	case c.missing && c.una != c.max && c.state == open && !c.freed.Load():
		c.again(c.mss)
	}
	c.push(turnBytes)
	c.acknowledge()
	c.unlock()
}

// Over implements Waiter.
func (c *Conn) Over() bool { return c.freed.Load() }

// die ends c because of err, a reset or a time-out. c.mu is held.
func (c *Conn) die(err error) {
	if c.state == dead {
		return
	}
	c.state, c.err = dead, err
	if c.gone != nil {
		close(c.gone)
	}
	c.toGuest.end(err)
	if c.pending.size == 0 {
		c.toHost.end(err)
	}
	c.free()
}

// forget frees a flow that lingers after its end.
func (c *Conn) forget() {
	c.lock()
	c.die(net.ErrClosed)
	c.unlockLater()
}

// free gives back what c holds, but for what the client is still to be given. c.mu is
// held.
func (c *Conn) free() {
	if c.freed.Load() {
		return
	}
	c.freed.Store(true)
	c.stopTimers()
	c.dropHeld()
	c.early = early{}
	c.reads = c.pending.size > 0 && !c.closed
	c.table.remove(c, c.reads)
	c.table.opts.Freed(c.remote.Addr())
}

// lock takes c.mu, for all but take: what that has gathered goes to the client before
// anything else happens to the flow.
func (c *Conn) lock() {
	c.mu.Lock()
	c.flush()
}

// unlock lets c.mu go and tells what has ended meanwhile.
func (c *Conn) unlock() {
	if !c.news() {
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	c.tell()
}

// unlockLater is unlock for who is called under locks that those who are told may take.
func (c *Conn) unlockLater() {
	news := c.news()
	c.mu.Unlock()
	if news {
		c.table.opts.Later(c.tell)
	}
}

// news reports whether there is something to tell.
func (c *Conn) news() bool {
	if c.done != nil {
		return c.state == dead
	}
	return c.ended != nil && (c.toGuest.over && !c.toGuest.told || c.toHost.over && !c.toHost.told)
}

// tell tells what has ended, in the order that leaves the client what was sent to it.
func (c *Conn) tell() {
	c.lock()
	if done := c.done; done != nil && c.state == dead {
		c.done = nil
		err := c.err
		c.leave()
		c.mu.Unlock()
		done(nil, fmt.Errorf("dial %s: %w", c.remote, err))
		return
	}
	if c.ended == nil {
		c.mu.Unlock()
		return
	}
	toGuest, toHost := c.toGuest, c.toHost
	c.toGuest.told, c.toHost.told = toGuest.over, toHost.over
	c.mu.Unlock()
	if toGuest.over && !toGuest.told {
		c.ended(relay.HalfClient, toGuest.err)
	}
	if toHost.over && !toHost.told {
		c.ended(relay.HalfGuest, toHost.err)
	}
}

// leave takes c off the books, the first time. c.mu is held.
func (c *Conn) leave() {
	if !c.closed {
		c.closed = true
		if c.reads {
			c.table.forget(c)
		}
		c.table.opts.Closed(c.remote.Addr())
	}
}

// freeIfDone frees a flow that was closed once both ends of stream have passed; for a
// while it still answers a guest that has not heard so, if it was us who ended first.
// c.mu is held.
func (c *Conn) freeIfDone() {
	if !c.closed || c.state != open || c.freed.Load() {
		return
	}
	switch {
	case !c.finAcked():
		c.lingering.setOnce(c, drainWait)
	case !c.finTaken:
		c.lingering.setOnce(c, finWait)
	case c.finFirst:
		c.lingering.setOnce(c, timeWait)
		c.lingering.advance(c, timeWait) // and from now on nothing puts it off
	default:
		c.die(net.ErrClosed)
	}
}

// Unreachable tells a flow that the guest has not answered that it cannot: a router
// behind the node says so (RFC 1122, 4.2.3.9).
func (c *Conn) Unreachable(err error) {
	c.lock()
	defer c.unlock()
	if c.state == synSent {
		c.die(err)
	}
}
