package virtqueue

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func mustPop(tb testing.TB, q *Queue, c *Chain) {
	tb.Helper()
	ok, err := q.Pop(c)
	require.NoError(tb, err)
	require.True(tb, ok)
}

func assertEmpty(tb testing.TB, q *Queue) {
	tb.Helper()
	ok, err := q.Pop(new(Chain))
	assert.NoError(tb, err)
	assert.False(tb, ok)
	assert.Zero(tb, q.Avail())
}

// TestCorrupt: a ring that cannot be followed is refused once and for ever, and
// nothing was taken from it.
func TestCorrupt(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(g *guest)
		want string
	}{
		{"index one too far", func(g *guest) { g.setAvailIdx(g.avail + 9) }, "virtqueue is corrupt: available index 8 is 9 ahead of 65535 in a ring of 8"},
		{"index half around", func(g *guest) { g.setAvailIdx(g.avail + 0x8000) }, "is 32768 ahead of"},
		{"index back", func(g *guest) { g.setAvailIdx(g.avail - 1) }, "is 65535 ahead of"},
		{"head behind the table", func(g *guest) { g.offer(8) }, "virtqueue is corrupt: available entry 65535 is head 8 of 8 descriptors"},
		{"head wild", func(g *guest) { g.offer(0xffff) }, "is head 65535 of 8"},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := newGuest(8, 65535)
			g.simple()
			q := g.mustQueue(t, Features{EventIdx: true}, 65535)
			test.do(g)
			assert.LessOrEqual(t, q.Avail(), 8)
			assert.True(t, q.EnableKicks(), "do not sleep over it")
			for range 2 {
				ok, err := q.Pop(new(Chain))
				assert.False(t, ok)
				assert.ErrorIs(t, err, ErrCorrupt)
				assert.ErrorContains(t, err, test.want)
				assert.Equal(t, uint16(65535), q.Next())
				g.avail = 65535
				g.offer(0) // repentance comes too late
			}
		})
	}
}

// TestFull: the most that can be available is the queue size, at every size.
func TestFull(t *testing.T) {
	for num := 1; num <= MaxNum; num *= 2 {
		g := newGuest(uint16(num), 0xfff0)
		g.simple()
		q := g.mustQueue(t, Features{}, 0xfff0)
		assertEmpty(t, q)
		for round := range 3 {
			for i := range num {
				g.offer(uint16(i))
			}
			require.Equal(t, num, q.Avail())
			var c Chain
			for i := range num {
				mustPop(t, q, &c)
				require.Equal(t, uint16(i), c.Head)
				q.Push(c.Head, 0)
			}
			assertEmpty(t, q)
			q.Flush()
			require.Equal(t, 0xfff0+uint16((round+1)*num), g.usedIdx())
		}
	}
}

// TestFB134_Resume: a queue that takes over begins at the base it is given, and
// goes on with the used ring where that stands.
func TestFB134_Resume(t *testing.T) {
	g := newGuest(64, 65500)
	g.simple()
	for i := range uint16(64) {
		g.offer(i)
	}
	q := g.mustQueue(t, Features{}, 65500)
	var c Chain
	for i := range uint16(20) {
		mustPop(t, q, &c)
		require.Equal(t, i, c.Head)
		q.Push(c.Head, 0)
	}
	q.Flush()
	mustPop(t, q, &c) // in hand when it stops
	q.Unpop(1)

	q = g.mustQueue(t, Features{}, q.Next())
	assert.Equal(t, 44, q.Avail())
	for i := uint16(20); i < 64; i++ {
		mustPop(t, q, &c)
		require.Equal(t, i, c.Head)
		q.Push(c.Head, 0)
		q.Flush()
		require.Equal(t, 65500+i+1, g.usedIdx())
	}
	assertEmpty(t, q)
}

