package virtqueue

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

// A guest is memory in regions and a ring in it, written byte by byte: what
// tests here say about layout does not lean on the code they test. Package
// datapathtest has a driver that works.
type guest struct {
	regions []region
	ring    Vring
	avail   uint16 // index
}

type region struct {
	gpa   uint64
	bytes []byte
}

// The regions: low and high touch at border; far lies elsewhere.
const (
	low        = 0x10000
	border     = 0x20000
	far        = 1 << 40
	regionSize = 0x10000
)

func newGuest(num uint16, base uint16) *guest {
	g := &guest{
		regions: []region{
			{low, make([]byte, regionSize)},
			{border, make([]byte, regionSize)},
			{far, make([]byte, 4*regionSize)},
		},
		ring: Vring{
			Num:   num,
			Desc:  make([]byte, 1<<20)[:DescSize(num)], // large: aligned to a page
			Avail: make([]byte, 1<<20)[:AvailSize(num)],
			Used:  make([]byte, 1<<20)[:UsedSize(num)],
		},
		avail: base,
	}
	g.setAvailIdx(base)
	binary.LittleEndian.PutUint16(g.ring.Used[2:], base)
	return g
}

func (g *guest) Slice(gpa uint64, n uint32) ([]byte, error) {
	for _, r := range g.regions {
		if gpa >= r.gpa && gpa < r.gpa+uint64(len(r.bytes)) {
			b := r.bytes[gpa-r.gpa:]
			return b[:min(len(b), int(n))], nil
		}
	}
	return nil, ErrFault
}

func (g *guest) setDesc(table []byte, i int, addr uint64, n uint32, flags, next uint16) {
	b := table[16*i:]
	binary.LittleEndian.PutUint64(b[0:], addr)
	binary.LittleEndian.PutUint32(b[8:], n)
	binary.LittleEndian.PutUint16(b[12:], flags)
	binary.LittleEndian.PutUint16(b[14:], next)
}

// at returns region memory from gpa on.
func (g *guest) at(gpa uint64) []byte {
	b, err := g.Slice(gpa, regionSize)
	if err != nil {
		panic(err)
	}
	return b
}

func (g *guest) setAvailIdx(idx uint16) { binary.LittleEndian.PutUint16(g.ring.Avail[2:], idx) }

// offer makes heads available.
func (g *guest) offer(heads ...uint16) {
	for _, h := range heads {
		binary.LittleEndian.PutUint16(g.ring.Avail[4+2*int(g.avail%g.ring.Num):], h)
		g.avail++
	}
	g.setAvailIdx(g.avail)
}

func (g *guest) setUsedEvent(idx uint16) {
	binary.LittleEndian.PutUint16(g.ring.Avail[4+2*int(g.ring.Num):], idx)
}

func (g *guest) availEvent() uint16 {
	return binary.LittleEndian.Uint16(g.ring.Used[4+8*int(g.ring.Num):])
}

func (g *guest) usedFlags() uint16 { return binary.LittleEndian.Uint16(g.ring.Used) }
func (g *guest) usedIdx() uint16   { return binary.LittleEndian.Uint16(g.ring.Used[2:]) }

func (g *guest) mustQueue(tb testing.TB, f Features, next uint16) *Queue {
	tb.Helper()
	q, err := New(g, g.ring, f, next)
	require.NoError(tb, err)
	return q
}

// simple makes every descriptor a chain of its own, 64 bytes readable.
func (g *guest) simple() {
	for i := range int(g.ring.Num) {
		g.setDesc(g.ring.Desc, i, low+uint64(64*(i%512)), 64, 0, 0)
	}
}
