package netstack

import "sync"

// A runner runs what gVisor's notifications put off: those come under an
// endpoint's lock, and what they ask for takes it. The reader of frames runs at
// the end of a batch what the batch's segments brought about; anything else has a
// goroutine, for as long as there is something to run.
type runner struct {
	mu    sync.Mutex
	ended sync.Cond
	queue []runnable
	busy  int // who is about to look at the queue
}

// A runnable is something to run that neither waits nor takes long.
type runnable interface{ run() }

func newRunner() *runner {
	r := &runner{}
	r.ended.L = &r.mu
	return r
}

// add has t run soon, not within the call.
func (r *runner) add(t runnable) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue = append(r.queue, t)
	if r.busy == 0 {
		r.busy++
		go r.leave() // waited for by wait
	}
}

// enter says that the caller will call leave soon.
func (r *runner) enter() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy++
}

// leave runs what there is to run.
func (r *runner) leave() {
	var now []runnable
	for {
		r.mu.Lock()
		clear(now)
		now, r.queue = r.queue, now[:0]
		if len(now) == 0 {
			r.queue = nil
			if cap(now) <= maxTasksKept {
				r.queue = now
			}
			if r.busy--; r.busy == 0 {
				r.ended.Broadcast()
			}
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		for _, t := range now {
			t.run()
		}
	}
}

// maxTasksKept bounds the memory of a queue that was long once: 1024 × 16 bytes.
const maxTasksKept = 1024

// wait returns when nobody runs anything.
func (r *runner) wait() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.busy > 0 {
		r.ended.Wait()
	}
}

// A pool runs bulk copies: each as long as it has something to move, on a
// goroutine that has grown its stack for the one before.
type pool struct {
	mu     sync.Mutex
	idle   []chan *direction
	closed bool
	wg     sync.WaitGroup
}

// maxIdle bounds how many goroutines wait: 64 × some 10 KiB of stack.
const maxIdle = 64

// run has d, which is running, run until it waits.
func (p *pool) run(d *direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.idle); n > 0 {
		w := p.idle[n-1]
		p.idle = p.idle[:n-1]
		w <- d
		return
	}
	if p.closed {
		go d.copy.run(d, bulkTurn) // the end of a flow that outlived its stack
		return
	}
	p.wg.Go(func() { p.work(d) })
}

// work runs d and what comes after.
func (p *pool) work(d *direction) {
	w := make(chan *direction, 1)
	for d != nil {
		d.copy.run(d, bulkTurn)
		p.mu.Lock()
		if p.closed || len(p.idle) == maxIdle {
			p.mu.Unlock()
			return
		}
		p.idle = append(p.idle, w)
		p.mu.Unlock()
		d = <-w
	}
}

// close ends the goroutines and waits for them.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	for _, w := range p.idle {
		close(w)
	}
	p.idle = nil
	p.mu.Unlock()
	p.wg.Wait()
}
