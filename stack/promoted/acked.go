package promoted

import (
	"syscall"
	"time"
)

// takeAck takes an acknowledgement (RFC 9293, 3.10.7.4 and RFC 5681). It returns false
// for one of what was never sent.
func (c *Conn) takeAck(s *Segment) bool {
	switch n := int(s.ack - c.una); {
	case before(c.max, s.ack):
		return false
	case before(s.ack, c.una):
		return true
	case n > 0:
		c.acked(n, s)
	case s.size() == 0 && !s.has(flagFIN) && c.max != c.una && c.windowOf(s) == c.window:
		c.duplicate()
	}
	if before(c.windowSeq, s.seq) || c.windowSeq == s.seq && !before(s.ack, c.windowAck) {
		c.windowSeq, c.windowAck = s.seq, s.ack
		was := c.window
		c.window = c.windowOf(s)
		c.widest = max(c.widest, c.window)
		if was == 0 && c.window > 0 {
			c.nxt = c.una // what was sent to ask for room
			c.resend.stop()
		}
	}
	return true
}

func (c *Conn) windowOf(s *Segment) int { return int(s.window) << c.scale }

// acked gives up n bytes, which the guest has.
func (c *Conn) acked(n int, s *Segment) {
	if c.stamps && s.stamped {
		c.measure(s)
	} else {
		c.rto = firstRTO // no longer than needed: nothing measures it
	}
	data := n
	if c.finSent && s.ack == c.max {
		data--
	}
	c.drop(data)
	c.una = s.ack
	if before(c.nxt, c.una) {
		c.nxt = c.una
	}
	c.dups = 0
	c.missing = false
	if c.closed {
		c.lingering.stop() // for freeIfDone to set anew: the guest takes what there is
	}
	switch {
	case c.recovering && !before(c.una, c.recovery):
		c.recovering = false
		c.congestion = c.threshold
	case c.recovering: // the next hole
		c.again(c.mss)
	case c.congestion < c.threshold:
		c.congestion += n
	default:
		c.congestion += max(1, c.mss*min(n, c.congestion)/c.congestion)
	}
	c.congestion = min(c.congestion, maxFlight)
	if c.una == c.max {
		c.resend.stop()
		c.bulk = false
		c.withClient(c.discard)
	} else {
		c.resend.set(c, c.rto)
	}
}

// drop frees the first n bytes from una on.
func (c *Conn) drop(n int) {
	if k := min(n, len(c.held)); k > 0 {
		c.held = c.held[k:]
		n -= k
		if len(c.held) == 0 {
			c.dropHeld()
		}
	}
	c.spent += n
}

func (c *Conn) dropHeld() {
	if c.heldBuf != nil {
		heldBufs.Put(c.heldBuf)
		c.heldBuf = nil
		c.table.held.Add(-1)
	}
	c.held = nil
	c.table.linger.Add(-int64(c.kept))
	c.kept = 0
}

// duplicate counts a duplicate acknowledgement, and sends again what seems lost.
func (c *Conn) duplicate() {
	c.dups++
	switch {
	case c.recovering:
		c.congestion = min(c.congestion+c.mss, maxFlight) // one segment has left the link
	case c.dups == dupThreshold:
		c.threshold = max(int(c.max-c.una)/2, 2*c.mss)
		c.congestion = c.threshold + dupThreshold*c.mss
		c.recovering, c.recovery = true, c.max
		c.again(c.mss)
	}
}

// again sends up to n bytes from una on once more.
func (c *Conn) again(n int) {
	nxt := c.nxt
	c.nxt = c.una
	c.withClient(func() { c.sendOnce(n) })
	c.missing = c.awaiting
	if before(c.nxt, nxt) {
		c.nxt = nxt
	}
}

// timedOut sends all again, from una on and slowly, or asks a guest that has no room.
func (c *Conn) timedOut() {
	under := c.una != c.max
	if under || c.awaiting {
		c.unanswered++
	}
	if c.unanswered > maxUnanswered {
		c.die(syscall.ETIMEDOUT)
		return
	}
	if c.awaiting { // our own link's doing, and no sign of loss; but there may be one
		c.missing = c.missing || under && c.window > 0
		c.waited = min(2*max(c.waited, c.rto), maxRTO)
		c.resend.set(c, c.waited)
		return
	}
	if !under && c.window > 0 {
		return // the link has had room meanwhile, and there is nothing to send
	}
	if under {
		c.table.timeouts.Add(1)
	}
	c.rto = min(2*c.rto, maxRTO)
	if c.state == synSent {
		c.sendSYN()
		c.resend.set(c, c.rto)
		return
	}
	if c.window == 0 {
		c.forced = true
	} else {
		c.threshold = max(int(c.max-c.una)/2, 2*c.mss)
		c.congestion = c.mss
	}
	c.recovering, c.dups = false, 0
	c.nxt = c.una
	c.push(turnBytes)
	c.forced = false
	if c.una != c.max {
		c.resend.set(c, c.rto)
	}
}

// measure takes a round trip from the echo of our timestamp (RFC 6298, 2).
func (c *Conn) measure(s *Segment) {
	r := time.Duration(int32(c.table.now()-s.echo)) * time.Millisecond
	if r < 0 || r > maxRTO {
		return // not ours
	}
	if c.srtt == 0 && c.rttvar == 0 {
		c.srtt, c.rttvar = r, r/2
	} else {
		c.rttvar += (max(c.srtt-r, r-c.srtt) - c.rttvar) / 4
		c.srtt += (r - c.srtt) / 8
	}
	c.rto = min(max(c.srtt+4*c.rttvar, firstRTO), maxRTO)
}
