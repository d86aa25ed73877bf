// Package memory joins two attachments inside one process: the transport of the
// demo and of tests. A frame and its virtio-net header written at one end are
// read at the other; nothing else happens to them.
//
// It is a full transport: its queues are bounded, so WriteBatch can be short,
// and either end's Close is the other's ErrPeerGone.
package memory

import (
	"sync"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// Options says what a pair is like. The zero value is a plain NIC: one queue
// pair, no offloads.
type Options struct {
	// Name is Info.Name of both ends; "memory" if empty.
	Name string
	// ToGuest and FromGuest are the offloads in each direction, as the first
	// end, ours, sees them.
	ToGuest, FromGuest virtio.Offloads
	// QueuePairs is how many there are; 1 if zero or less.
	QueuePairs int
	// Depth is how many frames each queue holds in each direction; 256, as a
	// virtqueue, if zero or less. A slot keeps the memory of the longest frame
	// it has held: a queue holds at most Depth times datapath.MaxFrame bytes.
	Depth int
}

// Pair returns two attachments joined in memory: ours, and the guest's end. For
// each of them ToGuest, in Info and in Stats, means "to the other end". Frames
// that the other end has not read when one end closes are lost.
func Pair(o Options) (ours, guest datapath.Attachment) {
	if o.Name == "" {
		o.Name = "memory"
	}
	pairs, depth := max(o.QueuePairs, 1), o.Depth
	if depth <= 0 {
		depth = 256
	}
	a := &attachment{info: datapath.Info{
		Transport: "memory", Name: o.Name, ToGuest: o.ToGuest, FromGuest: o.FromGuest, Connected: true,
	}}
	b := &attachment{info: datapath.Info{
		Transport: "memory", Name: o.Name, ToGuest: o.FromGuest, FromGuest: o.ToGuest, Connected: true,
	}}
	a.peer, b.peer = b, a
	for range pairs {
		ab, ba := newQueue(depth), newQueue(depth)
		a.pairs = append(a.pairs, &queuePair{attachment: a, tx: ab, rx: ba})
		b.pairs = append(b.pairs, &queuePair{attachment: b, tx: ba, rx: ab})
	}
	return a, b
}

// An attachment is one end of a pair.
type attachment struct {
	info  datapath.Info
	stats datapath.Stats
	pairs []datapath.QueuePair
	peer  *attachment
	once  sync.Once
}

func (a *attachment) Info() datapath.Info              { return a.info }
func (a *attachment) QueuePairs() []datapath.QueuePair { return a.pairs }
func (a *attachment) Stats() *datapath.Stats           { return &a.stats }

func (a *attachment) Close() error {
	a.once.Do(func() {
		for _, qp := range a.pairs {
			qp := qp.(*queuePair)
			qp.tx.close(writer)
			qp.rx.close(reader)
		}
	})
	return nil
}

// A queuePair writes to one queue and reads from the other.
type queuePair struct {
	*attachment
	tx, rx *queue // as this end sees them
}

func (qp *queuePair) Room() <-chan struct{} { return qp.tx.room }

func (qp *queuePair) WriteBatch(frames []datapath.Frame) (int, error) {
	return qp.tx.put(frames, &qp.stats)
}

func (qp *queuePair) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (int, error) {
	return qp.rx.take(frames, get, &qp.stats)
}

// The two ends of a queue.
type end uint8

const (
	writer end = iota
	reader
)

// A queue carries frames in one direction. It is a ring of slots: slots[head]
// is the oldest frame, and n of them are taken.
type queue struct {
	room chan struct{} // one buffered; see datapath.QueuePair.Room

	mu     sync.Mutex
	filled sync.Cond // n rose from 0, or an end closed
	slots  []slot
	head   int
	n      int
	short  bool // a WriteBatch was short since room last fired
	closed [2]bool
}

// A slot holds a copy of a frame: what the writer lent is its own again when
// WriteBatch returns.
type slot struct {
	hdr  virtio.NetHdr
	data []byte
}

func newQueue(depth int) *queue {
	q := &queue{room: make(chan struct{}, 1), slots: make([]slot, depth)}
	q.filled.L = &q.mu
	return q
}

// ended returns the error of one end's calls once either end has closed. Its
// own Close comes first.
func (q *queue) ended(at end) error {
	switch {
	case q.closed[at]:
		return datapath.ErrClosed
	case q.closed[1-at]:
		return datapath.ErrPeerGone
	}
	return nil
}

func (q *queue) put(frames []datapath.Frame, st *datapath.Stats) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.ended(writer); err != nil {
		return 0, err
	}
	var sent, bytes uint64
	for i := range frames {
		f := &frames[i]
		if f.N > datapath.MaxFrame {
			st.Drop(datapath.DropTooLong)
			continue
		}
		if f.N < 14 { // an Ethernet header
			st.Drop(datapath.DropTooShort)
			continue
		}
		if q.n == len(q.slots) {
			q.short = true
			st.ToGuest.Frames.Add(sent)
			st.ToGuest.Bytes.Add(bytes)
			return i, nil
		}
		s := &q.slots[(q.head+q.n)%len(q.slots)]
		s.hdr, s.data = f.Hdr, s.data[:0]
		for _, seg := range f.Segs {
			s.data = append(s.data, seg[:min(len(seg), f.N-len(s.data))]...)
		}
		q.n++
		q.filled.Signal()
		sent++
		bytes += uint64(len(s.data))
	}
	st.ToGuest.Frames.Add(sent)
	st.ToGuest.Bytes.Add(bytes)
	return len(frames), nil
}

func (q *queue) take(frames []datapath.Frame, get func(n int) [][]byte, st *datapath.Stats) (int, error) {
	if len(frames) == 0 {
		return 0, nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.n == 0 || q.closed[reader] || q.closed[writer] {
		if err := q.ended(reader); err != nil {
			return 0, err
		}
		q.filled.Wait()
	}
	var bytes uint64
	n := min(q.n, len(frames))
	for i := range frames[:n] {
		s := &q.slots[q.head]
		f := &frames[i]
		f.Hdr, f.N, f.Segs = s.hdr, len(s.data), get(len(s.data))
		rest := s.data
		for _, seg := range f.Segs {
			rest = rest[copy(seg, rest):]
		}
		bytes += uint64(f.N)
		q.head = (q.head + 1) % len(q.slots)
		q.n--
	}
	st.FromGuest.Frames.Add(uint64(n))
	st.FromGuest.Bytes.Add(bytes)
	if q.short {
		q.short = false
		q.fire()
	}
	return n, nil
}

// close ends both ends' calls on this queue.
func (q *queue) close(at end) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed[at] = true
	q.filled.Broadcast()
	q.fire()
}

// fire wakes a writer that waits for room.
func (q *queue) fire() {
	select {
	case q.room <- struct{}{}:
	default: // a value is there already
	}
}
