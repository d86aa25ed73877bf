package trace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/culvertnet/culvert/datapath"
)

const (
	// MaxReaders is how many may read at a time: their rings are some 20 MB each.
	MaxReaders = 16
	// DefaultSnap is the snapshot length of who names none: whole frames, as with
	// tcpdump.
	DefaultSnap = 262144
	// tellLoss is how often a stream tells of losses that no record has told yet.
	tellLoss = time.Second
)

// ErrTooMany says that MaxReaders read already.
var ErrTooMany = fmt.Errorf("%d traces are being read already", MaxReaders)

// ReaderOptions say what a Reader sees.
type ReaderOptions struct {
	VM     string  // of this VM alone; empty for all
	Filter *Filter // frames that match alone; nil for all
	Snap   int     // bytes kept of a frame at most; 0 for DefaultSnap
	Drops  bool    // dropped frames alone
}

// A Reader is one who sees frames, from Open to Close. Stream and Close may be
// called at the same time.
type Reader struct {
	tracer *Tracer
	opts   ReaderOptions
	number int // below MaxReaders, none else's of those open
	ring   *ring
	start  time.Time
	done   chan struct{}
	once   sync.Once

	// Of Stream's goroutine.
	out    []byte // blocks not written yet
	ifaces map[iface]*counted
	order  []*counted
}

// An iface is an interface of the stream; queue is drops for those that the
// transports count.
type iface struct {
	vm    string
	queue int
}

const drops = -1

// counted is what an interface's statistics say.
type counted struct {
	id         uint32
	seen, lost uint64
}

// Open returns a Reader of what passes from now on. ErrTooMany says that there
// are as many as there may be.
func (t *Tracer) Open(o ReaderOptions) (*Reader, error) {
	return t.open(o, ringSlots, ringBytes)
}

func (t *Tracer) open(o ReaderOptions, slots, size int) (*Reader, error) {
	if o.Snap <= 0 || o.Snap > DefaultSnap {
		o.Snap = DefaultSnap
	}
	r := &Reader{
		tracer: t, opts: o, start: time.Now(), done: make(chan struct{}), ifaces: make(map[iface]*counted),
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []*Reader
	if now := t.readers.Load(); now != nil {
		all = *now
	}
	if len(all) >= MaxReaders {
		return nil, ErrTooMany
	}
	r.ring = newRing(slots, size) // megabytes, which one that is refused does not cost
	for slices.ContainsFunc(all, func(o *Reader) bool { return o.number == r.number }) {
		r.number++
	}
	all = append(slices.Clone(all), r)
	t.readers.Store(&all)
	return r, nil
}

// Close ends Stream, which writes what it has. Closing again does nothing.
func (r *Reader) Close() {
	r.once.Do(func() {
		t := r.tracer
		t.mu.Lock()
		defer t.mu.Unlock()
		all := slices.DeleteFunc(slices.Clone(*t.readers.Load()), func(o *Reader) bool { return o == r })
		if len(all) > 0 {
			t.readers.Store(&all)
		} else {
			t.readers.Store(nil)
		}
		t.lost += r.Lost() // what a batch under way still loses is nobody's
		close(r.done)
	})
}

// now is the wall clock's time of the beginning and the monotonic time since, in
// nanoseconds: it never falls, whatever the wall clock does (C-52).
func (r *Reader) now() int64 { return r.start.UnixNano() + int64(time.Since(r.start)) }

// Lost returns how many records there was no room for.
func (r *Reader) Lost() uint64 { return r.ring.total.Load() }

// wants reports whether the reader sees frames of vm.
func (r *Reader) wants(vm string) bool { return r.opts.VM == "" || r.opts.VM == vm }

// records reports whether a frame becomes a record now: one that is dropped
// after it came from the guest has one already, but of who sees drops alone.
func (r *Reader) records(dir Direction, dropped bool) bool {
	if !dropped {
		return !r.opts.Drops
	}
	return r.opts.Drops || dir == Outbound
}

// matches reports whether the filter lets f through. It looks at a copy of the
// headers.
func (r *Reader) matches(f *datapath.Frame, dir Direction) bool {
	if r.opts.Filter == nil {
		return true
	}
	var head [maxHeaders]byte
	n := gather(head[:min(f.N, len(head))], f.Segs)
	h := parseHeaders(head[:n])
	return r.opts.Filter.match(&h, f.N, dir)
}

// noteDrop records a drop of which there is no frame. A filter cannot tell
// whether it would have matched, so only who has none is told.
func (r *Reader) noteDrop(l *link, why datapath.DropReason) {
	if r.opts.Filter != nil {
		return
	}
	r.ring.mu.Lock()
	s := r.ring.reserve(&record{at: r.now(), link: l, queue: drops, drop: dropOf(why), noted: true})
	r.ring.mu.Unlock()
	if s != nil {
		s.state.Store(ready)
		r.ring.poke()
	}
}

// Stream writes pcapng to w until ctx ends, Close is called, or w fails: its
// error is w's alone. flush, if not nil, is called when there is nothing more to
// write for now. At the end the interfaces' statistics are written.
func (r *Reader) Stream(ctx context.Context, w io.Writer, flush func() error) error {
	r.begin()
	tell := time.NewTicker(tellLoss)
	defer tell.Stop()
	told := uint64(0)
	send := func() error {
		_, err := w.Write(r.out)
		r.out = r.out[:0]
		return err
	}
	for {
		for range 64 { // frames, some 4 MB at most
			s := r.ring.oldest()
			if s == nil {
				break
			}
			r.packet(s)
			r.ring.free(s)
		}
		if r.ring.oldest() != nil {
			if err := send(); err != nil {
				return err
			}
			if ended(ctx, r.done) {
				return r.finish(w, flush)
			}
			continue
		}
		if len(r.out) > 0 {
			if err := errors.Join(send(), call(flush)); err != nil {
				return err
			}
		}
		select {
		case <-r.ring.wake:
		case <-tell.C:
			if lost := r.Lost(); lost != told {
				told = lost
				r.statistics()
			}
		case <-ctx.Done():
			return r.finish(w, flush)
		case <-r.done:
			return r.finish(w, flush)
		}
	}
}

func ended(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return ctx.Err() != nil
	}
}

