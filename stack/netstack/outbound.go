package netstack

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/promoted"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// maxBacklog bounds what waits for room towards a guest that takes no
	// frames and is not TCP payload: acknowledgements, handshakes, datagrams.
	// 1024 is the length of a usual virtqueue.
	maxBacklog = 1024
	// maxSegments bounds waiting TCP payload. Windows bound it already, and the
	// payload is shared with the sender's own queue; but each retransmission
	// adds a header: 65536 × ~600 bytes = 40 MB at the very worst.
	maxSegments = 65536
	// drainBatch is how many waiting packets one WriteBatch is given.
	drainBatch = 32
)

// An outbound is one queue pair's way to the guest. send may run in any number
// of goroutines: while the guest takes frames each hands over its own.
type outbound struct {
	qp    datapath.QueuePair
	stats *datapath.Stats
	kick  chan struct{} // a packet waits that no Room may be due for
	done  chan struct{}
	once  sync.Once

	// full says that packets wait, and so that order demands to queue behind
	// them. It is set and cleared under mu.
	full atomic.Bool
	// stuck is since when the guest has taken none of those that wait, packets or who
	// would send one, in nanoseconds after begun; 0 while none waits. It is set under mu.
	stuck atomic.Int64
	begun time.Time

	// rooms counts when there was room after there had been none.
	rooms atomic.Uint64

	mu       sync.Mutex
	waiters  []promoted.Waiter // for room
	waiting  []*stack.PacketBuffer
	segments int // of waiting, those with TCP payload
	ended    bool
}

func newOutbound(qp datapath.QueuePair, stats *datapath.Stats) *outbound {
	return &outbound{qp: qp, stats: stats, kick: make(chan struct{}, 1), done: make(chan struct{}), begun: time.Now()}
}

// A scratch is the memory of one WriteBatch.
type scratch struct {
	frames [drainBatch]datapath.Frame
	segs   [drainBatch][maxSegs][]byte
}

// maxSegs is how many pieces of a packet are handed over without a copy:
// headers, and a super-frame's payload merged of many small writes. What is
// longer is copied together.
const maxSegs = 24

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// send hands pkt to the guest, or keeps it until there is room.
func (o *outbound) send(pkt *stack.PacketBuffer) {
	if o.full.Load() {
		o.keep(pkt)
		return
	}
	sc := scratches.Get().(*scratch)
	sc.fill(0, pkt)
	n, err := o.qp.WriteBatch(sc.frames[:1])
	sc.release(1)
	if n == 0 && err == nil {
		o.keep(pkt)
	}
	// An ended attachment takes nothing more; inbound reports its end.
}

// sendFrames hands over frames that are not gVisor's and returns how many were
// taken: none while packets wait for room, behind which they would have to queue.
func (o *outbound) sendFrames(frames []datapath.Frame) int {
	if o.full.Load() {
		return 0
	}
	n, err := o.qp.WriteBatch(frames)
	if err != nil {
		return len(frames) // to nobody; inbound reports the end
	}
	return n
}

// sendOrWait is sendFrames for who sends what is not taken again, when w is told that
// there is room.
func (o *outbound) sendOrWait(frames []datapath.Frame, w promoted.Waiter) int {
	rooms := o.rooms.Load()
	n := o.sendFrames(frames)
	if n == len(frames) || w == nil {
		return n
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.addWaiter(w)
	if o.stuck.Load() == 0 {
		o.moved()
	}
	if rooms != o.rooms.Load() { // there has been room meanwhile, of which w was not told
		select {
		case o.kick <- struct{}{}:
		default:
		}
	}
	return n
}

// addWaiter adds w. A guest that never takes a frame gets new flows all the same, which
// give up: those are forgotten before there is more memory for waiters. o.mu is held.
func (o *outbound) addWaiter(w promoted.Waiter) {
	if len(o.waiters) == cap(o.waiters) {
		o.waiters = slices.DeleteFunc(o.waiters, promoted.Waiter.Over)
		if len(o.waiters) > cap(o.waiters)/2 { // or they would be gone through again soon
			o.waiters = slices.Grow(o.waiters, cap(o.waiters))
		}
	}
	o.waiters = append(o.waiters, w)
}

// keep queues pkt behind what waits already.
func (o *outbound) keep(pkt *stack.PacketBuffer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	segment := isSegment(pkt)
	if o.ended || (segment && o.segments >= maxSegments) || (!segment && len(o.waiting)-o.segments >= maxBacklog) {
		o.overflow(pkt)
		return
	}
	if segment {
		o.segments++
	}
	o.waiting = append(o.waiting, pkt.IncRef())
	if len(o.waiting) > 1 {
		return
	}
	o.full.Store(true)
	o.moved()
	// Room may have fired between the short WriteBatch and now, and found
	// nothing waiting.
	select {
	case o.kick <- struct{}{}:
	default:
	}
}

// moved notes that the guest takes frames until now, while others wait.
func (o *outbound) moved() { o.stuck.Store(max(1, int64(time.Since(o.begun)))) }

// stalled returns for how long the guest has taken none of the packets that wait;
// 0 while none waits.
func (o *outbound) stalled() time.Duration {
	since := o.stuck.Load()
	if since == 0 {
		return 0
	}
	return time.Since(o.begun) - time.Duration(since)
}

// overflow counts pkt as dropped, and shows it to who traces the link.
func (o *outbound) overflow(pkt *stack.PacketBuffer) {
	observer, ok := o.qp.(datapath.DropObserver)
	if !ok {
		o.stats.Drop(datapath.DropQueueFull)
		return
	}
	o.stats.DropShown(datapath.DropQueueFull)
	sc := scratches.Get().(*scratch)
	sc.fill(0, pkt)
	observer.DroppedToGuest(&sc.frames[0], datapath.DropQueueFull)
	sc.release(1)
}

// isSegment reports whether pkt carries TCP payload, which its flow's windows
// bound.
func isSegment(pkt *stack.PacketBuffer) bool {
	return pkt.TransportProtocolNumber == header.TCPProtocolNumber && pkt.Data().Size() > 0
}

// run hands over what waits whenever there is room, until the attachment ends.
func (o *outbound) run() {
	for {
		select {
		case <-o.qp.Room():
			o.drain()
			o.tellWaiters()
		case <-o.kick:
			o.drain()
			o.tellWaiters()
		case <-o.done:
			o.drop()
			return
		}
	}
}

// tellWaiters tells who waits for room that there may be some, one after the other until
// there is none again: each costs a try, and there may be as many as flows.
func (o *outbound) tellWaiters() {
	o.mu.Lock()
	o.rooms.Add(1)
	waiters := o.waiters
	o.waiters = nil
	if len(o.waiting) == 0 {
		o.stuck.Store(0) // who finds no room again says so
	}
	o.mu.Unlock()
	for i, w := range waiters {
		w.Room()
		if o.waitMore(waiters[i+1:]) {
			return
		}
	}
}

// waitMore has those wait on, before others, if somebody has found no room since they were
// taken: Room fires again then, or there is a kick.
func (o *outbound) waitMore(first []promoted.Waiter) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.waiters) == 0 {
		return false
	}
	o.waiters = append(first, o.waiters...)
	return true
}

