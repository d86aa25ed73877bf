package trace

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

const (
	// ringBytes is what a reader may be behind in bytes: 256 of the longest
	// frames, a tenth of a second at 1.3 Gbit/s. Untouched pages cost nothing.
	ringBytes = 16 << 20
	// ringSlots is what it may be behind in frames: 512 bytes each.
	ringSlots = 1 << 15
)

// States of a slot. The datapath takes it from free to reserved under mu, and
// from there to ready or void; the reader takes it back to free.
const (
	free = iota
	reserved
	ready
	void
)

// A slot is a place for one record; its bytes lie in the ring's.
type slot struct {
	state atomic.Uint32
	rec   record
	off   int
	end   uint64 // of ring.taken, behind the record
}

// A record is what is kept of one frame.
type record struct {
	at     int64 // Reader.now
	link   *link
	queue  int
	dir    Direction
	drop   drop
	noted  bool // no frame: the transport kept none
	hdr    virtio.NetHdr
	length int    // of the frame
	n      int    // bytes kept of it
	lost   uint64 // records of this queue lost before this one
}

// A drop is a datapath.DropReason plus 1, and 0 for none.
type drop uint8

func dropOf(why datapath.DropReason) drop { return drop(why) + 1 }

// A source is one interface of the stream.
type source struct {
	link  *link
	queue int
}

// A ring keeps records for one reader: filled by any number of goroutines,
// emptied by one.
type ring struct {
	slots []slot
	data  []byte
	wake  chan struct{} // one buffered: a record was published

	mu    sync.Mutex
	tail  uint64            // slots ever reserved
	taken uint64            // bytes ever reserved, those skipped at the end of data too
	lost  map[source]uint64 // since the last record of that source

	total atomic.Uint64 // records ever lost

	// Of the reader, which alone raises them.
	head  atomic.Uint64 // slots ever freed
	freed atomic.Uint64 // bytes ever freed
}

func newRing(slots, size int) *ring {
	return &ring{
		slots: make([]slot, slots), data: make([]byte, size), wake: make(chan struct{}, 1), lost: make(map[source]uint64),
	}
}

// reserve finds room for a record of rec.n bytes, or counts it as lost and
// returns nil. mu is held.
func (r *ring) reserve(rec *record) *slot {
	start := r.taken
	if at := start % uint64(len(r.data)); at+uint64(rec.n) > uint64(len(r.data)) {
		start += uint64(len(r.data)) - at // records lie in one piece
	}
	end := start + uint64(rec.n)
	src := source{rec.link, rec.queue}
	if r.tail-r.head.Load() == uint64(len(r.slots)) || end-r.freed.Load() > uint64(len(r.data)) {
		r.lost[src]++
		r.total.Add(1)
		return nil
	}
	s := &r.slots[r.tail%uint64(len(r.slots))]
	s.rec, s.off, s.end = *rec, int(start%uint64(len(r.data))), end
	if len(r.lost) > 0 {
		s.rec.lost = r.lost[src]
		delete(r.lost, src)
	}
	s.state.Store(reserved)
	r.tail++
	r.taken = end
	return s
}

// bytes returns the memory of a slot's record.
func (r *ring) bytes(s *slot) []byte { return r.data[s.off : s.off+s.rec.n : s.off+s.rec.n] }

// poke wakes the reader.
func (r *ring) poke() {
	select {
	case r.wake <- struct{}{}:
	default: // it is told already
	}
}

// oldest returns the oldest record once it is settled, nil while there is none.
// Void ones are freed on the way.
func (r *ring) oldest() *slot {
	for {
		s := &r.slots[r.head.Load()%uint64(len(r.slots))]
		switch s.state.Load() {
		case ready:
			return s
		case void:
			r.free(s)
		default:
			return nil
		}
	}
}

// free gives back the oldest slot.
func (r *ring) free(s *slot) {
	end := s.end
	s.state.Store(free)
	r.freed.Store(end)
	r.head.Add(1)
}

// A held is what one batch has reserved, in all readers' rings.
type held struct{ slots []heldSlot }

type heldSlot struct {
	reader *Reader
	slot   *slot
	frame  int // in the batch
}

var helds = sync.Pool{New: func() any { return new(held) }}

// reserve reserves and fills a record of each frame for each reader that wants
// it. why is the reason that frames were dropped for; nil if they were not, or
// not yet.
func (h *held) reserve(all *[]*Reader, q *queuePair, frames []datapath.Frame, dir Direction, why *datapath.DropReason) {
	if all == nil {
		return
	}
	for _, r := range *all {
		if !r.wants(q.link.vm) || !r.records(dir, why != nil) {
			continue
		}
		first := len(h.slots)
		at := int64(0) // asked for under mu, which keeps times in order, and only if it is needed
		r.ring.mu.Lock()
		for i := range frames {
			f := &frames[i]
			if !r.matches(f, dir) {
				continue
			}
			rec := record{link: q.link, queue: q.queue, dir: dir, hdr: f.Hdr, length: f.N, n: min(f.N, r.opts.Snap)}
			if why != nil {
				rec.drop = dropOf(*why)
			}
			if s := r.ring.reserve(&rec); s != nil {
				if at == 0 {
					at = r.now()
				}
				s.rec.at = at
				h.slots = append(h.slots, heldSlot{r, s, i})
			}
		}
		r.ring.mu.Unlock()
		for _, o := range h.slots[first:] {
			gather(r.ring.bytes(o.slot), frames[o.frame].Segs)
		}
	}
}

// gather copies what lies in segs to b and returns how much that was.
func gather(b []byte, segs [][]byte) (n int) {
	for _, s := range segs {
		n += copy(b[n:], s)
	}
	return n
}

// mark says why a frame of the batch was dropped.
func (h *held) mark(frame int, why datapath.DropReason) {
	for _, o := range h.slots {
		if o.frame == frame {
			o.slot.rec.drop = dropOf(why)
		}
	}
}

// publish hands the records of the batch's first n frames to their readers and
// takes back the rest.
func (h *held) publish(n int) {
	var poked uint64 // readers, by a bit of their numbers: a batch wakes each once
	for _, o := range h.slots {
		state := uint32(ready)
		if o.frame >= n {
			state = void
		}
		o.slot.state.Store(state)
		poked |= 1 << o.reader.number
	}
	for poked != 0 {
		number := bits.TrailingZeros64(poked)
		poked &^= 1 << number
		for _, o := range h.slots {
			if o.reader.number == number {
				o.reader.ring.poke()
				break
			}
		}
	}
	clear(h.slots)
	h.slots = h.slots[:0]
}
