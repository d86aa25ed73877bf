package datapathtest

import (
	"math/rand/v2"
	"sync"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// Faults says what becomes of the frames of one direction. The rates are shares
// of all frames, 0 to 1, of together at most 1; the zero value loses nothing. A
// super-frame is one frame.
type Faults struct {
	// Drop is how many frames are lost.
	Drop float64
	// Duplicate is how many come twice, one behind the other.
	Duplicate float64
	// Reorder is how many are held back until 1 to Hold others have passed.
	Reorder float64
	// Hold is 3 if zero: as many duplicate acknowledgements have TCP take a
	// segment for lost (RFC 5681, 3.2).
	Hold int
}

// FaultCounts is what has become of the frames of one direction.
type FaultCounts struct{ Frames, Dropped, Duplicated, Reordered uint64 }

// A Faulty is an Attachment whose link is as bad as it is told, by a seed. It
// delays nothing but what it holds back, and what it drops no Stats count. With
// the same seed and the same frames the same becomes of them.
//
// A frame that is held back when nothing follows stays there until something
// does: it is as good as lost.
type Faulty struct {
	datapath.Attachment
	pairs []datapath.QueuePair

	once sync.Once
	done chan struct{}
	wg   sync.WaitGroup // what passes on that there is room
}

// NewFaulty wraps att, which it owns from now on.
func NewFaulty(att datapath.Attachment, seed uint64, toGuest, fromGuest Faults) *Faulty {
	f := &Faulty{Attachment: att, done: make(chan struct{})}
	for i, qp := range att.QueuePairs() {
		p := &faultyPair{
			QueuePair: qp, room: make(chan struct{}, 1), done: f.done,
			to:   faultyWay{faults: toGuest, rng: rand.New(rand.NewPCG(seed, uint64(2*i)))},
			from: faultyWay{faults: fromGuest, rng: rand.New(rand.NewPCG(seed, uint64(2*i+1)))},
		}
		f.pairs = append(f.pairs, p)
		f.wg.Go(p.passRoom)
	}
	return f
}

// QueuePairs implements datapath.Attachment.
func (f *Faulty) QueuePairs() []datapath.QueuePair { return f.pairs }

// Close implements datapath.Attachment.
func (f *Faulty) Close() error {
	f.once.Do(func() { close(f.done) })
	err := f.Attachment.Close()
	f.wg.Wait()
	return err
}

// SetFaults has other things become of the frames from now on.
func (f *Faulty) SetFaults(toGuest, fromGuest Faults) {
	for _, qp := range f.pairs {
		p := qp.(*faultyPair)
		p.to.set(toGuest)
		p.from.set(fromGuest)
	}
}

// SetFull says that the guest takes no frames, or takes them again: WriteBatch
// is short meanwhile, and Room fires at the end of it.
func (f *Faulty) SetFull(full bool) {
	for _, qp := range f.pairs {
		qp.(*faultyPair).setFull(full)
	}
}

// Counts returns what has become of the frames so far.
func (f *Faulty) Counts() (toGuest, fromGuest FaultCounts) {
	for _, qp := range f.pairs {
		p := qp.(*faultyPair)
		p.to.addTo(&toGuest)
		p.from.addTo(&fromGuest)
	}
	return toGuest, fromGuest
}

// A faultyPair is one queue pair of a Faulty.
type faultyPair struct {
	datapath.QueuePair
	room chan struct{}
	done chan struct{}

	writing sync.Mutex // one writer at a time
	full    bool       // under writing
	to      faultyWay

	// The rest is the one reader's.
	from   faultyWay
	frames []datapath.Frame
	bufs   [][]byte
	lent   int
	ready  []kept // come, and not yet returned
}

// A faultyWay is one direction: what becomes of the next frame, and those that are
// held back.
type faultyWay struct {
	mu     sync.Mutex
	faults Faults
	rng    *rand.Rand
	held   []kept
	counts FaultCounts
}

// kept is a frame in memory of our own.
type kept struct {
	hdr  virtio.NetHdr
	data []byte
	left int // of one that is held back: how many others pass first
}

func keep(f *datapath.Frame) kept { return kept{hdr: f.Hdr, data: join(*f)} }

func (k *kept) frame() datapath.Frame {
	return datapath.Frame{Hdr: k.hdr, Segs: [][]byte{k.data}, N: len(k.data)}
}

func (w *faultyWay) set(f Faults) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = f
}

func (w *faultyWay) addTo(sum *FaultCounts) {
	w.mu.Lock()
	defer w.mu.Unlock()
	sum.Frames += w.counts.Frames
	sum.Dropped += w.counts.Dropped
	sum.Duplicated += w.counts.Duplicated
	sum.Reordered += w.counts.Reordered
}

