package promoted

import (
	"io"
	"slices"
	"sync"
	"syscall"

	"github.com/culvertnet/culvert/stack/relay"
)

const (
	// ownScale is the shift of the windows that we show: the largest, 65535 << 7 or
	// 8 MiB, in steps of 128 bytes.
	ownScale = 7
	// ackBytes is how much may come before it is acknowledged at the end of the batch,
	// whatever else: more than a request or an answer.
	ackBytes = 4 << 10
	// lateBytes is how much of a bulk may be acknowledged late, by a loop that is busy: a
	// quarter of the usual window. Each acknowledgement makes the guest's kernel work,
	// here.
	lateBytes = 256 << 10
	// calm is after how many exchanges of one segment each way an acknowledgement waits
	// for the next segment of ours to carry it.
	calm = 3
)

// A receiver is a Conn's direction from the guest.
type receiver struct {
	rcvNxt    uint32
	edge      uint32 // what we have promised to take
	ackSent   uint32 // the last acknowledgement
	recent    uint32 // the guest's latest timestamp, to be echoed
	shift     uint8  // of our window
	finTaken  bool
	gathered  gathered
	pending   pending
	early     early
	full      bool // the client's socket has no room
	watched   bool // and is watched for it
	added     bool // to the loop's set, if there is one
	ackDue    bool // something was not acknowledged
	ackNow    bool // and is not to wait
	exchanges int  // of one segment each way, one after the other
	taken     int  // segments with payload since we last sent some
}

// startReceiving takes what the guest's first segment says of its direction.
func (c *Conn) startReceiving(s *Segment) {
	c.rcvNxt = s.seq + 1
	c.ackSent = c.rcvNxt
	c.edge = c.rcvNxt
	c.recent = s.stamp
	if s.scale >= 0 {
		c.shift = ownScale
	}
}

// takeOpen takes a segment of a flow that is open (RFC 9293, 3.10.7.4).
func (c *Conn) takeOpen(s *Segment) {
	span := s.span()
	switch {
	case c.stamps && s.stamped && !s.has(flagRST) && before(s.stamp, c.recent) && c.heard-c.stampedAt < stampLife:
		c.ackNow = true // RFC 7323, 5.3
		return
	case s.has(flagRST):
		switch {
		case s.seq == c.rcvNxt:
			c.table.resets.Add(1)
			c.resetByGuest()
		case !before(s.seq, c.rcvNxt) && before(s.seq, c.edge):
			c.ackNow = true // RFC 5961, 3.2
		}
		return
	case s.has(flagSYN):
		c.ackNow = true // RFC 5961, 4.2; and our first acknowledgement may be lost
		return
	case !s.has(flagACK):
		return
	case span > 0 && !before(c.rcvNxt, s.seq+span), // old
		span == 0 && before(s.seq, c.rcvNxt), // a probe
		before(c.edge, s.seq):                // beyond what was promised
		c.ackNow = true
		if before(s.seq, c.rcvNxt) {
			c.takeAck(s) // it may say more than the one before
			c.freeIfDone()
		}
		return
	}
	if c.stamps && s.stamped && !before(c.ackSent, s.seq) {
		c.recent, c.stampedAt = s.stamp, c.heard
	}
	if !c.takeAck(s) {
		c.ackNow = true
		return
	}
	c.freeIfDone()
	if c.freed.Load() || span == 0 {
		return
	}
	if before(c.rcvNxt, s.seq) {
		c.table.outOfOrder.Add(1)
		c.early.add(s, int(c.edge-s.seq), c.table.opts.Window())
		c.ackNow = true // and so the third time a request for what is missing (RFC 5681)
		return
	}
	c.takePayload(s)
	for len(c.early.segments) > 0 && !before(c.rcvNxt, c.early.segments[0].seq) && !c.freed.Load() && !c.finTaken {
		c.ackNow = true
		if next := c.early.take(); before(c.rcvNxt, next.seq+next.span()) {
			c.takePayload(&next)
		}
	}
}

// takePayload takes what is new of a segment which is due.
func (c *Conn) takePayload(s *Segment) {
	in := *s
	if old := int(c.rcvNxt - in.seq); old > 0 {
		in.cut(min(old, in.size()))
	}
	fin := in.has(flagFIN)
	if most := int(c.edge - c.rcvNxt); in.size() > most {
		in.keep(most)
		fin = false
		c.ackNow = true // with the window, which the guest may have forgotten
	}
	n := in.size()
	switch {
	case c.finTaken:
		c.ackNow = true // nothing comes behind the end
		return
	case n > 0 && (c.closed || c.toHost.over):
		if c.closed {
			c.reset(io.ErrClosedPipe) // nobody will read it (RFC 9293, 3.6)
		}
		return // or the relay is about to
	case n > 0:
		c.rcvNxt += uint32(n)
		c.taken++
		c.due(int(c.rcvNxt - c.ackSent))
		c.give(in)
	}
	if fin {
		c.flush()
		c.rcvNxt++
		c.finTaken = true
		c.ackDue = true
		c.ackNow = c.ackNow || c.finSent // or else our own end may carry it, which often follows
		c.endHost(nil)
		c.freeIfDone()
	}
}

