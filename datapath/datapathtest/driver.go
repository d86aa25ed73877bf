package datapathtest

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// Flags of a descriptor and of the rings (virtio 1.3, 2.7.5, 2.7.6, 2.7.8).
const (
	DescNext     = 1
	DescWrite    = 2
	DescIndirect = 4

	availNoInterrupt = 1
	usedNoNotify     = 1
)

// A Span is a piece of guest memory that a driver lends to the device.
type Span struct {
	GPA uint64
	Len uint32
}

// A Layout says how a driver writes a chain into descriptors.
type Layout uint8

// The layouts, which mean the same to a device.
const (
	Direct   Layout = iota // all in the queue's own table
	Indirect               // all in an indirect table, if there is more than one
	Mixed                  // the first in the queue's table, the others in an indirect one
)

// ErrFull says that a driver has no descriptors left, or no buffers.
var ErrFull = errors.New("no free descriptors")

// A Driver is the guest's side of one virtqueue. Unless it is told otherwise (see
// SetDesc and what follows it) it keeps to the specification, and notices when
// the device does not. It is not safe for concurrent use.
type Driver struct {
	// Kick is called when the device wants to know of what was published. nil: a
	// driver that never kicks.
	Kick func()
	// Layout is how Add writes chains. Other than Direct it needs the feature.
	Layout Layout

	mem      *GuestMemory
	num      uint16
	features virtqueue.Features

	descGPA, availGPA, usedGPA uint64
	desc, avail, used          []byte

	free      []uint16         // unused descriptors
	pending   map[uint16]chain // by head, what the device has
	tables    []uint64         // addresses of unused indirect tables
	availIdx  uint16           // entry to write next
	published uint16           // index the device can see
	usedIdx   uint16           // entry to read next
	flags     uint16           // available flags
}

// A chain is what the driver remembers of one it made available.
type chain struct {
	descs    []uint16
	table    uint64 // 0: none
	writable uint32 // bytes
}

// indirectEntries is how many descriptors a driver's indirect table holds.
const indirectEntries = 64

// NewDriver places a queue of num descriptors in mem, as a driver does that has
// just bound to its device: everything is zero. From then on both indexes count
// from base, as they do on a queue that has been in use; 0 is a new one.
func NewDriver(mem *GuestMemory, num uint16, f virtqueue.Features, base uint16) *Driver {
	return newDriver(mem, num, f, base, 0)
}

func newDriver(mem *GuestMemory, num uint16, f virtqueue.Features, base uint16, skew int) *Driver {
	d := &Driver{
		mem: mem, num: num, features: f,
		pending:  make(map[uint16]chain),
		availIdx: base, published: base, usedIdx: base,
	}
	d.place(skew)
	for i := range num {
		d.free = append(d.free, num-1-i)
	}
	return d
}

// place takes memory for the three parts and writes their first state. The
// available ring is aligned to a multiple of 4 bytes, plus skew, which is 0 or 2:
// the specification asks for 2.
func (d *Driver) place(skew int) {
	mem, num := d.mem, d.num
	d.descGPA = mem.Alloc(virtqueue.DescSize(num), 16)
	d.availGPA = mem.Alloc(virtqueue.AvailSize(num)+skew, 4) + uint64(skew)
	d.usedGPA = mem.Alloc(virtqueue.UsedSize(num), 4)
	d.desc = mem.Bytes(d.descGPA, virtqueue.DescSize(num))
	d.avail = mem.Bytes(d.availGPA, virtqueue.AvailSize(num))
	d.used = mem.Bytes(d.usedGPA, virtqueue.UsedSize(num))
	clear(d.desc)
	clear(d.avail)
	clear(d.used)
	storeAvail(d.avail, d.flags, d.published)
	binary.LittleEndian.PutUint16(d.used[2:], d.usedIdx)
	d.storeUsedEvent(d.usedIdx)
}

// Num returns the queue size in descriptors.
func (d *Driver) Num() uint16 { return d.num }

// Memory returns the memory the queue lies in.
func (d *Driver) Memory() *GuestMemory { return d.mem }

// Addrs returns the guest-physical addresses of the three parts of the queue.
func (d *Driver) Addrs() (desc, avail, used uint64) { return d.descGPA, d.availGPA, d.usedGPA }

// Vring returns the three parts of the queue as a device in this process sees
// them.
func (d *Driver) Vring() virtqueue.Vring {
	return virtqueue.Vring{Num: d.num, Desc: d.desc, Avail: d.avail, Used: d.used}
}

// Move places the queue anew, elsewhere, with all that is pending, and fills the
// old place with ones. A device that has not been told goes on in the old place.
func (d *Driver) Move() {
	desc, avail, used := d.desc, d.avail, d.used
	d.place(0)
	copy(d.desc, desc)
	copy(d.avail[4:], avail[4:])
	copy(d.used[2:], used[2:])
	for _, old := range [][]byte{desc, avail, used} {
		for i := range old {
			storeBytes(old, i, 0xff)
		}
	}
}

// Free returns how many descriptors are free.
func (d *Driver) Free() int { return len(d.free) }

// Pending returns how many chains the device has not returned.
func (d *Driver) Pending() int { return len(d.pending) }