// TestFB137_Reboot: a queue on a ring that a new driver has set up starts from
// zero, whatever was there before.
func TestFB137_Reboot(t *testing.T) {
	g := newGuest(8, 100)
	g.simple()
	g.offer(1, 2, 3)
	q := g.mustQueue(t, Features{EventIdx: true}, 100)
	var c Chain
	mustPop(t, q, &c)
	q.Push(c.Head, 0)
	q.Flush()

	clear(g.ring.Avail)
	clear(g.ring.Used)
	g.avail = 0
	q = g.mustQueue(t, Features{EventIdx: true}, 0)
	assertEmpty(t, q)
	assert.False(t, q.EnableKicks())
	assert.Zero(t, g.usedIdx())
	assert.Zero(t, g.availEvent())
	g.offer(5)
	mustPop(t, q, &c)
	assert.Equal(t, uint16(5), c.Head)
	q.Push(c.Head, 0)
	q.Flush()
	assert.Equal(t, uint16(1), g.usedIdx())
}

// TestFB125_EventIdxCalls: a batch calls exactly when one of its entries is the
// one the driver waits for (virtio 1.3, 2.7.7.2), wherever the indexes stand, and
// the first one in any case.
func TestFB125_EventIdxCalls(t *testing.T) {
	for _, base := range []uint16{0, 1, 100, 0x7ffe, 0x7fff, 0x8000, 65530, 65535} {
		g := newGuest(16, base)
		g.simple()
		q := g.mustQueue(t, Features{EventIdx: true}, base)
		assert.False(t, q.Flush(), "nothing pushed")
		g.setUsedEvent(base - 1) // passed already
		q.Push(0, 0)
		assert.True(t, q.Flush(), "what was passed before us may not have been called for")
		for _, batch := range []int{1, 2, 3, 16} {
			for event := -3; event <= 18; event++ {
				before := g.usedIdx()
				g.setUsedEvent(before + uint16(event))
				for range batch {
					q.Push(0, 0)
				}
				want := event >= 0 && event < batch // one of the entries before, ..., before+batch-1
				assert.Equal(t, want, q.Flush(), "base %d, batch %d, event %+d", base, batch, event)
				assert.Equal(t, before+uint16(batch), g.usedIdx())
			}
		}
		g.setUsedEvent(g.usedIdx())
		assert.False(t, q.Flush(), "nothing pushed")
	}
}

// TestPassed: the rule for a batch is the rule for each of its entries.
func TestPassed(t *testing.T) {
	for _, before := range []uint16{0, 1, 32767, 32768, 65533, 65535} {
		for _, n := range []uint16{0, 1, 2, 7, 32767, 32768} {
			step := uint16(1)
			for event := uint32(0); event < 65536; event += uint32(step) {
				want := uint16(event)-before < n
				if n <= 7 {
					want = false
					for i := range n {
						want = want || before+i == uint16(event)
					}
				}
				if got := passed(uint16(event), before, before+n); got != want {
					t.Fatalf("event %d, %d to %d: %t", event, before, before+n, got)
				}
			}
		}
	}
}

// TestNoInterrupt: without EVENT_IDX the flag decides, and used_event does not;
// with it the other way round.
func TestNoInterrupt(t *testing.T) {
	for _, eventIdx := range []bool{false, true} {
		g := newGuest(8, 0)
		q := g.mustQueue(t, Features{EventIdx: eventIdx}, 0)
		q.Push(0, 0)
		assert.True(t, q.Flush())
		for _, flags := range []byte{0, 1, 0, 1} {
			for _, wait := range []bool{false, true} {
				g.ring.Avail[0] = flags
				g.setUsedEvent(g.usedIdx() - 1)
				if wait {
					g.setUsedEvent(g.usedIdx())
				}
				q.Push(0, 0)
				want := flags == 0
				if eventIdx {
					want = wait
				}
				assert.Equal(t, want, q.Flush())
				assert.False(t, q.Flush(), "once")
			}
		}
	}
}