// give gives the payload of a segment to the client, together with what else the batch
// brings, or keeps it.
func (c *Conn) give(in Segment) {
	if c.client == nil || c.full { // before Copy, or its socket is full
		c.pending.add(in.first)
		c.pending.add(in.rest)
		return
	}
	if c.gathered.add(in.first, in.rest) {
		c.flush()
	}
}

// flush gives the client what was gathered. The frames that it lies in are somebody
// else's after the batch, and whoever else has to do with the flow is to find nothing
// but what the client was given or is pending: see lock.
func (c *Conn) flush() {
	if c.gathered.n == 0 {
		return
	}
	switch {
	case c.toHost.over:
	case c.client == nil: // dropped, and so over
	default:
		if err := c.client.Control(c.taking); err != nil {
			c.clientGone(err)
		}
	}
	c.gathered.clear()
}

// due is told that n bytes are not acknowledged.
func (c *Conn) due(n int) {
	c.ackDue = true
	if n >= ackBytes || c.exchanges < calm || c.taken > 1 {
		c.ackNow = true
	}
}

// answered is told that new payload is sent, and with it an acknowledgement.
func (c *Conn) answered() {
	if c.taken == 1 {
		c.exchanges++
	} else if c.taken > 1 {
		c.exchanges = 0
	}
	c.taken = 0
}

// acknowledge sends what no segment has said meanwhile. c.mu is held.
func (c *Conn) acknowledge() {
	if c.state != open || c.freed.Load() {
		return
	}
	if !c.ackNow {
		// A guest that was shown no room is told of it in time (RFC 9293, 3.8.6.2.2).
		most := c.table.opts.Window()
		if free := most - c.pending.size; int(c.edge-c.rcvNxt) < most/4 && free >= most/2 {
			c.ackNow = true
		}
	}
	switch {
	case c.ackNow:
		sc := scratches.Get().(*scratch)
		c.transmit(sc, c.nxt, flagACK, nil)
		scratches.Put(sc)
	case c.ackDue && !c.delay.isSet():
		c.delay.set(c, ackDelay)
	}
}

// A late is a flow that has something to acknowledge while the loop is busy. What else
// the loop has seen may make it more, or have the flow send something that says it too.
type late struct {
	conn  *Conn
	since int // round of the loop
}

// acknowledgeLate is acknowledge for a flow that is late, unless it is in bulk and that
// is not meant, too. It reports whether the flow is late no more.
func (c *Conn) acknowledgeLate(bulk bool) bool {
	c.lock()
	defer c.unlock()
	if !bulk && c.ackNow && int(c.rcvNxt-c.ackSent) >= ackBytes {
		return false
	}
	c.late = false
	c.acknowledge()
	return true
}

// endHost ends the direction to the client when it has been given everything.
func (c *Conn) endHost(err error) {
	if c.pending.size == 0 {
		c.toHost.end(err)
	}
}

// resetByGuest ends the flow; what came before the reset still goes to the client.
func (c *Conn) resetByGuest() {
	c.flush()
	c.die(syscall.ECONNRESET)
}

// drain gives the client what it has not taken. c.mu is held.
func (c *Conn) drain() {
	if c.pending.size == 0 || c.client == nil || c.toHost.over || c.full {
		return
	}
	if err := c.client.Control(c.taking); err != nil {
		c.clientGone(err)
	}
}

// drainTo is what drain, and flush, do with the client's descriptor.
func (c *Conn) drainTo(fd uintptr) {
	c.fd = int(fd)
	if c.pending.size > 0 {
		c.keepGathered(0)
		for c.pending.size > 0 {
			n, err := c.write([][]byte{c.pending.front()})
			c.pending.drop(n)
			if !c.wrote(n, err) {
				return
			}
		}
		if c.state == dead {
			c.toHost.end(c.err)
		} else if c.finTaken {
			c.toHost.end(nil)
		}
		return
	}
	if c.gathered.n == 0 {
		return
	}
	n, err := c.write(c.gathered.pieces[:c.gathered.n])
	if c.wrote(n, err) && n < c.gathered.size {
		c.watchRoom()
	}
	if !c.toHost.over {
		c.keepGathered(n)
	}
}

// keepGathered has all but the first n bytes of what was gathered pending.
func (c *Conn) keepGathered(n int) {
	for _, p := range c.gathered.pieces[:c.gathered.n] {
		k := min(n, len(p))
		n -= k
		c.pending.add(p[k:])
	}
	c.gathered.clear()
}

// wrote looks at what a write of n bytes has come to, and reports whether to go on.
func (c *Conn) wrote(n int, err error) bool {
	if n > 0 {
		c.fromGuest.Add(n)
	}
	switch err {
	case nil:
		return true
	case errAgain:
		c.watchRoom()
	default:
		c.toHost.end(&relay.ClientError{Err: err})
		c.pending.clear()
	}
	return false
}