// drain hands over what waits, in order, as far as there is room.
func (o *outbound) drain() {
	sc := scratches.Get().(*scratch)
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.waiting) > 0 {
		batch := o.waiting[:min(drainBatch, len(o.waiting))]
		for i, pkt := range batch {
			sc.fill(i, pkt)
		}
		n, err := o.qp.WriteBatch(sc.frames[:len(batch)])
		if err != nil {
			n = len(batch) // to nobody
		}
		for i, pkt := range batch[:n] {
			if isSegment(pkt) {
				o.segments--
			}
			pkt.DecRef()
			batch[i] = nil
		}
		o.waiting = o.waiting[n:]
		if n > 0 {
			o.moved()
		}
		if n < len(batch) {
			sc.release(len(batch))
			return // Room fires again
		}
	}
	sc.release(drainBatch)
	o.waiting = nil
	o.full.Store(false)
	o.stuck.Store(0)
}

// stop ends run.
func (o *outbound) stop() { o.once.Do(func() { close(o.done) }) }

// drop frees what waits; later packets are dropped at once.
func (o *outbound) drop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	for _, pkt := range o.waiting {
		pkt.DecRef()
	}
	o.waiting, o.segments = nil, 0
	o.full.Store(false)
	o.stuck.Store(0)
}

// fill makes sc.frames[i] the frame of pkt: its bytes as they lie, and the
// virtio-net header that leaves checksum and segmentation to the guest.
func (sc *scratch) fill(i int, pkt *stack.PacketBuffer) {
	f := &sc.frames[i]
	f.Segs = sc.segs[i][:0]
	f.N = 0
	merged := false
	views, skip := pkt.AsViewList()
	for v := views.Front(); v != nil; v = v.Next() {
		b := v.AsSlice()
		if skip > 0 {
			n := min(skip, len(b))
			b, skip = b[n:], skip-n
		}
		if len(b) == 0 {
			continue
		}
		f.N += len(b)
		if len(f.Segs) < maxSegs {
			f.Segs = append(f.Segs, b)
			continue
		}
		if !merged {
			// Rare: the tail is copied together into fresh memory, never behind
			// the view's own.
			f.Segs[maxSegs-1] = append(make([]byte, 0, datapath.MaxFrame), f.Segs[maxSegs-1]...)
			merged = true
		}
		f.Segs[maxSegs-1] = append(f.Segs[maxSegs-1], b...)
	}
	f.Hdr = netHdr(pkt)
}

// netHdr builds the virtio-net header (virtio 1.3, 5.1.6.2) of a packet that
// left its checksum, and perhaps its segmentation, to the guest.
func netHdr(pkt *stack.PacketBuffer) (h virtio.NetHdr) {
	gso := pkt.GSOOptions
	if gso.Type == stack.GSONone || !gso.NeedsCsum {
		return h
	}
	h.Flags = virtio.FlagNeedsCSum
	h.CSumStart = header.EthernetMinimumSize + gso.L3HdrLen
	h.CSumOffset = gso.CsumOffset
	if pkt.Data().Size() <= int(gso.MSS) {
		return h
	}
	switch gso.Type {
	case stack.GSOTCPv4:
		h.GSOType = virtio.GSOTCPv4
	case stack.GSOTCPv6:
		h.GSOType = virtio.GSOTCPv6
	}
	h.HdrLen = uint16(pkt.HeaderSize())
	h.GSOSize = gso.MSS
	return h
}

// release forgets the packets' memory and returns sc to its pool.
func (sc *scratch) release(n int) {
	for i := range n {
		clear(sc.frames[i].Segs)
		sc.frames[i].Segs = nil
	}
	scratches.Put(sc)
}
