package trace

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/datapath"
)

// A Direction says which way a frame went, as the host's end of the link sees it.
type Direction uint8

// The directions; their values are those of pcapng's epb_flags.
const (
	Unknown  Direction = iota // a drop that a transport counted
	Inbound                   // from the guest
	Outbound                  // to the guest
)

// A FlowKey names a flow by what its frames say.
type FlowKey struct {
	VM       string
	Protocol uint8 // of IP: 6 TCP, 17 UDP
	Gateway  netip.AddrPort
	Guest    netip.AddrPort
}

// A Flow is what is known of a flow: who asked for it, and its number; 0 where
// only the first is certain.
type Flow struct {
	Owner string
	ID    uint64
}

// Options of a Tracer; the zero value traces frames and nothing of their flows.
type Options struct {
	// Flow looks up the flow of a frame; nil where nobody knows. It is called by
	// readers, never by the datapath.
	Flow func(FlowKey) (Flow, bool)
	// FlightPath is where the flight recorder of a VM lies; nil or FlightFrames 0
	// for none.
	FlightPath   func(vm string) string
	FlightFrames int
}

// A Tracer is where the frames of all VMs can be seen. All methods are safe for
// concurrent use.
type Tracer struct {
	opts    Options
	readers atomic.Pointer[[]*Reader]

	mu      sync.Mutex
	links   []*link
	flights map[string]*Recorder
	lost    uint64 // records, of readers that have left
}

// Stats is a reading of what a Tracer has counted.
type Stats struct {
	Readers int               // open now
	Lost    uint64            // records that readers too slow for the frames have lost, since New
	Flown   map[string]uint64 // frames kept by the flight recorder of each VM that has one, since New
}

// Stats reads the counters. It holds up no frame but of a flight recorder, and
// that for no longer than another frame does.
func (t *Tracer) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := Stats{Lost: t.lost, Flown: make(map[string]uint64, len(t.flights))}
	if all := t.readers.Load(); all != nil {
		s.Readers = len(*all)
		for _, r := range *all {
			s.Lost += r.Lost()
		}
	}
	for vm, f := range t.flights {
		s.Flown[vm] = f.recorded()
	}
	return s
}

// New returns a Tracer that nobody reads yet.
func New(o Options) *Tracer {
	return &Tracer{opts: o, flights: make(map[string]*Recorder)}
}

// Wrap returns att with its frames traced as those of vm. Everything else of att
// is as it was: its offloads, its counters, its end. The error is the flight
// recorder's, and the attachment is traced without it then.
func (t *Tracer) Wrap(vm string, att datapath.Attachment) (datapath.Attachment, error) {
	l := &link{Attachment: att, tracer: t, vm: vm}
	flight, err := t.recorder(vm)
	for i, qp := range att.QueuePairs() {
		q := &queuePair{QueuePair: qp, link: l, queue: i, flight: flight}
		if p, ok := qp.(datapath.Pollable); ok {
			l.pairs = append(l.pairs, &pollablePair{q, p})
			continue
		}
		l.pairs = append(l.pairs, q)
	}
	t.mu.Lock()
	t.links = append(t.links, l)
	t.mu.Unlock()
	att.Stats().Watch(l.dropped)
	return l, err
}

