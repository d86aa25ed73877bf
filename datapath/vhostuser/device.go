package vhostuser

import (
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/internal/eventfd"
)

// A device is our side of one front-end's NIC: the guest's memory, the rings in
// it, and the attachment that has the use of them. The session's goroutine
// changes it; readers and writers of frames use it at the same time.
//
// Whoever touches guest memory holds mu for reading, for one batch; whoever
// changes what they rely on holds it for writing. So no memory is unmapped and
// no ring stopped under a batch, and none of that waits for longer than one.
type device struct {
	name  string
	pairs int
	// changed says that attach may have another answer than before, fail that the
	// front-end's memory is not what it said. Neither waits for anything.
	changed func()
	fail    func(error)

	mu     sync.RWMutex
	mem    memTable
	rings  []*vring    // RX and TX of each pair in turn
	att    *attachment // the one that is not yet closed; nil if there is none
	closed bool        // there will be no other
}

func newDevice(name string, pairs int, changed func(), fail func(error)) *device {
	d := &device{name: name, pairs: pairs, changed: changed, fail: fail}
	for i := range 2 * pairs {
		d.rings = append(d.rings, &vring{index: i, wake: make(chan struct{}, 1)})
	}
	return d
}

// features returns what we offer.
func (d *device) features() uint64 {
	if d.pairs > 1 {
		return baseFeatures | featureMQ
	}
	return baseFeatures
}

// setMemory replaces the memory table and finds the rings in it anew.
func (d *device) setMemory(regions []region, fds []int) error {
	return d.remap(func() error { return d.mem.set(regions, fds) })
}

func (d *device) addMemory(r region, fd int) error {
	return d.remap(func() error { return d.mem.add(r, fd) })
}

func (d *device) removeMemory(r region) error {
	return d.remap(func() error { return d.mem.remove(r) })
}

// remap changes the memory table. A running ring whose memory is not there then
// stays as it is until it comes back: front-ends replace a region by taking it
// away first.
func (d *device) remap(change func() error) error {
	err := d.remapLocked(change)
	d.lookAgain()
	return err
}

func (d *device) remapLocked(change func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock() // a fault may come in between
	for _, r := range d.rings {
		if r.queue != nil {
			r.base = r.queue.Next()
			r.queue = nil
		}
	}
	err := change()
	for _, r := range d.rings {
		if r.started {
			_ = r.open(&d.mem, r.base)
		}
	}
	return err
}

// setNum, setBase and setAddr describe a ring that is not running. Saying the
// same of one that runs changes nothing.

func (d *device) setNum(i int, num uint16) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rings[i]
	if r.started && r.num != num {
		return fmt.Errorf("%w: its size is %d", errRunning, r.num)
	}
	r.num = num
	return nil
}

func (d *device) setBase(i int, base uint16) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rings[i]
	if r.started {
		return errRunning
	}
	r.base = base
	return nil
}

func (d *device) setAddr(i int, addr vringAddr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rings[i]
	if r.started && *r.addr != addr {
		return fmt.Errorf("%w: it cannot be moved", errRunning)
	}
	r.addr = &addr
	return nil
}

