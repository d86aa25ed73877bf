package virtqueue

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestLayout pins the bytes of a queue of two (virtio 1.3, 2.7.5 to 2.7.8), as a
// driver writes them and as it finds them.
func TestLayout(t *testing.T) {
	g := newGuest(2, 0)
	copy(g.ring.Desc, []byte{
		0x34, 0x12, 1, 0, 0, 0, 0, 0, // addr 0x11234
		5, 0, 0, 0, // len
		1, 0, // flags: NEXT
		1, 0, // next

		0, 0, 2, 0, 0, 0, 0, 0, // addr 0x20000
		7, 0, 0, 0,
		2, 0, // flags: WRITE
		0xff, 0xff, // next, which NEXT does not cover
	})
	copy(g.at(0x11234), "hello")
	copy(g.ring.Avail, []byte{
		0, 0, // flags
		1, 0, // idx
		0, 0, 1, 0, // ring
		0, 0, // used_event
	})
	q := g.mustQueue(t, Features{EventIdx: true}, 0)

	var c Chain
	ok, err := q.Pop(&c)
	require.NoError(t, err)
	require.True(t, ok)
	assert.Equal(t, uint16(0), c.Head)
	assert.Equal(t, [][]byte{[]byte("hello")}, c.Readable)
	assert.Equal(t, [][]byte{make([]byte, 7)}, c.Writable)
	assert.Equal(t, 5, c.ReadableLen)
	assert.Equal(t, 7, c.WritableLen)

	assert.Equal(t, 3, c.CopyIn([][]byte{[]byte("abc")}, 0, 1))
	assert.Equal(t, []byte("\x00abc\x00"), g.at(border)[:5])

	q.Push(0, 0x01020304)
	assert.Equal(t, make([]byte, 4), g.ring.Used[:4], "not seen before Flush")
	assert.True(t, q.Flush())
	q.Push(1, 9)
	q.Flush()
	assert.False(t, q.EnableKicks())
	assert.Equal(t, []byte{
		0, 0, // flags
		2, 0, // idx
		0, 0, 0, 0, 4, 3, 2, 1, // id, len
		1, 0, 0, 0, 9, 0, 0, 0,
		1, 0, // avail_event
	}, g.ring.Used)
	assert.Equal(t, uint16(2), g.ring.UsedIndex())

	assert.Equal(t, []int{32, 10, 22}, []int{DescSize(2), AvailSize(2), UsedSize(2)})
	assert.Equal(t, []int{1 << 19, 65542, 262150}, []int{DescSize(MaxNum), AvailSize(MaxNum), UsedSize(MaxNum)})
}

// TestNeighbours: nothing beside the used ring is written, above all not the two
// bytes behind avail_event, and nothing of what is the driver's.
func TestNeighbours(t *testing.T) {
	for _, f := range []Features{{}, {EventIdx: true}} {
		g := newGuest(8, 65533)
		page := bytes.Repeat([]byte{0xa5}, 1<<16)
		off := 16
		g.ring.Used = page[off : off+UsedSize(8)]
		clear(g.ring.Used)
		g.ring.Used[2], g.ring.Used[3] = 0xfd, 0xff // 65533
		g.simple()
		desc, avail := bytes.Clone(g.ring.Desc), bytes.Clone(g.ring.Avail)
		q := g.mustQueue(t, f, 65533)
		var c Chain
		for i := range uint16(20) {
			g.offer(i % 8)
			copy(avail, g.ring.Avail)
			q.DisableKicks()
			ok, err := q.Pop(&c)
			require.NoError(t, err)
			require.True(t, ok)
			q.Push(c.Head, 0xffffffff)
			q.Flush()
			q.EnableKicks()
		}
		assert.Equal(t, bytes.Repeat([]byte{0xa5}, off), page[:off])
		assert.Equal(t, bytes.Repeat([]byte{0xa5}, len(page)-off-UsedSize(8)), page[off+UsedSize(8):])
		assert.Equal(t, desc, g.ring.Desc)
		assert.Equal(t, avail, g.ring.Avail)
	}
}

// TestPlace: a ring that cannot be worked with is refused, and says why.
func TestPlace(t *testing.T) {
	shift := func(b []byte, by int) []byte { return append(make([]byte, by, 1<<16), b...)[by:] }
	for _, test := range []struct {
		name   string
		change func(r *Vring)
		want   string
	}{
		{"good", func(*Vring) {}, ""},
		{"available ring aligned to 2", func(r *Vring) { r.Avail = shift(r.Avail, 2) }, ""},
		{"no descriptors", func(r *Vring) { r.Num = 0 }, "queue size 0 is no power of two"},
		{"no power of two", func(r *Vring) { r.Num = 24 }, "queue size 24 is no power of two"},
		{"too many", func(r *Vring) { r.Num = MaxNum + 1 }, "queue size 32769 is no power of two"},
		{"short table", func(r *Vring) { r.Desc = r.Desc[1:] }, "descriptor table of 16 entries has 255 bytes, not 256"},
		{"short available ring", func(r *Vring) { r.Avail = r.Avail[:36] }, "available ring of 16 entries has 36 bytes, not 38"},
		{"long used ring", func(r *Vring) { r.Used = append(r.Used, 0) }, "used ring of 16 entries has 135 bytes, not 134"},
		{"nothing", func(r *Vring) { r.Used = nil }, "used ring of 16 entries has 0 bytes, not 134"},
		{"unaligned table", func(r *Vring) { r.Desc = shift(r.Desc, 8) }, "descriptor table is not aligned to 16 bytes"},
		{"unaligned available ring", func(r *Vring) { r.Avail = shift(r.Avail, 1) }, "available ring is not aligned to 2 bytes"},
		{"unaligned used ring", func(r *Vring) { r.Used = shift(r.Used, 2) }, "used ring is not aligned to 4 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := newGuest(16, 0)
			test.change(&g.ring)
			q, err := New(g, g.ring, Features{}, 0)
			if test.want == "" {
				require.NoError(t, err)
				assert.Equal(t, 16, q.Num())
				return
			}
			assert.Nil(t, q)
			assert.ErrorContains(t, err, "place vring: "+test.want)
		})
	}
}

// TestAvailWord: the available index is found wherever the ring lies, and nothing
// is read behind it.
func TestAvailWord(t *testing.T) {
	for _, num := range []uint16{1, 2, 8} {
		for _, skew := range []int{0, 2} {
			g := newGuest(num, 0)
			page := make([]byte, 1<<16)
			g.ring.Avail = page[skew : skew+AvailSize(num) : skew+AvailSize(num)] // New may not reach further
			g.simple()
			q := g.mustQueue(t, Features{EventIdx: true}, 0)
			g.setAvailIdx(num)
			g.setUsedEvent(0xffff)
			g.ring.Avail[0] = 0xff // flags, to be kept out of it
			assert.Equal(t, int(num), q.Avail(), "num %d, skew %d", num, skew)
			g.setAvailIdx(0x8001)
			assert.Equal(t, int(num), q.Avail(), "bounded")
		}
	}
}
