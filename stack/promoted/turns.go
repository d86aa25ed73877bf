package promoted

import (
	"runtime"
	"sync"
)

// turns are the flows that have more to move than what they may at once, one after
// the other: a goroutine gives each its turn for as long as there are any.
type turns struct {
	mu      sync.Mutex
	queue   []*Conn
	working bool
	closed  bool
	wg      sync.WaitGroup
}

func (q *turns) init() {}

// add queues c, which is not in the queue.
func (q *turns) add(c *Conn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.queue = append(q.queue, c)
	if !q.working {
		q.working = true
		q.wg.Go(q.work)
	}
}

// work gives turns until nobody wants one.
func (q *turns) work() {
	var now []*Conn
	for {
		q.mu.Lock()
		clear(now)
		now, q.queue = q.queue, now[:0]
		if len(now) == 0 || q.closed {
			q.queue, q.working = nil, false
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		for _, c := range now {
			c.turn()
			runtime.Gosched() // others wait for the processor, and their clients behind them
		}
	}
}

func (q *turns) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wg.Wait()
}
