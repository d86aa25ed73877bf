package virtqueue

import "encoding/binary"

// availFNoInterrupt in the available flags asks us not to call, without
// EVENT_IDX (virtio 1.3, 2.7.7).
const availFNoInterrupt = 1

// Push returns the chain that begins at head, as Pop gave it, with the number of
// bytes written to it from its first writable one on. The driver does not see it
// before Flush. Each chain popped is pushed once, in any order.
func (q *Queue) Push(head uint16, written uint32) {
	e := q.usedRng[usedElem*int(q.used&(q.num-1)):]
	binary.LittleEndian.PutUint32(e, uint32(head))
	binary.LittleEndian.PutUint32(e[4:], written)
	q.used++
}

// Flush shows the driver everything pushed, with one store of the used index.
// call says that the driver wants to be told of it (an interrupt, the call
// eventfd); it is false when nothing was pushed since.
func (q *Queue) Flush() (call bool) {
	if q.used == q.published {
		return false
	}
	before := q.published
	q.published = q.used
	q.shared.storeUsed(q.flags, q.published)
	if !q.features.EventIdx {
		return load16(q.shared.availFlags)&availFNoInterrupt == 0
	}
	// A used_event from before New may have been passed by whoever served the
	// ring then, who may not have called: the first time calls in any case.
	if !q.called {
		q.called = true
		return true
	}
	return passed(load16(q.shared.usedEvent), before, q.published)
}

// passed reports whether an index that went from before to after has left event
// behind: event is one of before, ..., after-1, modulo 65536. That is the rule
// of virtio 1.3, 2.7.7.2, for a whole batch.
func passed(event, before, after uint16) bool {
	return event-before < after-before
}
