package virtqueue

import (
	"encoding/binary"
	"errors"
	"testing"
)

// FuzzRing: whatever a ring and the memory behind it hold, a walk ends, stays
// inside the guest's memory and inside the bounds of a chain, and what it says of
// the chain is so.
//
// The input is: two bytes of queue size and features, the available index and
// entries, then descriptors, then what lies in memory at low, where most
// addresses are made to point.
func FuzzRing(f *testing.F) {
	seed := func(avail []uint16, tables ...[]desc) {
		b := []byte{2, 3}
		for _, v := range avail { // index, eight entries
			b = binary.LittleEndian.AppendUint16(b, v)
		}
		b = append(b, make([]byte, 20-len(b))...)
		for _, table := range tables {
			for _, d := range table {
				b = binary.LittleEndian.AppendUint64(b, d.addr)
				b = binary.LittleEndian.AppendUint32(b, d.len)
				b = binary.LittleEndian.AppendUint16(b, d.flags)
				b = binary.LittleEndian.AppendUint16(b, d.next)
			}
		}
		f.Add(b)
	}
	four := func(ds ...desc) []desc { return append(ds, make([]desc, 4-len(ds))...) } // the queue's own table
	seed([]uint16{1, 0}, four(desc{0, 60, 0, 0}))
	seed([]uint16{2, 0, 2}, four(desc{0, 12, descFNext, 1}, desc{64, 90, descFWrite, 0}, desc{0xffff, 60, 0, 0}))
	seed([]uint16{1, 0}, four(desc{0, 32, descFIndirect, 0}), []desc{{256, 12, descFNext, 1}, {512, 90, descFWrite, 0}})
	seed([]uint16{1, 0}, four(desc{0, 32, descFIndirect, 0}), []desc{{0, 12, descFNext, 1}, {0, 32, descFIndirect, 0}})
	seed([]uint16{1, 3}, four(desc{0, 12, descFNext, 0}, desc{}, desc{}, desc{9, 9, descFNext, 3}))
	seed([]uint16{4, 0, 1, 2, 3}, four(desc{1 << 63, 12, 0, 0}, desc{0, 0, 0, 0}, desc{0, 1 << 31, descFWrite, 0}, desc{0, 1 << 20, 0, 0}))
	seed([]uint16{9, 0})
	seed([]uint16{1, 0xffff})

	g := newGuest(8, 0)
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 20 {
			return
		}
		num := uint16(1) << (in[0] % 4)
		features := Features{Indirect: in[1]&1 != 0, EventIdx: in[1]&2 != 0}
		g.ring.Num = num
		g.ring.Desc = g.ring.Desc[:DescSize(num)]
		g.ring.Avail = g.ring.Avail[:AvailSize(num)]
		g.ring.Used = g.ring.Used[:UsedSize(num)]
		clear(g.ring.Desc)
		clear(g.ring.Avail)
		clear(g.ring.Used)
		copy(g.ring.Avail[2:], in[2:20])
		n := copy(g.ring.Desc, in[20:])
		clear(g.regions[0].bytes[:4096])
		copy(g.regions[0].bytes[:4096], in[20+n:])
		for i := range int(num) { // a random address would hit nothing: small ones count from low
			if a := g.ring.Desc[16*i : 16*i+8]; binary.LittleEndian.Uint64(a) < regionSize {
				binary.LittleEndian.PutUint64(a, low+binary.LittleEndian.Uint64(a))
			}
		}
		for i := range 64 {
			if a := g.regions[0].bytes[16*i : 16*i+8]; binary.LittleEndian.Uint64(a) < regionSize {
				binary.LittleEndian.PutUint64(a, low+binary.LittleEndian.Uint64(a))
			}
		}

		q := g.mustQueue(t, features, 0)
		var c Chain
		for taken := 0; ; taken++ {
			avail := q.Avail()
			if avail > int(num) {
				t.Fatalf("%d available in a ring of %d", avail, num)
			}
			ok, err := q.Pop(&c)
			if !ok {
				if err != nil && !errors.Is(err, ErrCorrupt) {
					t.Fatal(err)
				}
				if err == nil && avail > 0 {
					t.Fatalf("%d available, none popped", avail)
				}
				if taken > int(num) {
					t.Fatalf("%d chains of a ring of %d", taken, num)
				}
				break
			}
			check(t, g, &c, err)
			q.Push(c.Head, uint32(c.WritableLen))
		}
		q.Flush()
		q.EnableKicks()
	})
}

// check verifies what Pop said of c.
func check(t *testing.T, g *guest, c *Chain, err error) {
	if c.Head >= g.ring.Num {
		t.Fatalf("head %d", c.Head)
	}
	pieces, bytes := len(c.Readable)+len(c.Writable), c.ReadableLen+c.WritableLen
	var why ChainError
	if err != nil {
		if !errors.As(err, &why) || why == 0 || int(why) >= NumChainErrors {
			t.Fatalf("error %v", err)
		}
		if pieces != 0 || bytes != 0 {
			t.Fatalf("%v, and %d pieces of %d bytes", err, pieces, bytes)
		}
		return
	}
	if pieces == 0 || pieces > MaxSegments || c.ReadableLen > MaxReadable || c.WritableLen > MaxWritable {
		t.Fatalf("%d pieces, %d bytes to read, %d to write", pieces, c.ReadableLen, c.WritableLen)
	}
	for _, side := range []struct {
		segs [][]byte
		want int
	}{{c.Readable, c.ReadableLen}, {c.Writable, c.WritableLen}} {
		got := 0
		for _, seg := range side.segs {
			if len(seg) == 0 || !g.holds(seg) {
				t.Fatalf("piece of %d bytes", len(seg))
			}
			got += len(seg)
		}
		if got != side.want {
			t.Fatalf("%d bytes in pieces, %d said", got, side.want)
		}
	}
}

// holds reports whether b is guest memory.
func (g *guest) holds(b []byte) bool {
	for _, r := range g.regions {
		if within(b, r.bytes) {
			return true
		}
	}
	return false
}
