package promoted

import (
	"io"
	"sync"

	"github.com/culvertnet/culvert/stack/relay"
)

// # Theory of operation
//
// Sequence space towards the guest, and where its bytes lie:
//
//	     una            nxt           max
//	──────┼──────────────┼─────────────┼──────────────► sequence numbers
//	 acked│ under way    │ sent before,│ not sent
//	      │              │ to be again │
//	      ├─ held ─┼─ peeked, in the client's socket ─┼─ not looked at ─►
//
// nxt is max unless something is sent again: then it has gone back to una, and all
// behind it goes out again as far as the guest's acknowledgements do not say
// otherwise. The bytes from una on are first those that were read and kept (held),
// a request's, and then those at the head of the client's socket.
//
// What is read and what is peeked: with nothing under way but what is held, up to
// heldSize bytes are read. A read that finds more than that begins a bulk, which
// is peeked until all of it was acknowledged.

const (
	// turnBytes is what a flow may send at once before others have their turn: 16
	// super-frames, some 300 µs of the loop's time. With four, whoever reads them in the
	// guest is woken four times as often, and 8 and 64 flows are slower by a sixth.
	turnBytes = 1 << 20
	// maxFlight bounds what is under way to the guest: 10 Gbit/s for 3 ms, which a busy
	// guest may take to get to it. The guest's window is the usual bound.
	maxFlight = 4 << 20
	// heldSize is what is read at once instead of peeked: a usual request.
	heldSize = 16 << 10
	// spentBytes is how much the guest has acknowledged before it is taken from the
	// client's socket, while there is more in it: each time costs a system call.
	spentBytes = 256 << 10
	// maxHeld bounds how many buffers requests may hold in all flows of a Table, for a
	// guest that does not acknowledge them: 4096 × 16 KiB = 64 MiB.
	maxHeld = 4096
	// maxLinger bounds what is kept of flows that are closed before the guest has
	// acknowledged what their clients have sent.
	maxLinger = 64 << 20

	// leastMSS is what we send at least in a segment, whatever the guest asks for: less
	// would cost us more than it.
	leastMSS = 88
	// defaultMSS is that of a guest that does not say (RFC 9293, 3.7.1).
	defaultMSS = 536
	// firstSegments is the congestion window of a new flow, in segments (RFC 6928).
	firstSegments = 10
	// dupThreshold is how many duplicate acknowledgements mean a loss (RFC 5681).
	dupThreshold = 3
)

// A sender is a Conn's direction to the guest.
type sender struct {
	una, nxt, max uint32
	end           uint32 // where the client's stream ends, once finished is known to be so
	window        int    // what the guest takes, from una
	widest        int    // the widest that the window was
	windowSeq     uint32 // the segment that said so, and its acknowledgement
	windowAck     uint32
	scale         uint8 // of the guest's window
	mss           int   // payload of a segment
	stamps        bool  // both sides stamp their segments

	congestion, threshold int // RFC 5681's cwnd and ssthresh
	dups                  int
	recovering            bool
	recovery              uint32 // what ends recovering
	missing               bool   // the link had no room for what was to be sent again

	readable  bool // the client's socket may hold something that was not looked at
	finished  bool // the client's socket has told of an end, or worse
	eof       bool // the client's stream has ended, at end
	finWanted bool // and the guest is to hear of it
	finSent   bool
	finFirst  bool // before the guest's own end
	forced    bool // send a byte though there is no room: the guest may have forgotten to say
	bulk      bool // peek

	held    []byte // from una on, read from the client's socket
	heldBuf *[heldSize]byte
	kept    int // of held, what was counted in Table.linger
	peekSet bool
	peekOff int // the client socket's
	spent   int // bytes at the head of the client's socket that the guest has acknowledged
	budget  int // of a push
}

// startSending takes what the guest's first segment says of our direction.
func (c *Conn) startSending(s *Segment) {
	mss := defaultMSS
	if s.mss != 0 {
		mss = int(s.mss)
	}
	mss = min(mss, c.table.opts.MTU-ipHeader-tcpHeader)
	c.stamps = s.stamped
	if c.stamps {
		mss -= stampsSize
		c.measure(s)
	}
	c.mss = max(mss, leastMSS)
	c.head.established(c.stamps)
	if s.scale >= 0 {
		c.scale = uint8(s.scale)
	}
	c.window = int(s.window) // not scaled, in a SYN
	c.widest = c.window
	c.windowSeq, c.windowAck = s.seq, s.ack
	c.congestion, c.threshold = min(firstSegments*c.mss, maxFlight), maxFlight
}

