package datapathtest

import (
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// What follows lets a driver break the rules. A device must survive all of it,
// count it, and go on where the ring can still be followed.

// SetDesc writes descriptor i of the queue's own table.
func (d *Driver) SetDesc(i uint16, gpa uint64, n uint32, flags, next uint16) {
	putDesc(d.desc, int(i), gpa, n, flags, next)
}

// SetAvail writes a head into an entry of the available ring, modulo its size.
func (d *Driver) SetAvail(entry, head uint16) {
	off := 4 + 2*int(entry%d.num)
	if off == 4 { // where the device may read it along with the index
		store16(d.avail, off, head)
		return
	}
	binary.LittleEndian.PutUint16(d.avail[off:], head)
}

// SetAvailIndex shows the device any available index, and kicks.
func (d *Driver) SetAvailIndex(idx uint16) {
	d.availIdx, d.published = idx, idx
	storeAvail(d.avail, d.flags, idx)
	if d.Kick != nil {
		d.Kick()
	}
}

// KickStorm kicks n times, with nothing to say.
func (d *Driver) KickStorm(n int) {
	for range n {
		d.Kick()
	}
}

// Scribble makes n random changes to the descriptor table and the available
// entries, which are not the driver's to touch while the device has them. The
// indexes stay as they are, and one change in a thousand is a head behind the
// table. The race detector does not see the writes. From then on the driver's own
// books are worth nothing: TakeUsed may report anything.
func (d *Driver) Scribble(rng *rand.Rand, n int) {
	for range n {
		switch rng.IntN(4) {
		case 0:
			head := uint16(rng.IntN(int(d.num)))
			if rng.IntN(250) == 0 {
				head += d.num
			}
			storeBytes(d.avail, 4+2*rng.IntN(int(d.num)), byte(head), byte(head>>8))
		case 1: // anything
			storeBytes(d.desc, rng.IntN(len(d.desc)), byte(rng.Uint32()))
		case 2: // flags, which decide most
			storeBytes(d.desc, 16*rng.IntN(int(d.num))+12, byte(rng.IntN(8)))
		case 3: // somewhere in memory, and not for long
			r := d.mem.regions[rng.IntN(len(d.mem.regions))]
			var b [16]byte
			putDesc(b[:], 0, r.GPA+rng.Uint64N(uint64(len(r.Bytes))), rng.Uint32N(4096), uint16(rng.IntN(8)), uint16(rng.IntN(int(d.num))))
			storeBytes(d.desc, 16*rng.IntN(int(d.num)), b[:]...)
		}
	}
}

// An Attack is one way for a driver to break the rules with one chain, or one
// index.
type Attack struct {
	// Name says what is wrong, and is fit for the name of a subtest.
	Name string
	// Want is what the device is to find: virtqueue.ErrCorrupt, after which the
	// ring must be stopped; a virtqueue.ChainError, after which the chain comes
	// back with nothing written and the queue works on; or nil, for a chain that
	// is sound but holds no frame, and comes back likewise.
	Want error
	// Run does it, kick included. It leaves the queue's books in order unless
	// Want is ErrCorrupt.
	Run func(d *Driver)
}

// Attacks returns what can be done to a queue with features f, whatever the
// queue is for, except that the chains with a nil Want are meant for a transmit
// queue. The queue has at least 8 descriptors, of which 4 are free, and the device
// has taken everything that was available before.
func Attacks(f virtqueue.Features) []Attack {
	attacks := []Attack{
		{"index-jump", virtqueue.ErrCorrupt, func(d *Driver) { d.SetAvailIndex(d.availIdx + d.num + 1) }},
		{"index-jump-far", virtqueue.ErrCorrupt, func(d *Driver) { d.SetAvailIndex(d.availIdx + 0x8000 + 1) }},
		{"index-back", virtqueue.ErrCorrupt, func(d *Driver) { d.SetAvailIndex(d.availIdx - 1) }},
		{"head-behind-table", virtqueue.ErrCorrupt, func(d *Driver) { d.offerHead(d.num) }},
		{"head-wild", virtqueue.ErrCorrupt, func(d *Driver) { d.offerHead(math.MaxUint16) }},

		{"loop-of-one", virtqueue.ErrLoop, func(d *Driver) {
			d.offer(1, func(ids []uint16) { d.SetDesc(ids[0], d.scratch(8), 8, DescNext, ids[0]) })
		}},
		{"loop-of-two-writable", virtqueue.ErrLoop, func(d *Driver) {
			d.offer(2, func(ids []uint16) {
				d.SetDesc(ids[0], d.scratch(8), 8, DescNext|DescWrite, ids[1])
				d.SetDesc(ids[1], d.scratch(8), 8, DescNext|DescWrite, ids[0])
			})
		}},
		{"loop-of-nothing", virtqueue.ErrLoop, func(d *Driver) {
			d.offer(1, func(ids []uint16) { d.SetDesc(ids[0], d.scratch(8), 0, DescNext, ids[0]) })
		}},
		{"next-behind-table", virtqueue.ErrNext, func(d *Driver) {
			d.offer(1, func(ids []uint16) { d.SetDesc(ids[0], d.scratch(8), 8, DescNext, d.num) })
		}},
		{"next-wild", virtqueue.ErrNext, func(d *Driver) {
			d.offer(1, func(ids []uint16) { d.SetDesc(ids[0], d.scratch(8), 8, DescNext, math.MaxUint16) })
		}},
		{"address-wild", virtqueue.ErrFault, func(d *Driver) { d.offerSpan(1<<60, 64, 0) }},
		{"address-wild-writable", virtqueue.ErrFault, func(d *Driver) { d.offerSpan(1<<60, 64, DescWrite) }},
		{"address-overflow", virtqueue.ErrFault, func(d *Driver) { d.offerSpan(math.MaxUint64-7, 64, 0) }},
		{"address-before-memory", virtqueue.ErrFault, func(d *Driver) { d.offerSpan(d.mem.first()-8, 64, 0) }},
		{"address-past-memory", virtqueue.ErrFault, func(d *Driver) { d.offerSpan(d.mem.last()-8, 64, 0) }},
		{"readable-behind-writable", virtqueue.ErrDirection, func(d *Driver) {
			d.offer(2, func(ids []uint16) {
				d.SetDesc(ids[0], d.scratch(64), 64, DescNext|DescWrite, ids[1])
				d.SetDesc(ids[1], d.scratch(64), 64, 0, 0)
			})
		}},
		{"too-long", virtqueue.ErrTooLong, func(d *Driver) { d.offerSpan(d.mem.first(), virtqueue.MaxReadable+1, 0) }},
		{"too-long-by-far", virtqueue.ErrTooLong, func(d *Driver) { d.offerSpan(d.mem.first(), math.MaxUint32, 0) }},
		{"too-long-writable", virtqueue.ErrTooLong, func(d *Driver) { d.offerSpan(d.mem.first(), math.MaxUint32, DescWrite) }},
		{"no-bytes", virtqueue.ErrEmpty, func(d *Driver) { d.offerSpan(d.scratch(8), 0, 0) }},
		{"no-bytes-writable", virtqueue.ErrEmpty, func(d *Driver) { d.offerSpan(d.scratch(8), 0, DescWrite) }},

		{"header-of-one-byte", nil, func(d *Driver) { d.offerSpan(d.scratch(1), 1, 0) }},
		{"header-short", nil, func(d *Driver) { d.offerSpan(d.scratch(9), 9, 0) }}, // either form is longer
		{"header-only", nil, func(d *Driver) { d.offerSpan(d.scratch(12), 12, 0) }},
		{"writable-only", nil, func(d *Driver) { d.offerSpan(d.scratch(64), 64, DescWrite) }},
	}
	if !f.Indirect {
		return append(attacks,
			Attack{"indirect-not-negotiated", virtqueue.ErrNotNegotiated, func(d *Driver) {
				d.offerTable(16, func(t []byte) { putDesc(t, 0, d.scratch(64), 64, 0, 0) })
			}})
	}
	return append(attacks,
		Attack{"indirect-inside-indirect", virtqueue.ErrNested, func(d *Driver) {
			inner := d.scratch(16)
			d.offerTable(16, func(t []byte) { putDesc(t, 0, inner, 16, DescIndirect, 0) })
		}},
		Attack{"indirect-of-itself", virtqueue.ErrNested, func(d *Driver) {
			self := d.scratch(16)
			putDesc(d.mem.Bytes(self, 16), 0, self, 16, DescIndirect, 0)
			d.offerSpan(self, 16, DescIndirect)
		}},
		Attack{"indirect-with-next", virtqueue.ErrIndirectNext, func(d *Driver) {
			d.offer(2, func(ids []uint16) {
				d.SetDesc(ids[0], d.scratch(16), 16, DescIndirect|DescNext, ids[1])
				d.SetDesc(ids[1], d.scratch(64), 64, 0, 0)
			})
		}},
		Attack{"indirect-table-empty", virtqueue.ErrTable, func(d *Driver) { d.offerSpan(d.scratch(16), 0, DescIndirect) }},
		Attack{"indirect-table-ragged", virtqueue.ErrTable, func(d *Driver) { d.offerSpan(d.scratch(32), 24, DescIndirect) }},
		Attack{"indirect-table-huge", virtqueue.ErrTable, func(d *Driver) { d.offerSpan(d.scratch(16), math.MaxUint32&^15, DescIndirect) }},
		Attack{"indirect-table-wild", virtqueue.ErrFault, func(d *Driver) { d.offerSpan(1<<60, 32, DescIndirect) }},
		Attack{"indirect-table-past-memory", virtqueue.ErrFault, func(d *Driver) { d.offerSpan(d.mem.last()-16, 32, DescIndirect) }},
		Attack{"indirect-loop", virtqueue.ErrLoop, func(d *Driver) {
			d.offerTable(32, func(t []byte) {
				putDesc(t, 0, d.scratch(8), 8, DescNext, 1)
				putDesc(t, 1, d.scratch(8), 8, DescNext, 0)
			})
		}},
		Attack{"indirect-next-behind-table", virtqueue.ErrNext, func(d *Driver) {
			d.offerTable(32, func(t []byte) { putDesc(t, 0, d.scratch(8), 8, DescNext, 2) })
		}},
		Attack{"too-many-pieces", virtqueue.ErrSegments, func(d *Driver) {
			d.offer(2, func(ids []uint16) {
				n, gpa := virtqueue.MaxSegments, d.scratch(1)
				table := d.mem.Alloc(16*n, 16)
				for i := range n {
					flags := uint16(DescNext)
					if i == n-1 {
						flags = 0
					}
					putDesc(d.mem.Bytes(table, 16*n), i, gpa, 1, flags, uint16(i+1))
				}
				d.SetDesc(ids[0], gpa, 1, DescNext, ids[1])
				d.SetDesc(ids[1], table, uint32(16*n), DescIndirect, 0)
			})
		}},
	)
}

// first and last are the lowest address of memory and the one behind the highest.
func (m *GuestMemory) first() uint64 {
	first := uint64(math.MaxUint64)
	for _, r := range m.regions {
		first = min(first, r.GPA)
	}
	return first
}

func (m *GuestMemory) last() uint64 {
	last := uint64(0)
	for _, r := range m.regions {
		last = max(last, r.GPA+uint64(len(r.Bytes)))
	}
	return last
}

// scratch is memory for an attack; it is not given back.
func (d *Driver) scratch(n int) uint64 { return d.mem.Alloc(n, 16) }

// offer makes a chain available that fill writes into n free descriptors, the
// first of which is its head.
func (d *Driver) offer(n int, fill func(ids []uint16)) {
	ids := append([]uint16(nil), d.free[len(d.free)-n:]...)
	d.free = d.free[:len(d.free)-n]
	fill(ids)
	d.pending[ids[0]] = chain{descs: ids}
	d.SetAvail(d.availIdx, ids[0])
	d.availIdx++
	d.Publish()
}

// offerSpan makes a chain of one descriptor available.
func (d *Driver) offerSpan(gpa uint64, n uint32, flags uint16) {
	d.offer(1, func(ids []uint16) { d.SetDesc(ids[0], gpa, n, flags, 0) })
}

// offerTable makes a chain available whose indirect table of n bytes fill writes.
func (d *Driver) offerTable(n int, fill func(table []byte)) {
	table := d.scratch(n)
	fill(d.mem.Bytes(table, n))
	d.offerSpan(table, uint32(n), DescIndirect)
}

// offerHead makes any head available. It is no chain of the driver's.
func (d *Driver) offerHead(head uint16) {
	d.SetAvail(d.availIdx, head)
	d.availIdx++
	d.Publish()
}