// TestKicks: what the driver reads about our wish to be kicked, and what it has
// made available meanwhile.
func TestKicks(t *testing.T) {
	g := newGuest(8, 65534)
	g.simple()
	q := g.mustQueue(t, Features{}, 65534)
	assert.Zero(t, g.usedFlags())
	q.DisableKicks()
	assert.Equal(t, uint16(1), g.usedFlags())
	assert.Equal(t, uint16(65534), g.usedIdx(), "the index beside the flag stays")
	q.Push(0, 0)
	q.DisableKicks()
	assert.Equal(t, uint16(65534), g.usedIdx(), "and does not tell what was not flushed")
	q.Flush()
	assert.Equal(t, uint16(1), g.usedFlags())
	assert.Equal(t, uint16(65535), g.usedIdx())
	assert.False(t, q.EnableKicks())
	assert.Zero(t, g.usedFlags())
	g.offer(0)
	assert.True(t, q.EnableKicks())

	g = newGuest(8, 65534)
	g.simple()
	q = g.mustQueue(t, Features{EventIdx: true}, 65534)
	for i := range uint16(5) {
		q.DisableKicks()
		assert.False(t, q.EnableKicks())
		assert.Equal(t, 65534+i, g.availEvent(), "the entry that comes next")
		assert.Zero(t, g.usedFlags(), "virtio 1.3, 2.7.10.2")
		g.offer(i)
		assert.True(t, q.EnableKicks())
		mustPop(t, q, new(Chain))
	}
}

// TestFB127_GivenBack: chains that were given back are there to be taken, and the
// driver is asked for a kick when others join them: who found too few of them
// sleeps, and is woken.
func TestFB127_GivenBack(t *testing.T) {
	for _, f := range []Features{{}, {EventIdx: true}} {
		t.Run(fmt.Sprintf("event=%t", f.EventIdx), func(t *testing.T) {
			g := newGuest(8, 65534)
			g.simple()
			q := g.mustQueue(t, f, 65534)
			g.offer(3, 1, 2)
			var c [5]Chain
			for i := range 3 {
				mustPop(t, q, &c[i])
			}
			assertEmpty(t, q)
			q.Unpop(3)
			assert.Equal(t, uint16(65534), q.Next())
			assert.Equal(t, 3, q.Avail())
			assert.False(t, q.EnableKicks(), "all of them have been looked at")
			if f.EventIdx {
				assert.Equal(t, uint16(1), g.availEvent())
			}
			g.offer(4, 5)
			assert.True(t, q.EnableKicks())
			for i, want := range []uint16{3, 1, 2, 4} {
				mustPop(t, q, &c[i])
				assert.Equal(t, want, c[i].Head)
			}
			q.Unpop(2)
			assert.True(t, q.EnableKicks(), "5 has not been looked at")
			mustPop(t, q, &c[2])
			assert.Equal(t, uint16(2), c[2].Head)
			for _, want := range []uint16{4, 5} {
				mustPop(t, q, &c[3])
				assert.Equal(t, want, c[3].Head)
			}
			assert.False(t, q.EnableKicks())
			if f.EventIdx {
				assert.Equal(t, uint16(3), g.availEvent())
			}
			assertEmpty(t, q)
		})
	}
}

// TestBadChainGivenBack: a chain that cannot be used counts as taken, like any.
func TestBadChainGivenBack(t *testing.T) {
	g := newGuest(8, 0)
	g.simple()
	g.setDesc(g.ring.Desc, 1, 0, 1, 0, 0)
	g.offer(0, 1, 2)
	q := g.mustQueue(t, Features{}, 0)
	for range 2 {
		var c Chain
		mustPop(t, q, &c)
		ok, err := q.Pop(&c)
		assert.True(t, ok)
		assert.Equal(t, ErrFault, err)
		assert.Equal(t, uint16(1), c.Head)
		mustPop(t, q, &c)
		assert.Equal(t, uint16(2), c.Head)
		q.Unpop(3)
	}
}

