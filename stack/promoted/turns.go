package promoted

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// turns are the flows that have more to move than what they may at once, one after
// the other. The Table's loop gives each its turn, or else a goroutine for as long as
// there are any.
type turns struct {
	wake  func()       // of the loop, nil without; fixed before the first flow
	count atomic.Int32 // of queue

	mu      sync.Mutex
	queue   []*Conn
	spare   []*Conn
	working bool
	closed  bool
	wg      sync.WaitGroup
}

// waiting reports whether there is a flow whose turn it is.
func (q *turns) waiting() bool { return q.count.Load() > 0 }

// add queues c, which is not in the queue.
func (q *turns) add(c *Conn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.queue = append(q.queue, c)
	q.count.Add(1)
	switch {
	case q.wake != nil:
		q.wake()
	case !q.working:
		q.working = true
		q.wg.Go(q.work)
	}
}

// work gives turns until nobody wants one.
func (q *turns) work() {
	for q.round() {
		runtime.Gosched() // others wait for the processor, and their clients behind them
	}
}

// round gives each flow that waits its turn. It reports whether to go on: it is one
// goroutine's at a time.
func (q *turns) round() bool {
	if q.wake != nil && !q.waiting() {
		return true
	}
	q.mu.Lock()
	if len(q.queue) == 0 || q.closed {
		q.working = false
		q.mu.Unlock()
		return false
	}
	now := q.queue
	q.queue, q.spare = q.spare[:0], nil
	q.count.Store(0)
	q.mu.Unlock()
	for i, c := range now {
		c.turn()
		now[i] = nil
	}
	q.mu.Lock()
	q.spare = now[:0]
	q.mu.Unlock()
	return true
}

func (q *turns) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wg.Wait()
}
