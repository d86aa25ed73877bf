package vhostuser

import (
	"runtime/debug"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// outbound is the state of who writes to an RX ring, guarded by its out.
type outbound struct {
	first, more virtqueue.Chain
	used        []usedChain
	src         [][]byte
	hdr         [virtio.HdrSizeMrgBuf]byte
	hdrVec      [1][]byte
}

// A usedChain is one to be pushed.
type usedChain struct {
	head    uint16
	written uint32
}

// WriteBatch puts frames in RX, as datapath.QueuePair says.
func (q *queuePair) WriteBatch(frames []datapath.Frame) (n int, err error) {
	d := q.dev
	d.mu.RLock()
	defer d.mu.RUnlock()
	if err := q.ended(); err != nil || len(frames) == 0 {
		return 0, err
	}
	r := q.receiver()
	if r == nil { // stopped, or the driver wants none: who changes that fires Room
		q.short.Store(true)
		return 0, nil
	}
	r.out.Lock()
	defer r.out.Unlock()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if err != nil {
			q.fail(r, err)
			n, err = 0, q.ended()
		}
	}()
	defer caught(&err)
	return q.writeTo(r, frames)
}

// receiver returns the RX ring that takes the pair's frames: its own or, where
// the driver does not use that, the first it uses. Nil is none.
func (q *queuePair) receiver() *vring {
	if q.rx.usable() && q.rx.enabled {
		return q.rx
	}
	for _, other := range q.queues {
		if other.rx.usable() && other.rx.enabled {
			return other.rx
		}
	}
	return nil
}

// writeTo puts frames in r until one does not fit, and shows them to the driver
// all at once.
func (q *queuePair) writeTo(r *vring, frames []datapath.Frame) (n int, err error) {
	var sent, bytes uint64
	room := true
	for ; n < len(frames); n++ {
		f := &frames[n]
		hdr, why, ok := q.sendable(f)
		if ok {
			if why, ok, room, err = r.put(f, hdr, &q.stats); err != nil || !room {
				break
			}
		}
		if !ok {
			q.stats.Drop(why)
			continue
		}
		r.count(&hdr)
		sent++
		bytes += uint64(f.N)
	}
	r.flush(sent > 0)
	q.stats.ToGuest.Frames.Add(sent)
	q.stats.ToGuest.Bytes.Add(bytes)
	if err == nil && !room {
		q.awaitRoom(r)
	}
	return n, err
}

// sendable returns the header that f goes with, or why it never goes.
func (q *queuePair) sendable(f *datapath.Frame) (hdr virtio.NetHdr, why datapath.DropReason, ok bool) {
	switch {
	case f.N < etherHeader:
		return hdr, datapath.DropTooShort, false
	case f.N > datapath.MaxFrame:
		return hdr, datapath.DropTooLong, false
	}
	hdr = f.Hdr
	switch hdr.Check(f.N, q.info.ToGuest) {
	case nil:
	case virtio.ErrNotOffered:
		return hdr, datapath.DropNotOffered, false
	default:
		return hdr, datapath.DropBadHeader, false
	}
	if q.info.ToGuest == 0 {
		hdr.Flags = 0 // without GUEST_CSUM the guest knows none (virtio 1.3, 5.1.6.4.1)
	}
	return hdr, 0, true
}

// put puts one frame in the ring. It is not taken when there is no room for it
// now, and not ok, for the reason why, when there never will be.
//
// With mergeable buffers a frame lies in as many chains as it takes, the first of
// which says how many (virtio 1.3, 5.1.6.3.1): that is known when the last has
// been popped. Until then none is pushed, and where the ring runs out of them
// they go back as if never taken.
func (r *vring) put(f *datapath.Frame, hdr virtio.NetHdr, st *datapath.Stats) (why datapath.DropReason, ok, room bool, err error) {
	o, q := &r.outbound, r.queue
	o.src = trim(o.src[:0], f.Segs, f.N)
	defer clear(o.src) // the memory is the caller's again
	o.used = o.used[:0]
	torn := false // chains between those of the frame could not be used
	// A ring holds no more than Num chains. A driver that keeps adding to it while
	// we look is not waited for.
	tries := 2 * q.Num()
	for done := 0; done < f.N || len(o.used) == 0; tries-- {
		if len(o.used) == q.Num() {
			r.giveBack(torn)
			return datapath.DropTooLong, false, true, nil
		}
		c, skip := &o.more, 0
		if len(o.used) == 0 {
			c, skip = &o.first, r.form
		}
		popped, err := tries > 0, error(nil)
		if popped {
			popped, err = q.Pop(c)
		}
		switch {
		case !popped && err != nil:
			return 0, false, true, err
		case !popped:
			r.giveBack(torn)
			return 0, false, false, nil
		case err != nil, c.ReadableLen > 0, c.WritableLen < max(skip, 1):
			st.Drop(datapath.DropRejected)
			q.Push(c.Head, 0)
			torn = len(o.used) > 0
			continue
		case r.features&featureMrgRxBuf == 0 && c.WritableLen-skip < f.N:
			q.Unpop(1) // a shorter frame may still fit
			return datapath.DropTooLong, false, true, nil
		}
		n := c.CopyIn(o.src, done, skip)
		done += n
		o.used = append(o.used, usedChain{c.Head, uint32(skip + n)})
	}
	hdr.NumBuffers = uint16(len(o.used))
	hdr.Put(o.hdr[:r.form])
	o.hdrVec[0] = o.hdr[:r.form]
	o.first.CopyIn(o.hdrVec[:], 0, 0)
	for _, u := range o.used {
		q.Push(u.head, u.written)
	}
	return 0, true, true, nil
}

// giveBack returns the chains of a frame that does not fit. Only those popped
// last can go back as if never taken; where others have been pushed among them,
// they too are returned to the driver, empty.
func (r *vring) giveBack(torn bool) {
	if !torn {
		r.queue.Unpop(len(r.outbound.used))
		return
	}
	for _, u := range r.outbound.used {
		r.queue.Push(u.head, 0)
	}
}

// trim appends to dst the first n bytes of segs.
func trim(dst, segs [][]byte, n int) [][]byte {
	for _, s := range segs {
		if n == 0 {
			break
		}
		s = s[:min(len(s), n)]
		n -= len(s)
		dst = append(dst, s)
	}
	return dst
}

// awaitRoom asks to be kicked for more buffers. Then watchRoom fires Room, or it
// does itself when there are more by now.
func (q *queuePair) awaitRoom(r *vring) {
	if r.queue.EnableKicks() {
		r.queue.DisableKicks()
		r.found(byPoll)
		q.fire()
		return
	}
	r.short = true
	q.short.Store(true)
}
