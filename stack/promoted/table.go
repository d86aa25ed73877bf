package promoted

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/stack/relay"
)

// A Link carries frames to the guest. It is safe for concurrent use.
type Link interface {
	// Send hands frames to the guest in order, without waiting, and returns how many
	// it took: of one flow always on the same queue. Their memory is the caller's
	// again. If they are not all taken, w, unless nil, is told once there may be room,
	// later, from any goroutine and under no lock; never when the link has ended.
	Send(flow uint32, frames []datapath.Frame, w Waiter) int
	// Node is the guest's Ethernet address.
	Node() [6]byte
}

// A Waiter waits for room on a Link.
type Waiter interface {
	Room()
	// Over reports whether it waits no more: a Link that never has room may forget it.
	// It may be called under any lock.
	Over() bool
}

// A Clock is the time of a link: it stands while the guest is paused. It is
// monotonic.
type Clock interface {
	Now() time.Duration
	// Until returns a timer that calls f, in a goroutine of its own, once it was set.
	Until(f func()) Timer
	// Resumed returns when a pause last ended, as relay.GuestConn has it.
	Resumed() time.Time
}

// A Timer is set for one moment at a time.
type Timer interface {
	Set(d time.Duration)
	Stop()
}

// Options says what a Table's flows are like.
type Options struct {
	Link  Link
	Clock Clock
	MAC   [6]byte    // ours
	Addr  netip.Addr // ours, IPv4
	MTU   int
	// FirstPort and LastPort bound the ports that flows come from.
	FirstPort, LastPort uint16
	// Window is what a flow takes from the guest before its client has: at most so
	// many bytes lie here for each.
	Window func() int
	// Later runs f soon, in a goroutine and under no lock of the caller's.
	Later func(f func())
	// Opened and Closed are told of each flow's begin and end, Freed when the guest's
	// last segments are no longer of interest.
	Opened, Closed, Freed func(guest netip.Addr)
}

// A key names a flow: the guest's address and port, and our port.
type key uint64

func keyOf(remote [4]byte, remotePort, port uint16) key {
	return key(binary.BigEndian.Uint32(remote[:]))<<32 | key(remotePort)<<16 | key(port)
}

// A Table is the promoted flows of one link. All methods are safe for concurrent
// use.
type Table struct {
	opts  Options
	seed  maphash.Seed // of initial sequence numbers
	stamp uint32       // what timestamps begin at

	mu     sync.RWMutex
	conns  map[key]*Conn
	left   map[*Conn]struct{} // dead, but their clients have not read what came before
	port   uint16             // the next to try
	closed bool

	loop   *loop // nil without Drive
	queue  turns
	held   atomic.Int64 // buffers in use of requests
	linger atomic.Int64 // bytes kept for flows that were closed

	retransmits, resets, timeouts, outOfOrder atomic.Uint64
}

// Stats is a reading of a Table's counters.
type Stats struct {
	Flows       int    // those that linger after their end among them
	Retransmits uint64 // segments, or super-frames, sent again
	Resets      uint64 // received
	Timeouts    uint64 // retransmission time-outs
	OutOfOrder  uint64 // segments that came before their turn
}

// NewTable returns an empty Table.
func NewTable(o Options) *Table {
	t := &Table{opts: o, seed: maphash.MakeSeed(), conns: make(map[key]*Conn), left: make(map[*Conn]struct{}), port: o.FirstPort}
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	t.stamp = binary.BigEndian.Uint32(b[:])
	return t
}

// Stats reads the counters.
func (t *Table) Stats() Stats {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return Stats{
		Flows: len(t.conns), Retransmits: t.retransmits.Load(), Resets: t.resets.Load(),
		Timeouts: t.timeouts.Load(), OutOfOrder: t.outOfOrder.Load(),
	}
}

// Start begins to connect to dst. done is called once, when the guest has accepted or
// refused, or cancel was called: perhaps before Start returns. It must not wait: it
// may run on the reader of frames.
func (t *Table) Start(dst netip.AddrPort, done func(relay.GuestConn, error)) (cancel func()) {
	c := newConn(t, dst, done)
	if err := t.add(c); err != nil {
		done(nil, fmt.Errorf("dial %s: %w", dst, err))
		return func() {}
	}
	t.opts.Opened(dst.Addr())
	c.connect()
	return c.Abort
}

// add gives c a port and its place.
func (t *Table) add(c *Conn) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return net.ErrClosed
	}
	remote := c.remote.Addr().As4()
	for range int(t.opts.LastPort) - int(t.opts.FirstPort) + 1 {
		port := t.port
		if t.port++; t.port == 0 || t.port > t.opts.LastPort {
			t.port = t.opts.FirstPort
		}
		k := keyOf(remote, c.remote.Port(), port)
		if _, taken := t.conns[k]; taken {
			continue
		}
		c.begin(k, port) // before the reader can find it: a guest may guess what comes
		t.conns[k] = c
		return nil
	}
	return syscall.EADDRNOTAVAIL
}

// remove takes c's ports from it. One whose client still reads is kept for Close, until
// forget.
func (t *Table) remove(c *Conn, reads bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns[c.key] == c {
		delete(t.conns, c.key)
	}
	if reads {
		t.left[c] = struct{}{}
	}
}

// forget ends remove.
func (t *Table) forget(c *Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.left, c)
}

func (t *Table) find(k key) *Conn {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.conns[k]
}

// Lookup returns the flow between a port of the guest's and one of ours, nil for
// none.
func (t *Table) Lookup(remote [4]byte, remotePort, port uint16) *Conn {
	return t.find(keyOf(remote, remotePort, port))
}

// Close resets every flow and waits for the Table's goroutines. Flows that are started
// later fail.
func (t *Table) Close() {
	t.mu.Lock()
	t.closed = true
	conns := slices.AppendSeq(make([]*Conn, 0, len(t.conns)+len(t.left)), maps.Values(t.conns))
	conns = slices.AppendSeq(conns, maps.Keys(t.left))
	t.mu.Unlock()
	for _, c := range conns {
		c.Abort()
		c.forget()
	}
	t.queue.close()
	if t.loop != nil {
		t.loop.stop()
	}
}

// isn returns an initial sequence number (RFC 6528): one that rises every 4 µs, from
// where only we know.
func (t *Table) isn(k key) uint32 {
	return uint32(maphash.Comparable(t.seed, k)) + uint32(t.opts.Clock.Now()/(4*time.Microsecond))
}

// now returns our timestamp: milliseconds.
func (t *Table) now() uint32 { return t.stamp + uint32(t.opts.Clock.Now()/time.Millisecond) }

// A Batch is the flows whose segments a reader of frames has brought and not answered
// yet. It is one goroutine's.
type Batch struct {
	table *Table
	dirty []*Conn
}

// NewBatch returns an empty Batch.
func (t *Table) NewBatch() *Batch { return &Batch{table: t} }

// Take hands a segment of c's to it. The frame's memory is the caller's again.
func (b *Batch) Take(c *Conn, s *Segment) {
	if c.take(b, s) {
		b.dirty = append(b.dirty, c)
	}
}

// End answers what has come.
func (b *Batch) End() {
	if len(b.dirty) == 0 {
		return
	}
	for i, c := range b.dirty {
		c.settle()
		b.dirty[i] = nil
	}
	b.dirty = b.dirty[:0]
}
