package vhostuser

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

const (
	// etherHeader is the shortest frame there is: two addresses and a type.
	etherHeader = 6 + 6 + 2
	// maxLooks bounds how often a reader that had frames a moment ago looks again
	// before it asks to be kicked. A look lets other goroutines go first and takes
	// some 100 ns, so all of them a few µs: less than a kick and a wake-up cost.
	maxLooks = 32
)

var (
	_ datapath.Attachment = (*attachment)(nil)
	_ datapath.QueuePair  = (*queuePair)(nil)
)

// An attachment has the use of a device's rings until it is closed. It outlives
// their being stopped and started, and ends when they are started under other
// offloads, when a ring or the memory turns out bad, and with the connection.
type attachment struct {
	info     datapath.Info
	stats    datapath.Stats
	dev      *device
	pairs    []datapath.QueuePair
	queues   []*queuePair // the same
	released func()

	err     atomic.Pointer[error] // why it ended; nil while it is live
	done    chan struct{}         // closed when it has ended
	ending  sync.Once
	closing sync.Once
}

// newAttachment is called with the device's mu held. features are what the rings
// run under.
func newAttachment(d *device, features uint64, released func()) *attachment {
	a := &attachment{
		info: datapath.Info{
			Transport: "vhost-user", Name: d.name, Connected: true,
			ToGuest: toGuest(features), FromGuest: fromGuest(features),
		},
		dev: d, released: released, done: make(chan struct{}),
	}
	n := 1
	if features&featureMQ != 0 {
		n = d.pairs
	}
	for _, r := range d.rings {
		r.counts = datapath.Queue{}
	}
	a.stats.SetQueues(a.counted)
	for i := range n {
		q := &queuePair{attachment: a, rx: d.rings[2*i], tx: d.rings[2*i+1], room: make(chan struct{}, 1)}
		a.queues = append(a.queues, q)
		a.pairs = append(a.pairs, q)
	}
	return a
}

// describes reports whether the attachment is what features make.
func (a *attachment) describes(features uint64) bool {
	return a.info.ToGuest == toGuest(features) && a.info.FromGuest == fromGuest(features) &&
		(len(a.pairs) > 1 == (features&featureMQ != 0) || a.dev.pairs == 1)
}

func (a *attachment) Info() datapath.Info              { return a.info }
func (a *attachment) QueuePairs() []datapath.QueuePair { return a.pairs }
func (a *attachment) Stats() *datapath.Stats           { return &a.stats }

// ended returns the error of every call once the attachment has ended.
func (a *attachment) ended() error {
	if err := a.err.Load(); err != nil {
		return *err
	}
	return nil
}

// end ends a live attachment. It waits for nothing.
func (a *attachment) end(why error) {
	a.err.CompareAndSwap(nil, &why)
	a.wake()
}

// wake unblocks all who wait, once it has ended.
func (a *attachment) wake() {
	a.ending.Do(func() { close(a.done) })
	for _, q := range a.queues {
		q.tx.interrupt()
		q.fire()
	}
}

// Close gives the rings back, once no call uses them any more. What the guest
// puts in them waits for the next attachment.
func (a *attachment) Close() error {
	a.closing.Do(func() {
		closed := datapath.ErrClosed
		a.err.Store(&closed)
		a.wake()
		for _, q := range a.queues {
			q.reading.Lock()   // the reader has left
			q.reading.Unlock() //nolint:staticcheck // nothing to do but know that
		}
		a.dev.detach()
		a.released()
	})
	return nil
}

// fireRoom wakes the writers that wait for room.
func (a *attachment) fireRoom() {
	for _, q := range a.queues {
		if q.short.Swap(false) {
			q.fire()
		}
	}
}

// A queuePair is one pair of rings. A frame to the guest takes another pair's
// RX where the driver does not use this one's.
type queuePair struct {
	*attachment
	rx, tx *vring

	reading sync.Mutex // held by the reader
	in      inbound

	short atomic.Bool   // a writer was short since room last fired
	room  chan struct{} // one buffered; see datapath.QueuePair.Room
}

// inbound is the reader's state.
type inbound struct {
	chain  virtqueue.Chain
	hdr    [virtio.HdrSizeMrgBuf]byte
	hdrVec [1][]byte
	looks  int  // how often to look again before waiting; follows what that brought
	by     wake // why take looks
	polled bool // the ring has no kick
	ready  func() bool
}

