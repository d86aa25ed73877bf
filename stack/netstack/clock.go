package netstack

import (
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// # Theory of operation
//
// A paused guest answers nothing, and nothing may be held against it (C-28). So
// its stack's time stands still with it: keepalive does not count, what was sent
// is not sent again in vain, no time-out grows, and no flow is given up. From the
// resumption on everything goes on where it was.
//
// gVisor reads the time for every segment, so running or stopped, a reading
// takes no lock. It sets timers rarely, and lets them expire in vain rather than
// set them again; so a timer is one of the runtime's, which is not touched by a
// pause. One that expires too early, since the clock stood still meanwhile, is
// set for what is left; one that expires while it stands is parked until it goes.

// A clock is the time of one stack: the monotonic clock's (C-52), less the
// pauses. It never goes back. Safe for concurrent use.
type clock struct {
	start time.Time
	// now is nil for the moment in which the clock is being stopped.
	now atomic.Pointer[clockState]

	mu     sync.Mutex
	parked map[*clockTimer]struct{} // expired while the clock stands
}

// A clockState is what a clock's reading follows from. It is not changed.
type clockState struct {
	stopped bool
	at      time.Duration // the reading when the clock was last stopped, or 0
	paused  time.Duration // what the pauses that are over took together
	resumed time.Time     // when the last of them was over
}

var _ tcpip.Clock = (*clock)(nil)

func newClock() *clock {
	c := &clock{start: time.Now(), parked: make(map[*clockTimer]struct{})}
	c.now.Store(new(clockState))
	return c
}

// elapsed returns the clock's reading.
func (c *clock) elapsed() time.Duration {
	// Before the look at the state: who sees the clock run has read a time that
	// is not after its stop.
	t := time.Since(c.start)
	s := c.state()
	if s.stopped {
		return s.at
	}
	return max(t-s.paused, s.at)
}

func (c *clock) state() *clockState {
	if s := c.now.Load(); s != nil {
		return s
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now.Load()
}

// setStopped stops the clock or lets it go on. To do so again does nothing.
func (c *clock) setStopped(stop bool) {
	c.mu.Lock()
	s := *c.now.Load()
	if s.stopped == stop {
		c.mu.Unlock()
		return
	}
	s.stopped = stop
	if stop {
		c.now.Store(nil)
		s.at = time.Since(c.start) - s.paused
		c.now.Store(&s)
		c.mu.Unlock()
		return
	}
	s.resumed = time.Now()
	s.paused = s.resumed.Sub(c.start) - s.at
	c.now.Store(&s)
	parked := c.parked
	c.parked = make(map[*clockTimer]struct{})
	c.mu.Unlock()
	for t := range parked {
		t.unpark()
	}
}

// resumed returns when the clock last went on: now while it stands, zero if it
// never stood.
func (c *clock) resumed() time.Time {
	s := c.state()
	if s.stopped {
		return time.Now()
	}
	return s.resumed
}

// park keeps t until the clock goes, unless it does.
func (c *clock) park(t *clockTimer) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	stopped := c.now.Load().stopped
	if stopped {
		c.parked[t] = struct{}{}
	}
	return stopped
}

// forget takes t back from park.
func (c *clock) forget(t *clockTimer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.parked, t)
}

// Now implements tcpip.Clock: the time of day, which stops for nobody.
func (*clock) Now() time.Time { return time.Now() }

// NowMonotonic implements tcpip.Clock.
func (c *clock) NowMonotonic() tcpip.MonotonicTime {
	return tcpip.MonotonicTime{}.Add(c.elapsed())
}

// AfterFunc implements tcpip.Clock.
func (c *clock) AfterFunc(d time.Duration, f func()) tcpip.Timer {
	t := &clockTimer{clock: c, f: f}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set, t.due = true, c.elapsed()+d
	t.timer = time.AfterFunc(d, t.expired)
	return t
}

// A clockTimer is a timer of a clock's.
type clockTimer struct {
	clock *clock
	f     func()

	mu     sync.Mutex // before clock.mu
	timer  *time.Timer
	due    time.Duration // by clock
	set    bool          // f is still to run
	parked bool          // in clock.parked, or just taken from there
}

// expired runs f, unless that would be too early.
func (t *clockTimer) expired() {
	t.mu.Lock()
	left := t.due - t.clock.elapsed()
	switch {
	case !t.set: // stopped meanwhile
	case left <= 0:
		t.set = false
		t.mu.Unlock()
		t.f()
		return
	default:
		if t.parked = t.clock.park(t); !t.parked {
			t.timer.Reset(left)
		}
	}
	t.mu.Unlock()
}

// unpark is called when the clock goes on.
func (t *clockTimer) unpark() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.parked = false
	if t.set {
		t.timer.Reset(t.due - t.clock.elapsed())
	}
}

// Stop implements tcpip.Timer.
func (t *clockTimer) Stop() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.set
	t.set = false
	t.timer.Stop()
	t.leave()
	return was
}

// Reset implements tcpip.Timer.
func (t *clockTimer) Reset(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave()
	t.set, t.due = true, t.clock.elapsed()+d
	t.timer.Reset(d)
}

// leave ends parking. t.mu is held.
func (t *clockTimer) leave() {
	if t.parked {
		t.parked = false
		t.clock.forget(t)
	}
}
