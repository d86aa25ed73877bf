package virtqueue

import (
	"bytes"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestWalk: every way in which a chain can be laid out, and every way in which it
// can be wrong. Tables are written by hand; chains begin at descriptor 0.
func TestWalk(t *testing.T) {
	const (
		next, write, indirect = descFNext, descFWrite, descFIndirect
		table                 = far + 0x8000
	)
	type d = desc
	fill := func(n int, make func(i int) d) (ds []d) {
		for i := range n {
			ds = append(ds, make(i))
		}
		return ds
	}
	for _, test := range []struct {
		name               string
		direct, indirect   []d  // the latter at table
		no                 bool // INDIRECT is not negotiated
		want               error
		readable, writable []int // lengths of pieces
	}{
		{name: "one readable", direct: []d{{low, 60, 0, 0}}, readable: []int{60}},
		{name: "one writable", direct: []d{{low, 60, write, 0}}, writable: []int{60}},
		{
			name:     "both, in any order of the table",
			direct:   []d{{low, 12, next, 3}, {far, 8, write, 0}, {far, 4, write | next, 1}, {low, 90, next, 2}},
			readable: []int{12, 90}, writable: []int{4, 8},
		},
		{name: "flags nobody knows", direct: []d{{low, 60, 0xfff8, 0}}, readable: []int{60}},
		{name: "next without NEXT", direct: []d{{low, 60, 0, 0xffff}}, readable: []int{60}},
		{name: "whole table", direct: fill(8, func(i int) d {
			return d{low, 1, map[bool]uint16{true: next}[i < 7], uint16(i + 1)}
		}), readable: []int{1, 1, 1, 1, 1, 1, 1, 1}},
		{name: "nothing between", direct: []d{{low, 0, next, 1}, {low, 5, next, 2}, {0, 0, write | next, 3}, {low, 6, write, 0}}, readable: []int{5}, writable: []int{6}},
		{name: "across the border", direct: []d{{border - 10, 30, 0, 0}}, readable: []int{10, 20}},
		{name: "across the border, writable", direct: []d{{low, 1, next, 1}, {border - 1, regionSize + 1, write, 0}}, readable: []int{1}, writable: []int{1, regionSize}},
		{name: "up to the border", direct: []d{{border - 10, 10, 0, 0}}, readable: []int{10}},
		{name: "up to the end", direct: []d{{border + regionSize - 10, 10, 0, 0}}, readable: []int{10}},
		{name: "as long as it may be", direct: []d{{far, MaxReadable / 2, next, 1}, {far, MaxReadable / 2, next, 2}, {far, 4 * regionSize, write, 0}}, readable: []int{MaxReadable / 2, MaxReadable / 2}, writable: []int{4 * regionSize}},

		{name: "indirect", direct: []d{{table, 32, indirect, 0}}, indirect: []d{{low, 12, next, 1}, {low, 90, 0, 0}}, readable: []int{12, 90}},
		{name: "indirect, used in part", direct: []d{{table, 64, indirect, 0}}, indirect: []d{{low, 12, next, 3}, {1, 1, 0xffff, 1}, {1, 1, 0xffff, 1}, {low, 90, write, 0}}, readable: []int{12}, writable: []int{90}},
		{name: "indirect with WRITE, which says nothing", direct: []d{{table, 16, indirect | write, 0}}, indirect: []d{{low, 12, 0, 0}}, readable: []int{12}},
		{name: "direct, then indirect", direct: []d{{low, 12, next, 1}, {table, 32, indirect, 0}}, indirect: []d{{low, 90, next, 1}, {low, 8, write, 0}}, readable: []int{12, 90}, writable: []int{8}},
		{name: "indirect, longer than the queue", direct: []d{{table, 16 * 64, indirect, 0}}, indirect: fill(64, func(i int) d {
			return d{low, 1, map[bool]uint16{true: next}[i < 63], uint16(i + 1)}
		}), readable: bytesOf(64)},
		{name: "as many pieces as it may be", direct: []d{{table, 16 * MaxSegments, indirect, 0}}, indirect: fill(MaxSegments, func(i int) d {
			return d{low, 1, map[bool]uint16{true: next}[i < MaxSegments-1], uint16(i + 1)}
		}), readable: bytesOf(MaxSegments)},

		{name: "loop of one", direct: []d{{low, 1, next, 0}}, want: ErrLoop},
		{name: "loop of two", direct: []d{{low, 1, next, 1}, {low, 1, next, 0}}, want: ErrLoop},
		{name: "loop of nothing", direct: []d{{low, 0, next, 0}}, want: ErrLoop},
		{name: "loop, writable", direct: []d{{low, 1, next, 1}, {low, 1, next | write, 1}}, want: ErrLoop},
		{name: "indirect loop", direct: []d{{table, 32, indirect, 0}}, indirect: []d{{low, 1, next, 1}, {low, 1, next, 1}}, want: ErrLoop},
		{name: "next is behind the table", direct: []d{{low, 1, next, 8}}, want: ErrNext},
		{name: "next is wild", direct: []d{{low, 1, next, 0xffff}}, want: ErrNext},
		{name: "indirect next is behind its table", direct: []d{{table, 32, indirect, 0}}, indirect: []d{{low, 1, next, 2}}, want: ErrNext},
		{name: "indirect next is in the queue's table", direct: []d{{table, 16, indirect, 0}, {low, 1, 0, 0}}, indirect: []d{{low, 1, next, 1}}, want: ErrNext},
		{name: "indirect, not negotiated", no: true, direct: []d{{table, 16, indirect, 0}}, indirect: []d{{low, 1, 0, 0}}, want: ErrNotNegotiated},
		{name: "indirect in indirect", direct: []d{{table, 16, indirect, 0}}, indirect: []d{{table, 16, indirect, 0}}, want: ErrNested},
		{name: "indirect and next", direct: []d{{table, 16, indirect | next, 1}, {low, 1, 0, 0}}, indirect: []d{{low, 1, 0, 0}}, want: ErrIndirectNext},
		{name: "indirect table empty", direct: []d{{table, 0, indirect, 0}}, want: ErrTable},
		{name: "indirect table ragged", direct: []d{{table, 24, indirect, 0}}, want: ErrTable},
		{name: "indirect table too large", direct: []d{{table, 16*MaxSegments + 16, indirect, 0}}, want: ErrTable},
		{name: "indirect table huge", direct: []d{{table, math.MaxUint32 &^ 15, indirect, 0}}, want: ErrTable},
		{name: "indirect table nowhere", direct: []d{{0, 16, indirect, 0}}, want: ErrFault},
		{name: "indirect table past the end", direct: []d{{border + regionSize - 16, 32, indirect, 0}}, want: ErrFault},
		{name: "indirect table wraps", direct: []d{{math.MaxUint64 - 15, 32, indirect, 0}}, want: ErrFault},
		{name: "readable behind writable", direct: []d{{low, 1, next | write, 1}, {low, 1, 0, 0}}, want: ErrDirection},
		{name: "readable behind writable nothing", direct: []d{{low, 0, next | write, 1}, {low, 1, 0, 0}}, want: ErrDirection},
		{name: "readable in indirect behind writable", direct: []d{{low, 1, next | write, 1}, {table, 16, indirect, 0}}, indirect: []d{{low, 1, 0, 0}}, want: ErrDirection},
		{name: "nowhere", direct: []d{{0, 1, 0, 0}}, want: ErrFault},
		{name: "between regions", direct: []d{{border + regionSize, 1, 0, 0}}, want: ErrFault},
		{name: "before the first", direct: []d{{low - 1, 2, 0, 0}}, want: ErrFault},
		{name: "past the end", direct: []d{{border + regionSize - 10, 11, 0, 0}}, want: ErrFault},
		{name: "past the end, writable", direct: []d{{low, 1, next, 1}, {border + regionSize - 10, 11, write, 0}}, want: ErrFault},
		{name: "the last address", direct: []d{{math.MaxUint64, 1, 0, 0}}, want: ErrFault},
		{name: "wraps", direct: []d{{math.MaxUint64 - 1, 16, 0, 0}}, want: ErrFault},
		{name: "wraps into memory", direct: []d{{math.MaxUint64 - low, math.MaxInt32, write, 0}}, want: ErrFault},
		{name: "a byte too long", direct: []d{{far, MaxReadable, next, 1}, {low, 1, 0, 0}}, want: ErrTooLong},
		{name: "far too long", direct: []d{{far, math.MaxUint32, 0, 0}}, want: ErrTooLong},
		{name: "a byte too long to write", direct: []d{{far, 1, next | write, 1}, {far, MaxWritable, write, 0}}, want: ErrTooLong},
		{name: "far too long to write", direct: []d{{far, math.MaxUint32, write, 0}}, want: ErrTooLong},
		{name: "one piece too many", direct: []d{{low, 1, next, 1}, {table, 16 * MaxSegments, indirect, 0}}, indirect: fill(MaxSegments, func(i int) d {
			return d{low, 1, map[bool]uint16{true: next}[i < MaxSegments-1], uint16(i + 1)}
		}), want: ErrSegments},
		{name: "one piece too many by the border", direct: []d{{table, 16 * MaxSegments, indirect, 0}}, indirect: fill(MaxSegments, func(i int) d {
			return d{border - 1, uint32(1 + i%2), map[bool]uint16{true: next}[i < MaxSegments-1], uint16(i + 1)}
		}), want: ErrSegments},
		{name: "empty", direct: []d{{low, 0, 0, 0}}, want: ErrEmpty},
		{name: "empty, writable", direct: []d{{low, 0, next, 1}, {low, 0, write, 0}}, want: ErrEmpty},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := newGuest(8, 65535)
			put := func(b []byte, ds []d) {
				for i, d := range ds {
					g.setDesc(b, i, d.addr, d.len, d.flags, d.next)
				}
			}
			put(g.ring.Desc, test.direct)
			put(g.at(table), test.indirect)
			q := g.mustQueue(t, Features{Indirect: !test.no}, 65535)
			var c Chain
			for round := range 2 { // a used chain is as good as a new one
				g.offer(0)
				ok, err := q.Pop(&c)
				require.True(t, ok)
				assert.Equal(t, uint16(0), c.Head)
				if test.want != nil {
					require.ErrorIs(t, err, test.want)
					var why ChainError
					require.True(t, errors.As(err, &why))
				} else {
					require.NoError(t, err)
				}
				assert.Equal(t, test.readable, lengths(c.Readable), "round %d", round)
				assert.Equal(t, test.writable, lengths(c.Writable))
				assert.Equal(t, sum(test.readable), c.ReadableLen)
				assert.Equal(t, sum(test.writable), c.WritableLen)
			}
			// The ring works on.
			g.setDesc(g.ring.Desc, 1, low, 60, 0, 0)
			g.offer(1)
			ok, err := q.Pop(&c)
			assert.True(t, ok)
			assert.NoError(t, err)
			assert.Equal(t, []int{60}, lengths(c.Readable))
		})
	}
}