// ReadBatch waits for frames in TX, as datapath.QueuePair says.
func (q *queuePair) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (int, error) {
	q.reading.Lock()
	defer q.reading.Unlock()
	if len(frames) == 0 {
		return 0, q.ended()
	}
	in := &q.in
	if in.ready == nil {
		in.ready = q.workAgain
	}
	in.by = atOnce
	for looked := 0; ; {
		n, err := q.take(frames, get)
		if err != nil {
			return 0, err
		}
		if n > 0 {
			if looked > 0 { // it was worth it
				in.looks = min(2*in.looks, maxLooks)
			} else {
				in.looks = max(in.looks, 1)
			}
			return n, nil
		}
		if looked < in.looks {
			looked++
			in.by = byPoll
			runtime.Gosched()
			continue
		}
		in.looks /= 2
		in.by = byKick // unless ready says otherwise
		q.tx.wait(q.done, in.polled, in.ready)
		if in.polled {
			in.by = byPoll
		}
		looked = 0
	}
}

// take takes the frames that are there, zero or more.
func (q *queuePair) take(frames []datapath.Frame, get func(n int) [][]byte) (n int, err error) {
	d, r := q.dev, q.tx
	d.mu.RLock()
	defer d.mu.RUnlock()
	if err := q.ended(); err != nil {
		return 0, err
	}
	q.in.polled = r.polled && r.started
	if !r.usable() {
		return 0, nil
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if err != nil {
			n = 0
			q.fail(r, err)
			err = q.ended()
		}
	}()
	defer caught(&err)
	var bytes uint64
	pushed := false
	// Twice as many tries as frames: so what is thrown away cannot keep it here
	// for ever, away from Close.
	for tries := 2 * len(frames); n < len(frames) && tries > 0; tries-- {
		ok, bad := r.queue.Pop(&q.in.chain)
		if !ok {
			if bad != nil {
				q.fail(r, bad) // what was taken before is still good
			}
			break
		}
		if f := &frames[n]; q.takeChain(r, f, bad, get) {
			r.count(&f.Hdr)
			bytes += uint64(f.N)
			n++
		}
		r.queue.Push(q.in.chain.Head, 0)
		pushed = true
	}
	if pushed {
		r.found(q.in.by)
	}
	r.flush(pushed)
	q.stats.FromGuest.Frames.Add(uint64(n))
	q.stats.FromGuest.Bytes.Add(bytes)
	return n, nil
}

// takeChain fills f from the chain that was popped, with bad if it cannot be
// used, or counts why not.
func (q *queuePair) takeChain(r *vring, f *datapath.Frame, bad error, get func(n int) [][]byte) bool {
	in := &q.in
	size := in.chain.ReadableLen - r.form
	switch {
	case bad != nil:
		q.stats.Drop(datapath.DropRejected)
		return false
	case size < etherHeader:
		q.stats.Drop(datapath.DropTooShort)
		return false
	case size > datapath.MaxFrame:
		q.stats.Drop(datapath.DropTooLong)
		return false
	case !r.enabled:
		q.stats.Drop(datapath.DropLinkDown)
		return false
	}
	in.hdrVec[0] = in.hdr[:r.form]
	in.chain.CopyOut(in.hdrVec[:], 0)
	f.Hdr.Parse(in.hdr[:r.form])
	f.Hdr.NumBuffers = 0 // means nothing from a driver
	f.Segs = get(size)
	f.N = in.chain.CopyOut(f.Segs, r.form)
	return f.N == size // else get lent too little
}

// workAgain asks for kicks, and whether there is something in TX already.
func (q *queuePair) workAgain() (more bool) {
	q.dev.mu.RLock()
	defer q.dev.mu.RUnlock()
	if q.ended() != nil {
		return true
	}
	r := q.tx
	if !r.usable() {
		return false // whoever changes that interrupts
	}
	if err := guard(func() {
		if more = r.queue.EnableKicks(); more {
			r.queue.DisableKicks()
			q.in.by = byPoll
		}
	}); err != nil {
		q.fail(r, err)
		return true
	}
	return more
}

// fail ends the attachment for what came out of a ring: the ring is corrupt, or
// its memory is not there, and then none is to be trusted. It is called with the
// device's mu held for reading.
func (q *queuePair) fail(r *vring, err error) {
	r.broken.Store(true)
	if errors.Is(err, errFault) {
		q.dev.fault(err)
		return
	}
	q.end(fmt.Errorf("%w: ring %d: %w", datapath.ErrPeerGone, r.index, err))
}

// Room returns the channel that a short WriteBatch is told by.
func (q *queuePair) Room() <-chan struct{} { return q.room }

func (q *queuePair) fire() {
	select {
	case q.room <- struct{}{}:
	default: // a value is there already
	}
}