func call(flush func() error) error {
	if flush == nil {
		return nil
	}
	return flush()
}

// begin writes the section, and the interfaces there are.
func (r *Reader) begin() {
	r.out = appendSection(r.out)
	r.tracer.mu.Lock()
	defer r.tracer.mu.Unlock()
	for _, l := range r.tracer.links {
		if r.wants(l.vm) {
			for queue := range l.pairs {
				r.iface(l.vm, queue)
			}
		}
	}
}

// iface returns the number of an interface, which it writes at the first use.
func (r *Reader) iface(vm string, queue int) *counted {
	key := iface{vm, queue}
	c := r.ifaces[key]
	if c == nil {
		c = &counted{id: uint32(len(r.ifaces))}
		r.ifaces[key] = c
		r.order = append(r.order, c)
		if queue == drops {
			r.out = appendInterface(r.out, vm+"/drops", linkText, 0)
		} else {
			r.out = appendInterface(r.out, fmt.Sprintf("%s/q%d", vm, queue), linkEthernet, r.opts.Snap)
		}
	}
	return c
}

// packet writes a record.
func (r *Reader) packet(s *slot) {
	rec := &s.rec
	c := r.iface(rec.link.vm, rec.queue)
	c.seen++
	c.lost += rec.lost
	p := Packet{Interface: c.id, At: rec.at, Dir: rec.dir, Lost: rec.lost, Length: rec.length, Data: r.ring.bytes(s)}
	start := len(r.out)
	r.out = p.head(beginBlock(r.out, BlockPacket))
	if rec.noted {
		why := datapath.DropReason(rec.drop - 1).String()
		r.out = p.text(r.out, "the transport dropped a frame: "+why)
		r.out = appendComment(r.out, "drop ", why)
		r.out = endBlock(r.out, start)
		return
	}
	h := parseHeaders(p.Data)
	partial := rec.hdr.Flags&flagNeedsCSum != 0 && !(rec.drop == 0 && rec.n == rec.length && complete(p.Data, &rec.hdr, &h))
	r.out = p.data(r.out)
	if flow, ok := r.flow(rec, &h); ok {
		r.out = appendComment(r.out, "owner ", flow.Owner)
		if flow.ID != 0 {
			r.out = appendCount(r.out, "flow ", flow.ID, "")
		}
	}
	if rec.hdr.GSOType != 0 {
		r.out = appendCount(r.out, "super-frame of segments of ", uint64(rec.hdr.GSOSize), " bytes")
	}
	if partial {
		r.out = appendComment(r.out, "checksum partial", "")
	}
	if rec.drop != 0 {
		r.out = appendComment(r.out, "drop ", datapath.DropReason(rec.drop-1).String())
	}
	r.out = endBlock(r.out, start)
}

// flow looks up the flow of a record.
func (r *Reader) flow(rec *record, h *headers) (Flow, bool) {
	if r.tracer.opts.Flow == nil || !h.ports {
		return Flow{}, false
	}
	k := FlowKey{
		VM: rec.link.vm, Protocol: h.proto,
		Gateway: netip.AddrPortFrom(h.dst, h.dstPort), Guest: netip.AddrPortFrom(h.src, h.srcPort),
	}
	if rec.dir == Outbound {
		k.Gateway, k.Guest = k.Guest, k.Gateway
	}
	return r.tracer.opts.Flow(k)
}

// statistics writes what each interface has counted.
func (r *Reader) statistics() {
	r.ring.mu.Lock()
	for src, n := range r.ring.lost {
		r.iface(src.link.vm, src.queue).lost += n
		delete(r.ring.lost, src) // told here, and so not by the next record
	}
	r.ring.mu.Unlock()
	at := r.now()
	for _, c := range r.order {
		r.out = AppendStatistics(r.out, c.id, at, c.seen, c.lost)
	}
}

// finish writes what is settled, and the statistics.
func (r *Reader) finish(w io.Writer, flush func() error) error {
	r.Close() // nothing more comes in
	for {
		s := r.ring.oldest()
		if s == nil {
			break
		}
		r.packet(s)
		r.ring.free(s)
		if len(r.out) > 1<<20 {
			if _, err := w.Write(r.out); err != nil {
				return err
			}
			r.out = r.out[:0]
		}
	}
	r.statistics()
	_, err := w.Write(r.out)
	r.out = nil
	return errors.Join(err, call(flush))
}