// Add writes a chain that the device reads and then writes, and its head into
// the available ring. The device does not see it before Publish. The error is
// ErrFull, or says that the chain is too long for an indirect table.
func (d *Driver) Add(readable, writable []Span) (head uint16, err error) {
	type entry struct {
		Span
		flags uint16
	}
	var all []entry
	c := chain{}
	for _, s := range readable {
		all = append(all, entry{s, 0})
	}
	for _, s := range writable {
		all = append(all, entry{s, DescWrite})
		c.writable += s.Len
	}
	direct := len(all)
	switch {
	case d.Layout == Indirect && len(all) > 1:
		direct = 0
	case d.Layout == Mixed && len(all) > 2:
		direct = 1
	}
	need := direct
	if direct < len(all) {
		need++
		if len(all)-direct > indirectEntries {
			return 0, fmt.Errorf("chain of %d descriptors: an indirect table holds %d", len(all), indirectEntries)
		}
	}
	if need == 0 || need > len(d.free) {
		return 0, ErrFull
	}
	c.descs = append(c.descs, d.free[len(d.free)-need:]...)
	d.free = d.free[:len(d.free)-need]
	for i, e := range all[:direct] {
		flags, next := e.flags, uint16(0)
		if i+1 < need {
			flags, next = flags|DescNext, c.descs[i+1]
		}
		d.SetDesc(c.descs[i], e.GPA, e.Len, flags, next)
	}
	if rest := all[direct:]; len(rest) > 0 {
		c.table = d.takeTable()
		t := d.mem.Bytes(c.table, 16*indirectEntries)
		for i, e := range rest {
			flags, next := e.flags, uint16(0)
			if i+1 < len(rest) {
				flags, next = flags|DescNext, uint16(i+1)
			}
			putDesc(t, i, e.GPA, e.Len, flags, next)
		}
		d.SetDesc(c.descs[need-1], c.table, uint32(16*len(rest)), DescIndirect, 0)
	}
	head = c.descs[0]
	d.pending[head] = c
	d.SetAvail(d.availIdx, head)
	d.availIdx++
	return head, nil
}

func (d *Driver) takeTable() uint64 {
	if n := len(d.tables); n > 0 {
		gpa := d.tables[n-1]
		d.tables = d.tables[:n-1]
		return gpa
	}
	return d.mem.Alloc(16*indirectEntries, 16)
}

// Publish shows the device all chains added, with one store of the index, and
// kicks if the device wants that. It reports whether it did.
func (d *Driver) Publish() (kicked bool) {
	before := d.published
	d.published = d.availIdx
	storeAvail(d.avail, d.flags, d.published)
	if before == d.published || !d.wantsKick(before) || d.Kick == nil {
		return false
	}
	d.Kick()
	return true
}

// wantsKick is the rule of virtio 1.3, 2.7.10.1.
func (d *Driver) wantsKick(before uint16) bool {
	if d.features.EventIdx {
		event := load16(d.used, virtqueue.UsedSize(d.num)-2)
		return d.published-event-1 < d.published-before
	}
	flags, _ := loadUsed(d.used)
	return flags&usedNoNotify == 0
}

// TakeUsed takes the next chain that the device returned, with the number of
// bytes it says it wrote. ok says that there was one; the error, that it was
// none of ours or more than it could have written.
func (d *Driver) TakeUsed() (head uint16, written uint32, ok bool, err error) {
	_, idx := loadUsed(d.used)
	if idx == d.usedIdx {
		return 0, 0, false, nil
	}
	if n := idx - d.usedIdx; int(n) > len(d.pending) {
		return 0, 0, false, fmt.Errorf("used index %d is %d ahead of %d with %d chains pending", idx, n, d.usedIdx, len(d.pending))
	}
	e := d.used[4+8*int(d.usedIdx%d.num):]
	id, written := binary.LittleEndian.Uint32(e), binary.LittleEndian.Uint32(e[4:])
	c, ours := d.pending[uint16(id)]
	if !ours || id >= uint32(d.num) {
		return 0, 0, false, fmt.Errorf("used entry %d: id %d is not a head", d.usedIdx, id)
	}
	if written > c.writable {
		return 0, 0, false, fmt.Errorf("used entry %d: %d bytes written to a chain of %d", d.usedIdx, written, c.writable)
	}
	d.usedIdx++
	d.release(uint16(id))
	return uint16(id), written, true, nil
}

// release makes a chain's descriptors free.
func (d *Driver) release(head uint16) {
	c := d.pending[head]
	delete(d.pending, head)
	d.free = append(d.free, c.descs...)
	if c.table != 0 {
		d.tables = append(d.tables, c.table)
	}
}

// EnableCalls asks the device to call when it returns another chain, and looks
// once more: more says that there is one already.
func (d *Driver) EnableCalls() (more bool) {
	if d.features.EventIdx {
		d.storeUsedEvent(d.usedIdx)
	} else {
		d.flags = 0
		storeAvail(d.avail, d.flags, d.published)
	}
	_, idx := loadUsed(d.used)
	return idx != d.usedIdx
}

// DisableCalls tells the device not to call.
func (d *Driver) DisableCalls() {
	if d.features.EventIdx {
		d.storeUsedEvent(d.usedIdx - 1) // 65535 chains away
		return
	}
	d.flags = availNoInterrupt
	storeAvail(d.avail, d.flags, d.published)
}

func (d *Driver) storeUsedEvent(idx uint16) {
	storeUsedEvent(d.avail, virtqueue.AvailSize(d.num)-2, idx)
}

func putDesc(table []byte, i int, gpa uint64, n uint32, flags, next uint16) {
	b := table[16*i : 16*i+16]
	binary.LittleEndian.PutUint64(b, gpa)
	binary.LittleEndian.PutUint32(b[8:], n)
	binary.LittleEndian.PutUint16(b[12:], flags)
	binary.LittleEndian.PutUint16(b[14:], next)
}