// setCall takes over fd, unless it is -1, as the way to interrupt the driver, and
// interrupts it once: what we returned before may have been told to nobody.
func (d *device) setCall(i, fd int) (err error) {
	var call *eventfd.Call
	if fd >= 0 {
		if call, err = eventfd.NewCall(fd); err != nil {
			return err
		}
		call.Signal()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rings[i]
	if r.call != nil {
		err = r.call.Close()
	}
	r.call = call
	return err
}

// start starts ring i with what has been said of it, under features. It takes
// over fd, the kick; -1 is none: then the ring is polled. A ring that runs is
// given another kick, and no more.
func (d *device) start(i, fd int, features uint64) error {
	var kick *eventfd.Kick
	if fd >= 0 {
		var err error
		if kick, err = eventfd.NewKick(fd); err != nil {
			return err
		}
	}
	d.stop(i)
	err := d.startRing(d.rings[i], kick, features)
	if err != nil && kick != nil {
		err = errors.Join(err, kick.Close())
	}
	d.lookAgain()
	return err
}

func (d *device) startRing(r *vring, kick *eventfd.Kick, features uint64) (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer caught(&err) // here: the kick has no other owner yet
	if r.num == 0 || r.addr == nil {
		return fmt.Errorf("start ring %d: its size or its place has not been said", r.index)
	}
	v, err := r.place(&d.mem)
	if err != nil {
		return fmt.Errorf("start ring %d: %w", r.index, err)
	}
	r.features, r.form = features, headerForm(features)
	// A network device returns chains in the order it takes them, so what the
	// used index does not count is still to be done and what it counts is done,
	// whatever the front-end remembers of a back-end before us. What it says is
	// often right (QEMU), now and then the available index (which would lose all
	// buffers under way), and always 0 for some.
	r.base = v.UsedIndex()
	if err := r.open(&d.mem, r.base); err != nil {
		return err
	}
	r.started, r.polled, r.stopped = true, kick == nil, make(chan struct{})
	if kick != nil {
		r.kick.Store(kick)
	}
	if r.call != nil {
		r.call.Signal() // as in setCall
	}
	if r.receives() {
		r.watcher.Go(func() { d.watchRoom(r, r.stopped, r.polled) })
	}
	if a := d.att; a != nil && !a.describes(features) {
		a.end(fmt.Errorf("%w: its driver was started with other offloads", datapath.ErrPeerGone))
	}
	return nil
}

// stop stops ring i, if it runs, and returns the index of the first chain that
// it has not taken. The size and place of the ring are remembered.
func (d *device) stop(i int) (next uint16) {
	d.mu.Lock()
	r := d.rings[i]
	if r.queue != nil {
		r.base = r.queue.Next()
	}
	next = r.base
	if !r.started {
		d.mu.Unlock()
		return next
	}
	r.started, r.queue, r.short = false, nil, false
	r.broken.Store(false)
	kick := r.kick.Swap(nil)
	close(r.stopped)
	d.mu.Unlock()
	if kick != nil {
		_ = kick.Close()
	}
	r.interrupt()
	r.watcher.Wait()
	return next
}

// enable says whether the driver wants ring i used. One that is not still has
// its TX taken, and thrown away.
func (d *device) enable(i int, on bool) {
	d.mu.Lock()
	d.rings[i].enabled = on
	d.mu.Unlock()
	d.lookAgain()
}

// reset stops all rings and forgets what was said of them, but for who is to be
// called.
func (d *device) reset() {
	for i, r := range d.rings {
		d.stop(i)
		d.mu.Lock()
		r.num, r.base, r.addr = 0, 0, nil
		d.mu.Unlock()
	}
}

// close frees everything: the front-end has gone, for the reason why.
func (d *device) close(why error) {
	d.mu.Lock()
	// At once: who sees the attachment's end may ask for the next one while the
	// rings still run, and nothing would end that.
	d.closed = true
	if d.att != nil {
		d.att.end(why)
	}
	d.mu.Unlock()
	for i := range d.rings {
		d.stop(i)
	}
	d.mu.Lock()
	d.mem.clear()
	for _, r := range d.rings {
		if r.call != nil {
			_ = r.call.Close()
			r.call = nil
		}
	}
	d.mu.Unlock()
}

// attach gives the rings to a new attachment once both rings of a pair run and
// are enabled, and nobody has them: nil otherwise. released is called once, when
// the attachment has been closed.
func (d *device) attach(released func()) *attachment {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.att != nil || d.closed {
		return nil
	}
	for i := 0; i < len(d.rings); i += 2 {
		rx, tx := d.rings[i], d.rings[i+1]
		if rx.usable() && rx.enabled && tx.usable() && tx.enabled {
			d.att = newAttachment(d, rx.features, released)
			return d.att
		}
	}
	return nil
}

// detach takes the rings from the attachment, which reads and writes no more.
func (d *device) detach() {
	d.mu.Lock()
	d.att = nil
	d.mu.Unlock()
}

// lookAgain makes everybody who waits for something look whether it is there.
func (d *device) lookAgain() {
	for _, r := range d.rings {
		r.interrupt()
	}
	d.mu.RLock()
	if d.att != nil {
		d.att.fireRoom()
	}
	d.mu.RUnlock()
	d.changed()
}

// watchRoom waits, for as long as an RX ring runs, until its driver has given
// buffers that a writer was short of.
func (d *device) watchRoom(r *vring, stopped <-chan struct{}, polled bool) {
	ready := func() bool { return d.roomAgain(r, false) }
	for {
		r.wait(stopped, polled, ready)
		select {
		case <-stopped:
			return
		default:
			d.roomAgain(r, true)
		}
	}
}

// roomAgain looks whether there is something new in an RX ring that a writer was
// short of and, where it is known that there may be, tells the writers.
func (d *device) roomAgain(r *vring, known bool) (more bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	r.out.Lock()
	defer r.out.Unlock()
	if !r.short || !r.usable() {
		return false
	}
	err := guard(func() {
		if more = known || r.queue.EnableKicks(); more {
			r.queue.DisableKicks()
		}
	})
	if err != nil {
		d.fault(err)
		return false
	}
	if more {
		by := byPoll
		if known && !r.polled {
			by = byKick
		}
		r.found(by)
		r.short = false
		if d.att != nil {
			d.att.fireRoom()
		}
	}
	return more
}

// fault ends everything for an error in touching guest memory. It is called with
// mu held for reading.
func (d *device) fault(err error) {
	if d.att != nil {
		d.att.end(fmt.Errorf("%w: %w", datapath.ErrPeerGone, err))
	}
	d.fail(err)
}

// errFault says that memory which the front-end shares is not there: it has cut
// its file short.
var errFault = errors.New("fault in guest memory")

// guard calls touch, which touches guest memory, and returns a fault as an error.
func guard(touch func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer caught(&err)
	touch()
	return nil
}

// caught is deferred after SetPanicOnFault. A fault at an address that is not
// nil, and only that, has an address (package debug): no memory but the guest's
// can be one.
func caught(err *error) {
	switch r := recover().(type) {
	case nil:
	case interface {
		error
		Addr() uintptr
	}:
		*err = fmt.Errorf("%w: %w", errFault, r)
	default:
		panic(r)
	}
}