// flight is how much is under way.
func (c *Conn) flight() int { return int(c.nxt - c.una) }

// inSocket is how many bytes under way, or to be sent again, lie in the client's
// socket.
func (c *Conn) inSocket() int {
	n := int(c.max-c.una) - len(c.held)
	if c.finSent {
		n--
	}
	return max(n, 0)
}

// withClient calls f with fd as the client's descriptor, if there is a client. It is
// for what is rare.
func (c *Conn) withClient(f func()) {
	if c.client == nil {
		f()
		return
	}
	if err := c.client.Control(func(fd uintptr) { c.fd = int(fd); f() }); err != nil {
		c.clientGone(err)
	}
}

// push sends what windows and the client's socket allow, up to about budget bytes; then
// the flow waits for its next turn. c.mu is held.
func (c *Conn) push(budget int) {
	if c.state != open || c.freed.Load() || c.queued {
		return
	}
	c.budget = budget
	if c.client == nil {
		if c.closed {
			c.send() // of what is held
		}
		return
	}
	if err := c.client.Control(c.sending); err != nil {
		c.clientGone(err)
	}
	if c.budget <= 0 && c.state == open && !c.awaiting {
		c.queued = true
		c.table.queue.add(c)
	}
}

// pushInTurn is push for an event, of which a flow in bulk may have many while others
// wait for their turn: it waits with them. c.mu is held.
func (c *Conn) pushInTurn() {
	if c.bulk && !c.queued && !c.awaiting && c.table.queue.waiting() {
		c.queued = true
		c.table.queue.add(c)
		return
	}
	c.push(turnBytes)
}

// pushTo is what push does with the client's descriptor.
func (c *Conn) pushTo(fd uintptr) {
	c.fd = int(fd)
	c.send()
}

// send sends until something is used up.
func (c *Conn) send() {
	for c.budget > 0 {
		n := c.sendOnce(c.room())
		if n == 0 {
			break
		}
		c.budget -= n
	}
	if c.finWanted && c.eof && !c.awaiting && (c.nxt == c.end) {
		c.sendFIN()
	}
}

// room is how many bytes may be sent now: a whole number of segments, unless there is
// not one.
func (c *Conn) room() int {
	flight := c.flight()
	if c.forced && flight == 0 {
		c.forced = false
		return 1
	}
	room := min(c.window, c.congestion) - flight
	if room < min(c.mss, c.widest/2) && flight > 0 {
		return 0 // RFC 9293, 3.8.6.2.1: no crumbs
	}
	room = min(room, maxPayload)
	if room > c.mss {
		room -= room % c.mss
	}
	return room
}

// sendOnce sends up to room bytes from nxt on in one frame, and returns how many.
func (c *Conn) sendOnce(room int) int {
	off := c.flight()
	if room <= 0 {
		c.stuck()
		return 0
	}
	if c.eof {
		if room = min(room, int(c.end-c.nxt)); room <= 0 {
			return 0
		}
	}
	if off < len(c.held) {
		return c.sendFrame(nil, c.held[off:min(len(c.held), off+room)])
	}
	if c.client == nil {
		return 0
	}
	if c.nxt == c.max && (c.toGuest.over || !(c.readable || c.finished)) {
		return 0
	}
	sc := scratches.Get().(*scratch)
	defer scratches.Put(sc)
	if c.nxt == c.max && !c.bulk && c.inSocket() == 0 && c.table.held.Load() < maxHeld {
		return c.sendRequest(sc, room)
	}
	if c.spent >= spentBytes {
		c.discard()
	}
	n, err := c.peek(sc.payload[:room], c.spent+off-len(c.held))
	if !c.found(n, err) {
		return 0
	}
	sent := c.sendFrame(sc, sc.payload[:n])
	if sent > 0 && n < room {
		c.readable = false // that was all (epoll(7)); more is an event
		c.discard()        // or the client may wait for room
	}
	return sent
}

