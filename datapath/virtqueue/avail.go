package virtqueue

import "fmt"

// usedFNoNotify in the used flags asks the driver not to kick, without
// EVENT_IDX (virtio 1.3, 2.7.10).
const usedFNoNotify = 1

// EnableKicks asks the driver to kick when it makes another chain available,
// and looks once more: more says that there are chains that Pop has not looked
// at yet, in which case the caller goes on and does not sleep. Chains that were
// given back with Unpop have been looked at: a caller that found too few of
// them is woken when others join them.
func (q *Queue) EnableKicks() (more bool) {
	seen := q.next + q.back
	if q.features.EventIdx {
		q.shared.storeAvailEvent(seen)
	} else {
		q.flags = 0
		q.shared.storeUsed(q.flags, q.published)
	}
	return q.shared.loadAvail() != seen
}

// DisableKicks tells the driver that it need not kick: we look by ourselves. It
// is advice; kicks may still come. With EVENT_IDX there is nothing to do:
// avail_event stays where it was, and the driver passes it once in 65536 chains.
func (q *Queue) DisableKicks() {
	if !q.features.EventIdx && q.flags != usedFNoNotify {
		q.flags = usedFNoNotify
		q.shared.storeUsed(q.flags, q.published)
	}
}

// Avail returns how many chains can be popped now, at most Num. After
// corruption, which only Pop reports, it may be any number up to Num.
func (q *Queue) Avail() int {
	return int(min(q.shared.loadAvail()-q.next, q.num))
}

// Pop takes the next chain that the driver made available into c, whose earlier
// content is lost. ok says that there was one.
//
// With ok and a non-nil error, which is a ChainError, a chain was taken that
// cannot be used: it has a Head and no bytes, and is to be pushed with nothing
// written (or given back). Without ok the error is nil, or wraps ErrCorrupt.
func (q *Queue) Pop(c *Chain) (ok bool, err error) {
	if q.corrupt != nil {
		return false, q.corrupt
	}
	if q.next == q.avail { // everything known of is taken: look for more
		idx := q.shared.loadAvail()
		if n := idx - q.next; n > q.num {
			q.corrupt = fmt.Errorf("%w: available index %d is %d ahead of %d in a ring of %d", ErrCorrupt, idx, n, q.next, q.num)
			return false, q.corrupt
		}
		if q.avail = idx; q.next == q.avail {
			return false, nil
		}
	}
	head := load16(half(q.availRng, availElem*int(q.next&(q.num-1))))
	if head >= q.num {
		q.corrupt = fmt.Errorf("%w: available entry %d is head %d of %d descriptors", ErrCorrupt, q.next, head, q.num)
		return false, q.corrupt
	}
	q.next++
	if q.back > 0 {
		q.back--
	}
	return true, q.walk(c, head)
}

// Unpop gives back the last n chains popped, none of which has been pushed: Pop
// takes them again.
func (q *Queue) Unpop(n int) {
	q.next -= uint16(n)
	q.back += uint16(n)
}
