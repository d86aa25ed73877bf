package vhostuser

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/internal/eventfd"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// pollEvery is how often a ring is looked at whose front-end gave no kick.
const pollEvery = time.Millisecond

// A vring is one ring: what the front-end said of it and, while it is started,
// its queue. The device's lock guards it: held for writing to change it, for
// reading, a batch at a time, to use the queue. Besides, the readers of a pair
// use its TX queue one at a time, and who uses an RX queue holds out.
type vring struct {
	index   int
	num     uint16 // descriptors; 0 before SET_VRING_NUM
	base    uint16 // where a start begins, if the used index agrees
	addr    *vringAddr
	enabled bool

	started  bool
	features uint64           // as it was started
	queue    *virtqueue.Queue // nil unless started, and in memory that is there
	form     int              // length of the virtio-net header
	call     *eventfd.Call    // nil: the driver polls
	polled   bool             // started without a kick
	kick     atomic.Pointer[eventfd.Kick]
	stopped  chan struct{} // closed when what started ends
	watcher  sync.WaitGroup

	// broken says that the driver has made a mess of the ring. It stays as it is
	// until it is started anew.
	broken atomic.Bool

	counts datapath.Queue // of the attachment's life; see counts.go

	// wake holds a value when a change may be worth a look, beside the kick.
	wake chan struct{}

	out      sync.Mutex // an RX ring's writers take turns, and it guards what follows
	outbound outbound
	short    bool // a writer waits for room
}

func (r *vring) receives() bool { return r.index%2 == 0 } // RX, of the guest

// usable reports whether there is a queue that can be used.
func (r *vring) usable() bool { return r.queue != nil && !r.broken.Load() }

// interrupt makes who waits for the ring look again. It needs no lock.
func (r *vring) interrupt() {
	select {
	case r.wake <- struct{}{}:
	default: // a value says the same
	}
	if k := r.kick.Load(); k != nil {
		k.Interrupt()
	}
}

// wait returns when the ring is worth another look, or done is closed. ready
// looks once more when nothing can be missed any more.
func (r *vring) wait(done <-chan struct{}, polled bool, ready func() bool) {
	if k := r.kick.Load(); k != nil {
		if k.Wait(ready) == nil {
			return
		}
	}
	// Stopped, or without a kick.
	var tick <-chan time.Time
	if polled {
		tick = time.After(pollEvery)
	}
	select {
	case <-r.wake:
	case <-tick:
	case <-done:
	}
}

// open makes the queue of a started ring, whose first chain is the one at next.
func (r *vring) open(mem *memTable, next uint16) (err error) {
	v, err := r.place(mem)
	if err == nil {
		r.queue, err = virtqueue.New(mem, v, virtqueue.Features{
			EventIdx: r.features&featureEventIdx != 0,
			Indirect: r.features&featureIndirectDesc != 0,
		}, next)
	}
	if err != nil {
		r.queue = nil
		return fmt.Errorf("open ring %d: %w", r.index, err)
	}
	if r.receives() {
		r.queue.DisableKicks() // wanted only while a writer waits
	}
	return nil
}

// place finds the three parts of the ring in the front-end's memory.
func (r *vring) place(mem *memTable) (v virtqueue.Vring, err error) {
	v.Num = r.num
	if v.Desc, err = mem.atUser(r.addr.desc, virtqueue.DescSize(r.num)); err != nil {
		return v, err
	}
	if v.Avail, err = mem.atUser(r.addr.avail, virtqueue.AvailSize(r.num)); err != nil {
		return v, err
	}
	v.Used, err = mem.atUser(r.addr.used, virtqueue.UsedSize(r.num))
	return v, err
}
