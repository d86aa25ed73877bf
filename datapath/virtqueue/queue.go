package virtqueue

import (
	"errors"
	"fmt"
)

// ErrCorrupt says that the driver has left the ring in a state that cannot be
// followed. It is final: the queue's user stops the ring.
var ErrCorrupt = errors.New("virtqueue is corrupt")

// Features are the feature bits that change how a queue works, as negotiated.
type Features struct {
	EventIdx bool // VIRTIO_F_EVENT_IDX (29)
	Indirect bool // VIRTIO_F_INDIRECT_DESC (28)
}

// A Queue is the device side of one started split virtqueue. It is not safe for
// concurrent use, and all its methods return at once. It allocates nothing
// after New, errors aside.
type Queue struct {
	mem      Memory
	features Features
	num      uint16
	desc     []byte
	availRng []byte // le16 heads
	usedRng  []byte // le32 id, le32 len
	shared   shared

	next      uint16 // available entry to take next
	avail     uint16 // available index as last read
	back      uint16 // entries from next on that were taken and given back
	used      uint16 // used entry to write next
	published uint16 // used index the driver can see
	flags     uint16 // used flags the driver can see
	called    bool   // the driver's used_event tells about entries since published

	corrupt error // wraps ErrCorrupt once it has happened
}

// New returns the device side of ring r, whose chains lie in mem. next is the
// available entry to take first, as SET_VRING_BASE gives it; used entries go on
// from the used index that lies in the ring. Nothing is written, and whether
// the driver kicks is undecided until EnableKicks or DisableKicks. The error
// says what is wrong with r.
func New(mem Memory, r Vring, f Features, next uint16) (*Queue, error) {
	if err := r.check(); err != nil {
		return nil, fmt.Errorf("place vring: %w", err)
	}
	q := &Queue{
		mem: mem, features: f, num: r.Num,
		desc:     r.Desc,
		availRng: r.Avail[availRing : availRing+availElem*int(r.Num)],
		usedRng:  r.Used[usedRing : usedRing+usedElem*int(r.Num)],
		next:     next, avail: next,
	}
	q.used = r.UsedIndex()
	q.published = q.used
	q.shared.init(r)
	return q, nil
}

// Num returns the queue size in descriptors: the most chains that can be
// available or in use at a time.
func (q *Queue) Num() int { return int(q.num) }

// Next returns the available entry that Pop takes next, which is what
// GET_VRING_BASE asks for once everything popped has been pushed or unpopped.
func (q *Queue) Next() uint16 { return q.next }