// TestAllocs: no allocation per chain, good or bad.
func TestAllocs(t *testing.T) {
	g := newGuest(256, 0)
	bench := benches[len(benches)-1]
	bench.fill(g)
	g.setDesc(g.ring.Desc, 255, 0, 1, 0, 0)
	q := g.mustQueue(t, Features{EventIdx: true, Indirect: true}, 0)
	var c Chain
	buf := [][]byte{make([]byte, 1<<17)}
	turn := func() {
		g.offer(0, 255)
		q.DisableKicks()
		for {
			ok, err := q.Pop(&c)
			if !ok {
				break
			}
			n := 0
			if err == nil {
				c.CopyOut(buf, 0)
				n = c.CopyIn(buf, 0, 0)
			}
			q.Push(c.Head, uint32(n))
		}
		q.Flush()
		q.EnableKicks()
	}
	turn() // the chain grows to what is needed
	assert.Zero(t, testing.AllocsPerRun(200, turn))
}

var benches = []struct {
	name string
	fill func(g *guest)
}{
	{"direct-1", func(g *guest) { g.simple() }},
	{"direct-2", func(g *guest) { // header and frame, as Linux sends without ANY_LAYOUT
		for i := range 256 {
			g.setDesc(g.ring.Desc, i, low+uint64(64*i), 12, descFNext, uint16(i+1)%256)
			if i%2 == 1 {
				g.setDesc(g.ring.Desc, i, far+uint64(64*i), 64, 0, 0)
			}
		}
	}},
	{"indirect-2", func(g *guest) {
		for i := range 256 {
			table := far + uint64(64*i)
			g.setDesc(g.ring.Desc, i, table, 32, descFIndirect, 0)
			g.setDesc(g.at(table), 0, low, 12, descFNext, 1)
			g.setDesc(g.at(table), 1, low+64, 64, 0, 0)
		}
	}},
	{"indirect-18", func(g *guest) { // a super-frame of 17 pages
		for i := range 256 {
			table := far + uint64(512*i)
			g.setDesc(g.ring.Desc, i, table, 18*descSize, descFIndirect, 0)
			for j := range 18 {
				flags := uint16(descFNext)
				if j == 17 {
					flags = 0
				}
				g.setDesc(g.at(table), j, far+uint64(j)<<12, 3640, flags, uint16(j+1))
			}
		}
	}},
}

// BenchmarkChain is Pop and Push of one chain, and a 64th of Flush and
// EnableKicks, without a copy.
func BenchmarkChain(b *testing.B) {
	for _, bench := range benches {
		b.Run(bench.name, func(b *testing.B) {
			const batch = 64
			g := newGuest(256, 0)
			bench.fill(g)
			q := g.mustQueue(b, Features{EventIdx: true, Indirect: true}, 0)
			for i := range 256 { // heads 0, 2, 4, ...: those of direct-2
				g.offer(uint16(2 * i % 256))
			}
			g.avail = 0
			g.setAvailIdx(0)
			var c Chain
			b.ReportAllocs()
			for n := 0; n < b.N; n += batch {
				g.avail += batch
				g.setAvailIdx(g.avail)
				for range batch {
					if ok, err := q.Pop(&c); !ok || err != nil {
						b.Fatal(ok, err)
					}
					q.Push(c.Head, 0)
				}
				q.Flush()
				q.EnableKicks()
			}
		})
	}
}

// BenchmarkCopy is CopyOut of a frame that lies in descriptors of 3640 bytes.
func BenchmarkCopy(b *testing.B) {
	for _, size := range []int{64, 1514, 65535} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			var c Chain
			for left := size; left > 0; left -= 3640 {
				c.Readable = append(c.Readable, make([]byte, min(left, 3640)))
			}
			dst := [][]byte{make([]byte, 128), make([]byte, 65536)}
			b.SetBytes(int64(size))
			for b.Loop() {
				c.CopyOut(dst, 0)
			}
		})
	}
}