// recorder returns the flight recorder of a VM, nil without one.
func (t *Tracer) recorder(vm string) (*Recorder, error) {
	if t.opts.FlightPath == nil || t.opts.FlightFrames == 0 {
		return nil, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f, ok := t.flights[vm]; ok {
		return f, nil
	}
	f, err := NewRecorder(t.opts.FlightPath(vm), vm, t.opts.FlightFrames)
	if err != nil {
		return nil, err
	}
	t.flights[vm] = f
	return f, nil
}

// Close ends every reader and closes the flight recorders, whose files stay.
// Attachments go on, untraced.
func (t *Tracer) Close() error {
	if all := t.readers.Load(); all != nil {
		for _, r := range *all {
			r.Close()
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var err error
	for _, f := range t.flights {
		err = errors.Join(err, f.Close())
	}
	clear(t.flights)
	return err
}

// A link is an attachment under trace.
type link struct {
	datapath.Attachment
	tracer *Tracer
	vm     string
	pairs  []datapath.QueuePair
}

// QueuePairs implements datapath.Attachment.
func (l *link) QueuePairs() []datapath.QueuePair { return l.pairs }

// Close implements datapath.Attachment.
func (l *link) Close() error {
	t := l.tracer
	t.mu.Lock()
	t.links = slices.DeleteFunc(t.links, func(o *link) bool { return o == l })
	t.mu.Unlock()
	return l.Attachment.Close()
}

// dropped is told of every frame that the transport drops by itself.
func (l *link) dropped(why datapath.DropReason) {
	all := l.tracer.readers.Load()
	if all == nil {
		return
	}
	for _, r := range *all {
		if r.wants(l.vm) {
			r.noteDrop(l, why)
		}
	}
}

// A queuePair is one of an attachment's under trace.
type queuePair struct {
	datapath.QueuePair
	link   *link
	queue  int
	flight *Recorder

	// Of the goroutine that reads: the last batch, and what was reserved for it.
	batch   []datapath.Frame
	pending held
	flown   []uint64 // the batch's numbers in flight
}

var _ datapath.DropObserver = (*queuePair)(nil)

// WriteBatch implements datapath.QueuePair.
func (q *queuePair) WriteBatch(frames []datapath.Frame) (int, error) {
	all := q.link.tracer.readers.Load()
	if all == nil && q.flight == nil {
		return q.QueuePair.WriteBatch(frames)
	}
	h := helds.Get().(*held)
	h.reserve(all, q, frames, Outbound, nil)
	n, err := q.QueuePair.WriteBatch(frames)
	if err != nil {
		n = 0
	}
	h.publish(n)
	helds.Put(h)
	if q.flight != nil {
		at := time.Now().UnixNano()
		for i := range frames[:n] {
			q.flight.record(at, q.queue, Outbound, &frames[i], 0)
		}
	}
	return n, err
}

// ReadBatch implements datapath.QueuePair.
func (q *queuePair) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (int, error) {
	q.settle()
	n, err := q.QueuePair.ReadBatch(frames, get)
	q.note(frames[:n])
	return n, err
}

// note begins the records of a batch.
func (q *queuePair) note(frames []datapath.Frame) {
	all := q.link.tracer.readers.Load()
	if all == nil && q.flight == nil {
		return
	}
	q.batch = frames
	q.pending.reserve(all, q, q.batch, Inbound, nil)
	if q.flight != nil {
		at := time.Now().UnixNano()
		for i := range q.batch {
			q.flown = append(q.flown, q.flight.record(at, q.queue, Inbound, &q.batch[i], 0))
		}
	}
}

// A pollablePair is a queuePair of a transport whose readers may wait by themselves.
type pollablePair struct {
	*queuePair
	pollable datapath.Pollable
}

var _ datapath.Pollable = (*pollablePair)(nil)

// Control implements datapath.Pollable.
func (q *pollablePair) Control(f func(fd uintptr)) error { return q.pollable.Control(f) }

// OnEnd implements datapath.Pollable.
func (q *pollablePair) OnEnd(ended func()) { q.pollable.OnEnd(ended) }

// TryReadBatch implements datapath.Pollable.
func (q *pollablePair) TryReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (int, error) {
	q.settle()
	n, err := q.pollable.TryReadBatch(frames, get)
	q.note(frames[:n])
	return n, err
}

// settle publishes the last batch's records: their reader is done with it.
func (q *queuePair) settle() {
	if q.batch == nil {
		return
	}
	q.pending.publish(len(q.batch))
	q.batch, q.flown = nil, q.flown[:0]
}

// DroppedFromGuest implements datapath.DropObserver.
func (q *queuePair) DroppedFromGuest(f *datapath.Frame, why datapath.DropReason) {
	for i := range q.batch {
		if &q.batch[i] != f {
			continue
		}
		q.pending.mark(i, why)
		if i < len(q.flown) {
			q.flight.mark(q.flown[i], why)
		}
	}
	q.dropped(f, Inbound, why)
}

// DroppedToGuest implements datapath.DropObserver.
func (q *queuePair) DroppedToGuest(f *datapath.Frame, why datapath.DropReason) {
	q.dropped(f, Outbound, why)
	if q.flight != nil {
		q.flight.record(time.Now().UnixNano(), q.queue, Outbound, f, dropOf(why))
	}
}

// dropped records a dropped frame for the readers that have no record of it yet:
// of one from the guest, those of dropped frames alone.
func (q *queuePair) dropped(f *datapath.Frame, dir Direction, why datapath.DropReason) {
	all := q.link.tracer.readers.Load()
	if all == nil {
		return
	}
	h := helds.Get().(*held)
	h.reserve(all, q, []datapath.Frame{*f}, dir, &why)
	h.publish(1)
	helds.Put(h)
}