// pass decides what becomes of f and hands on what is to go now. It reports
// whether f was taken: not if hand, which says the same, did not take it. Then
// nothing was decided, and f comes again.
func (w *faultyWay) pass(f *datapath.Frame, hand func(*datapath.Frame) bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	drop, twice, hold := w.faults.Drop, w.faults.Duplicate, w.faults.Reorder
	switch r := w.rng.Float64(); {
	case r < drop:
		w.counts.Dropped++
	case r < drop+hold:
		k := keep(f)
		most := w.faults.Hold
		if most <= 0 {
			most = 3
		}
		k.left = 2 + w.rng.IntN(most) // itself, and as many others
		w.held = append(w.held, k)
		w.counts.Reordered++
	default:
		if !hand(f) {
			return false
		}
		if r < drop+hold+twice && hand(f) {
			w.counts.Duplicated++
		}
	}
	w.counts.Frames++
	w.release(hand)
	return true
}

// release hands on the frames whose time has come; one that is not taken is tried
// again with the next. w.mu is held.
func (w *faultyWay) release(hand func(*datapath.Frame) bool) {
	rest := w.held[:0]
	for _, k := range w.held {
		k.left--
		if f := k.frame(); k.left > 0 || !hand(&f) {
			rest = append(rest, k)
		}
	}
	clear(w.held[len(rest):])
	w.held = rest
}

// Room implements datapath.QueuePair.
func (p *faultyPair) Room() <-chan struct{} { return p.room }

// passRoom passes on what the transport says of room, until the end.
func (p *faultyPair) passRoom() {
	for {
		select {
		case <-p.QueuePair.Room():
			p.fire()
		case <-p.done:
			p.fire()
			return
		}
	}
}

func (p *faultyPair) fire() {
	select {
	case p.room <- struct{}{}:
	default: // a value is there already
	}
}

func (p *faultyPair) setFull(full bool) {
	p.writing.Lock()
	defer p.writing.Unlock()
	p.full = full
	if !full {
		p.fire()
	}
}

// WriteBatch implements datapath.QueuePair.
func (p *faultyPair) WriteBatch(frames []datapath.Frame) (n int, err error) {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.full || len(frames) == 0 {
		_, err := p.QueuePair.WriteBatch(nil) // it may have ended
		return 0, err
	}
	one := make([]datapath.Frame, 1)
	hand := func(f *datapath.Frame) bool {
		one[0] = *f
		var taken int
		if err == nil {
			taken, err = p.QueuePair.WriteBatch(one)
		}
		return taken == 1
	}
	for n < len(frames) && p.to.pass(&frames[n], hand) && err == nil {
		n++
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// ReadBatch implements datapath.QueuePair. It knows the length of every frame.
func (p *faultyPair) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (n int, err error) {
	select {
	case <-p.done:
		return 0, datapath.ErrClosed
	default:
	}
	for len(p.ready) == 0 && len(frames) > 0 {
		if err := p.read(len(frames)); err != nil {
			return 0, err
		}
	}
	for n < min(len(frames), len(p.ready)) {
		k := &p.ready[n]
		frames[n] = datapath.Frame{Hdr: k.hdr, Segs: get(len(k.data)), N: len(k.data)}
		rest := k.data
		for _, seg := range frames[n].Segs {
			rest = rest[copy(seg, rest):]
		}
		n++
	}
	p.ready = append([]kept(nil), p.ready[n:]...)
	return n, nil
}

// read takes up to n frames from the transport and decides what becomes of them.
func (p *faultyPair) read(n int) error {
	p.frames = append(p.frames, make([]datapath.Frame, max(0, n-len(p.frames)))...)
	p.lent = 0
	got, err := p.QueuePair.ReadBatch(p.frames[:n], p.lend)
	for i := range p.frames[:got] {
		p.from.pass(&p.frames[i], func(f *datapath.Frame) bool {
			p.ready = append(p.ready, keep(f))
			return true
		})
	}
	return err
}

// lend lends memory of our own for one call's next frame.
func (p *faultyPair) lend(n int) [][]byte {
	if n == 0 {
		n = datapath.MaxFrame
	}
	if p.lent == len(p.bufs) {
		p.bufs = append(p.bufs, nil)
	}
	if len(p.bufs[p.lent]) < n {
		p.bufs[p.lent] = make([]byte, n)
	}
	p.lent++
	return [][]byte{p.bufs[p.lent-1]}
}