// watchRoom has the client's socket, which has none, watched for room.
func (c *Conn) watchRoom() {
	c.full = true
	if !c.watched {
		c.watched = true
		c.table.opts.Later(c.watchWrite) // not within Control
	}
}

func (c *Conn) watchWrite() {
	c.lock()
	defer c.unlock()
	if c.client == nil {
		return
	}
	watch := c.client.WatchWrite
	if l := c.table.loop; l != nil {
		watch = func() error { return l.addWrite(c) }
	}
	if err := watch(); err != nil {
		c.clientGone(err)
	}
}

// showWindow returns the window to show the guest, and promises it. A promise is not
// taken back (RFC 9293, 3.8.6.2.1).
func (c *Conn) showWindow() uint16 {
	free := c.table.opts.Window() - c.pending.size - c.gathered.size
	if edge := c.rcvNxt + uint32(max(free, 0)); before(c.edge, edge) {
		c.edge = edge
	}
	shown := min(int(c.edge-c.rcvNxt)>>c.shift, 0xffff)
	return uint16(shown)
}

// A gathered is the payload of segments of one batch, in order and in the frames' memory.
type gathered struct {
	pieces [2 * maxGathered][]byte
	n      int // of pieces
	size   int // in bytes
}

// maxGathered is how many super-frames are given to a client at once: as many as stay in
// the processor's cache together.
const maxGathered = 4

// add adds a segment's payload. It reports whether that is all there is room for.
func (g *gathered) add(first, rest []byte) (full bool) {
	for _, p := range [...][]byte{first, rest} {
		if len(p) > 0 {
			g.pieces[g.n] = p
			g.n++
			g.size += len(p)
		}
	}
	return g.n > len(g.pieces)-2
}

func (g *gathered) clear() {
	clear(g.pieces[:g.n])
	g.n, g.size = 0, 0
}

// An early is segments that came before their turn, in order.
type early struct {
	segments []Segment
	size     int
}

// maxEarly bounds how many segments there are, each of which costs beside its bytes.
const maxEarly = 64

// add keeps a copy of s, whose first room bytes were promised to be taken, unless there
// is too much already: most bytes in all.
func (e *early) add(s *Segment, room, most int) {
	in := *s
	if room < in.size() {
		in.keep(room)
		in.flags &^= flagFIN
	}
	if len(e.segments) == maxEarly || e.size+in.size() > most {
		return // the guest sends it again
	}
	i, _ := slices.BinarySearchFunc(e.segments, in.seq, func(s Segment, seq uint32) int { return int(int32(s.seq - seq)) })
	in.first, in.rest = append(append(make([]byte, 0, in.size()), in.first...), in.rest...), nil
	e.segments = slices.Insert(e.segments, i, in)
	e.size += in.size()
}

// take returns the first.
func (e *early) take() Segment {
	s := e.segments[0]
	e.segments = slices.Delete(e.segments, 0, 1)
	e.size -= s.size()
	return s
}

// A pending is bytes that the client has not taken, in chunks.
type pending struct {
	chunks []chunk
	size   int
}

// A chunk is some of them, in memory that is pooled if it is large.
type chunk struct {
	bytes  []byte
	pooled *[chunkSize]byte
}

const (
	// chunkSize is that of a super-frame's payload.
	chunkSize = 64 << 10
	// leastChunk is what the first few bytes take.
	leastChunk = 4 << 10
)

var chunks = sync.Pool{New: func() any { return new([chunkSize]byte) }}

// newChunk returns an empty chunk for n bytes at least, or a pooled one's.
func newChunk(n int) chunk {
	if n <= chunkSize/2 {
		return chunk{bytes: make([]byte, 0, max(n, leastChunk))}
	}
	b := chunks.Get().(*[chunkSize]byte)
	return chunk{b[:0], b}
}

func (c *chunk) free() {
	if c.pooled != nil {
		chunks.Put(c.pooled)
	}
	*c = chunk{}
}

func (p *pending) add(b []byte) {
	for len(b) > 0 {
		if k := len(p.chunks); k == 0 || len(p.chunks[k-1].bytes) == cap(p.chunks[k-1].bytes) {
			p.chunks = append(p.chunks, newChunk(len(b)))
		}
		last := &p.chunks[len(p.chunks)-1].bytes
		n := min(len(b), cap(*last)-len(*last))
		*last = append(*last, b[:n]...)
		b = b[n:]
		p.size += n
	}
}

func (p *pending) front() []byte { return p.chunks[0].bytes }

// drop forgets the first n bytes, of the first chunk.
func (p *pending) drop(n int) {
	if n <= 0 {
		return
	}
	p.size -= n
	first := &p.chunks[0]
	if n < len(first.bytes) {
		first.bytes = first.bytes[n:]
		return
	}
	first.free()
	if p.chunks = p.chunks[1:]; len(p.chunks) == 0 {
		p.chunks = nil
	}
}

func (p *pending) clear() {
	for i := range p.chunks {
		p.chunks[i].free()
	}
	*p = pending{}
}