// sendRequest reads what is there, keeps it and sends it.
func (c *Conn) sendRequest(sc *scratch, room int) int {
	had := len(c.held)
	room = min(room, heldSize-had)
	if room <= 0 {
		c.bulk = true
		return c.sendOnce(c.room())
	}
	c.discard()
	n, err := c.read(sc.payload[:room])
	if !c.found(n, err) {
		return 0
	}
	if n < room {
		c.readable = false
	} else {
		c.bulk = true
	}
	if c.heldBuf == nil {
		c.heldBuf = heldBufs.Get().(*[heldSize]byte)
		c.table.held.Add(1)
		c.held = c.heldBuf[:0]
	}
	// held may have lost its front: then it lies somewhere in the buffer.
	if cap(c.held)-had < n {
		copy(c.heldBuf[:], c.held)
		c.held = c.heldBuf[:had]
	}
	c.held = append(c.held, sc.payload[:n]...)
	if sent := c.sendFrame(sc, c.held[had:]); sent > 0 {
		return sent
	}
	// It is held, and counts as sent: so it is sent again.
	c.max += uint32(n)
	c.towards.Add(n)
	return 0
}

// found looks at what a read or a peek has brought, and reports whether it is bytes.
func (c *Conn) found(n int, err error) bool {
	switch {
	case n > 0:
		return true
	case err == errAgain:
		c.readable = false
		c.discard()
	case err == io.EOF:
		c.eof, c.end, c.readable, c.finished = true, c.max, false, false
		c.toGuest.end(nil)
	default:
		c.toGuest.end(&relay.ClientError{Err: err})
		c.finished = false
	}
	return false
}

// stuck is told that there is no room. An end of the client's stream needs none; a guest
// that has said so long ago is asked.
func (c *Conn) stuck() {
	if c.finished && !c.eof && !c.toGuest.over && c.client != nil {
		var b [1]byte // behind what was looked at
		c.found(c.peek(b[:], c.spent+int(c.max-c.una)-len(c.held)))
	}
	if c.window == 0 && c.flight() == 0 && !c.resend.isSet() {
		c.resend.set(c, c.rto)
	}
}

// sendFrame sends payload, which begins at nxt, and returns how much of it: all, or
// nothing when there is no room on the link.
func (c *Conn) sendFrame(sc *scratch, payload []byte) int {
	if sc == nil {
		sc = scratches.Get().(*scratch)
		defer scratches.Put(sc)
	}
	if !c.transmit(sc, c.nxt, flagACK|flagPSH, payload) {
		c.resend.setOnce(c, c.rto) // a link may be full for ever, and the flow is not
		return 0
	}
	n := len(payload)
	if c.nxt != c.max {
		c.table.retransmits.Add(1)
	}
	c.nxt += uint32(n)
	if before(c.max, c.nxt) {
		fresh := int(c.nxt - c.max)
		c.max = c.nxt
		c.towards.Add(fresh)
		c.answered()
	}
	if !c.resend.isSet() {
		c.resend.set(c, c.rto)
	}
	return n
}

// sendFIN ends our stream, at nxt.
func (c *Conn) sendFIN() {
	sc := scratches.Get().(*scratch)
	defer scratches.Put(sc)
	if !c.transmit(sc, c.nxt, flagACK|flagFIN, nil) {
		c.resend.setOnce(c, c.rto)
		return
	}
	if !c.finSent {
		c.finSent = true
		c.finFirst = !c.finTaken
		c.max++
	}
	c.nxt++
	if !c.resend.isSet() {
		c.resend.set(c, c.rto)
	}
}

// finAcked reports whether the guest has our end of stream.
func (c *Conn) finAcked() bool { return c.finSent && c.una == c.max }

// keepUnsent reads what the guest has not acknowledged from the client's socket, which
// is about to be closed, and keeps it. It returns false when that is too much. Nothing
// may be left in the socket: its end would become a reset, which takes from the client
// what it has not read (close(2) of a socket with unread bytes, RFC 1122, 4.2.2.13).
func (c *Conn) keepUnsent() bool {
	n := c.inSocket()
	if n == 0 {
		c.withClient(c.discard)
		return true
	}
	if c.table.linger.Add(int64(n)) > maxLinger {
		c.table.linger.Add(-int64(n))
		return false
	}
	held := make([]byte, len(c.held)+n)
	had := copy(held, c.held)
	whole := false
	_ = c.client.Control(func(fd uintptr) {
		c.fd = int(fd)
		c.discard()
		whole = c.readFull(held[had:])
	})
	c.dropHeld()
	c.held, c.kept = held, n
	return whole
}

// A scratch is the memory of one frame to the guest.
type scratch struct {
	frame   frame
	payload [maxPayload]byte
}

var (
	scratches = sync.Pool{New: func() any { return new(scratch) }}
	heldBufs  = sync.Pool{New: func() any { return new([heldSize]byte) }}
)
