package promoted

import (
	"syscall"
	"time"
)

const (
	// firstRTO is the retransmission time-out before a round trip was measured, and
	// the least one (RFC 6298, 2.4): a busy guest answers late, and a shorter one had
	// flows send thousands of segments twice.
	firstRTO = time.Second
	// maxRTO is the longest, and maxUnanswered how often something is sent again to a
	// guest of which nothing at all is heard: some 20 minutes, as Linux does.
	maxRTO        = 2 * time.Minute
	maxUnanswered = 15
	// ackDelay is how long an acknowledgement waits for a segment to carry it, at
	// most; Linux has the same (TCP_DELACK_MIN), RFC 9293 allows 500 ms.
	ackDelay = 40 * time.Millisecond
	// timeWait is for how long a flow that we ended first still answers: long enough
	// for the guest's last segment to be sent again once, at 20000 flows a second (C-19)
	// 20000 ports.
	timeWait = time.Second
	// drainWait is how long a closed flow waits for a guest that acknowledges nothing of
	// what is left for it, answer what it may: Linux gives up after 8 tries, some 100 s
	// (tcp_orphan_retries).
	drainWait = 2 * time.Minute
	// finWait is how long a closed flow waits for the guest's end: Linux's
	// tcp_fin_timeout.
	finWait = time.Minute
	// keepAlive* end a half-closed flow whose guest is gone within 90 s (C-14):
	// 15 s + 5 × 15 s.
	keepAliveIdle     = 15 * time.Second
	keepAliveInterval = 15 * time.Second
	keepAliveCount    = 5
	// stampLife is after how long of silence the guest's timestamps say nothing: half
	// of what 32 bits of milliseconds count (RFC 7323, 5.5).
	stampLife = 24 * 24 * time.Hour
)

// clocks are what a Conn waits for. They share one timer, which is set for the first
// of them when it is needed and left alone when it is not: one that expires in vain
// costs less than to set it anew with each segment.
type clocks struct {
	resend    alarm // the oldest segment was not acknowledged
	delay     alarm // an acknowledgement has waited long enough
	probe     alarm // nothing was heard of a guest that is probed
	lingering alarm // a closed flow is forgotten

	timer   Timer
	expires time.Duration // when timer does; 0 when it is not set

	rto, srtt, rttvar time.Duration
	waited            time.Duration // rto's part for a flow that waits for room on the link
	unanswered        int           // what was sent again, or probed, since something was heard
	probes            int
	keepAlive         bool
	heard             time.Duration // when a segment last came
	stampedAt         time.Duration // when one last brought a timestamp
}

// An alarm is a moment by the Table's clock, 0 for never.
type alarm time.Duration

func (a *alarm) isSet() bool { return *a != 0 }
func (a *alarm) stop()       { *a = 0 }

// set sets the alarm for in from now. c.mu is held.
func (a *alarm) set(c *Conn, in time.Duration) {
	at := c.table.opts.Clock.Now() + in
	*a = alarm(max(at, 1))
	if c.freed.Load() || c.expires != 0 && c.expires <= at {
		return
	}
	if c.timer == nil {
		c.timer = c.table.opts.Clock.Until(c.expired)
	}
	c.expires = at
	c.timer.Set(in)
}

// setOnce sets an alarm that is not set.
func (a *alarm) setOnce(c *Conn, in time.Duration) {
	if !a.isSet() {
		a.set(c, in)
	}
}

// advance sets an alarm that is set for later to be in from now. It puts none off: who is
// told of room again and again would wait for ever.
func (a *alarm) advance(c *Conn, in time.Duration) {
	if time.Duration(*a) > c.table.opts.Clock.Now()+in {
		a.set(c, in)
	}
}

// due reports whether the alarm has come, and stops it then.
func (a *alarm) due(now time.Duration) bool {
	if *a == 0 || now < time.Duration(*a) {
		return false
	}
	*a = 0
	return true
}

// expired is the timer's.
func (c *Conn) expired() {
	c.lock()
	defer c.unlock()
	c.expires = 0
	if c.freed.Load() {
		return
	}
	now := c.table.opts.Clock.Now()
	if c.delay.due(now) && c.ackDue {
		c.exchanges = 0 // nothing came that could have carried it
		c.ackNow = true
		c.acknowledge()
	}
	if c.resend.due(now) {
		c.timedOut()
	}
	if c.probe.due(now) {
		c.probeGuest(now)
	}
	if c.lingering.due(now) {
		if !c.finAcked() {
			c.reset(syscall.ETIMEDOUT)
		}
		c.die(syscall.ETIMEDOUT) // or in time
	}
	c.setTimer(now)
}

// setTimer sets the timer for the first alarm.
func (c *Conn) setTimer(now time.Duration) {
	first := alarm(0)
	for _, a := range [...]alarm{c.resend, c.delay, c.probe, c.lingering} {
		if a != 0 && (first == 0 || a < first) {
			first = a
		}
	}
	if first == 0 || c.freed.Load() || c.expires != 0 && c.expires <= time.Duration(first) {
		return
	}
	c.expires = time.Duration(first)
	c.timer.Set(max(c.expires-now, 1))
}

// probeGuest asks a silent guest for a sign of life (RFC 9293, 3.8.4): a segment of
// nothing, from before what it has acknowledged, which it has to answer.
func (c *Conn) probeGuest(now time.Duration) {
	if silent := now - c.heard; silent < keepAliveIdle {
		c.probes = 0
		c.probe.set(c, keepAliveIdle-silent)
		return
	}
	if c.probes == keepAliveCount {
		c.die(syscall.ETIMEDOUT)
		return
	}
	c.probes++
	sc := scratches.Get().(*scratch)
	defer scratches.Put(sc)
	c.transmit(sc, c.una-1, flagACK, nil)
	c.probe.set(c, keepAliveInterval)
}

func (c *Conn) stopTimers() {
	if c.timer != nil {
		c.timer.Stop()
	}
}
