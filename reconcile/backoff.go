package reconcile

import (
	"math/rand/v2"
	"time"
)

// A backoff says how long to wait before the next try: min after the first
// failure, twice as long after each further one, at most max. Each delay is
// shortened by up to half at random, so that what failed together (all the
// sources of a VM) does not try again together. It belongs to one goroutine.
type backoff struct {
	min, max time.Duration
	// random returns a number in [0, 1); nil means math/rand's.
	random func() float64

	next time.Duration
}

// delay returns the next delay, in (d/2, d] for d = min, 2·min, 4·min … max.
func (b *backoff) delay() time.Duration {
	d := min(max(b.next, b.min), b.max)
	b.next = min(2*d, b.max)
	random := b.random
	if random == nil {
		random = rand.Float64
	}
	return d - time.Duration(random()*float64(d/2))
}

// reset makes the next delay the first one again.
func (b *backoff) reset() { b.next = 0 }