func bytesOf(n int) (ones []int) {
	for range n {
		ones = append(ones, 1)
	}
	return ones
}

func lengths(segs [][]byte) (ns []int) {
	for _, s := range segs {
		ns = append(ns, len(s))
	}
	return ns
}

func sum(ns []int) (total int) {
	for _, n := range ns {
		total += n
	}
	return total
}

// TestIndirectAcrossBorder: a table in two regions is read like any other, also
// where the border cuts a descriptor in two.
func TestIndirectAcrossBorder(t *testing.T) {
	for _, before := range []int{16, 8, 24, 1} {
		g := newGuest(8, 0)
		b := make([]byte, 48)
		g.setDesc(b, 0, low, 3, descFNext, 1)
		g.setDesc(b, 1, low, 4, descFNext, 2)
		g.setDesc(b, 2, low, 5, descFWrite, 0)
		copy(g.at(border-uint64(before)), b[:before])
		copy(g.at(border), b[before:])
		g.setDesc(g.ring.Desc, 0, border-uint64(before), 48, descFIndirect, 0)
		q := g.mustQueue(t, Features{Indirect: true}, 0)
		g.offer(0)
		var c Chain
		ok, err := q.Pop(&c)
		require.NoError(t, err)
		require.True(t, ok)
		assert.Equal(t, []int{3, 4}, lengths(c.Readable))
		assert.Equal(t, []int{5}, lengths(c.Writable))
	}
}

// A liar is a Memory that does not keep its promises.
type liar struct{ answer []byte }

func (l liar) Slice(uint64, uint32) ([]byte, error) { return l.answer, nil }

// TestMemoryPromises: a Memory that answers with nothing, or with too much,
// neither makes the walk spin nor a chain longer than its descriptors say.
func TestMemoryPromises(t *testing.T) {
	for _, answer := range [][]byte{nil, make([]byte, 65)} {
		for _, flags := range []uint16{0, descFWrite, descFIndirect} {
			g := newGuest(8, 0)
			g.setDesc(g.ring.Desc, 0, low, 64, flags, 0)
			g.offer(0)
			q, err := New(liar{answer}, g.ring, Features{Indirect: true}, 0)
			require.NoError(t, err)
			_, err = q.Pop(new(Chain))
			assert.ErrorIs(t, err, ErrFault)
		}
	}
}

// TestCopy: CopyOut and CopyIn move what both ends have, from any offset, over
// pieces of any length, and never more.
func TestCopy(t *testing.T) {
	text := []byte("the quick brown fox jumps")
	cut := func(b []byte, n int) (segs [][]byte) {
		for len(b) > n {
			segs = append(segs, b[:n], nil)
			b = b[n:]
		}
		return append(segs, b)
	}
	for _, from := range []int{0, 1, 7, len(text) - 1, len(text), len(text) + 5} {
		for _, srcCut := range []int{1, 3, 8, 100} {
			for _, dstCut := range []int{1, 2, 9, 100} {
				for _, room := range []int{0, 1, 10, len(text), 60} {
					want := text[min(from, len(text)):]
					want = want[:min(room, len(want))]

					out := make([]byte, room)
					c := Chain{Readable: cut(bytes.Clone(text), srcCut), ReadableLen: len(text)}
					require.Equal(t, len(want), c.CopyOut(cut(out, dstCut), from))
					require.Equal(t, want, out[:len(want)])
					require.Equal(t, make([]byte, room-len(want)), out[len(want):])

					const skip = 4
					in := make([]byte, skip+room)
					c = Chain{Writable: cut(in, dstCut), WritableLen: len(in)}
					require.Equal(t, len(want), c.CopyIn(cut(text, srcCut), from, skip))
					require.Equal(t, make([]byte, skip), in[:skip])
					require.Equal(t, want, in[skip:skip+len(want)])
					require.Equal(t, make([]byte, room-len(want)), in[skip+len(want):])
				}
			}
		}
	}
	var none Chain
	assert.Zero(t, none.CopyOut([][]byte{{1}}, 0))
	assert.Zero(t, none.CopyIn([][]byte{{1}}, 0, 0))
}

// TestChainErrorNames: every reason has a name of its own.
func TestChainErrorNames(t *testing.T) {
	seen := map[string]bool{}
	for e := range ChainError(NumChainErrors) {
		assert.NotEmpty(t, e.String())
		assert.False(t, seen[e.String()], e.String())
		seen[e.String()] = true
		assert.Equal(t, "bad descriptor chain: "+e.String(), e.Error())
	}
	assert.Equal(t, "unknown", ChainError(200).String())
}
