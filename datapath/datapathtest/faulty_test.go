package datapathtest

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
)

// faultyPairOf returns a Faulty over one end of a link in memory, and the other end.
func faultyPairOf(t *testing.T, depth int, seed uint64, toGuest, fromGuest Faults) (ours *Faulty, guest datapath.Attachment) {
	t.Helper()
	Leaks(t)
	a, b := memory.Pair(memory.Options{Depth: depth})
	f := NewFaulty(a, seed, toGuest, fromGuest)
	t.Cleanup(func() {
		assert.NoError(t, f.Close())
		assert.NoError(t, f.Close())
		assert.NoError(t, b.Close())
	})
	return f, b
}

// through sends frames 0 to n-1 from one end and returns the numbers of those that
// have come to the other before any of some more: the last of n may be lost.
func through(t *testing.T, from, to datapath.Attachment, n uint32) (got []uint32) {
	t.Helper()
	const more = 50
	var frames []datapath.Frame
	for seq := range n + more {
		frames = append(frames, cut(makeFrame(1, seq, sizeOf(seq)), 100))
	}
	require.NoError(t, writeAll(from.QueuePairs()[0], frames))
	l, in := lender{t: t}, make([]datapath.Frame, 7)
	for {
		k, err := to.QueuePairs()[0].ReadBatch(in, l.get)
		require.NoError(t, err)
		for _, f := range in[:k] {
			l.check(f)
			b := join(f)
			_, seq := writerOf(b)
			require.Equal(t, makeFrame(1, seq, sizeOf(seq)), b)
			if seq >= n {
				return got
			}
			got = append(got, seq)
		}
		l.reclaim(in[:k])
	}
}

// Of many frames as many are lost, doubled and held back as was asked, and the
// same ones with the same seed, in either direction.
func TestFaulty(t *testing.T) {
	const n = 20000
	faults := Faults{Drop: 0.02, Duplicate: 0.03, Reorder: 0.05, Hold: 4}
	for name, toGuest := range map[string]bool{"to guest": true, "from guest": false} {
		t.Run(name, func(t *testing.T) {
			var runs [2][]uint32
			for i := range runs {
				ours, guest := faultyPairOf(t, 3*n, 1, faults, faults)
				from, to := datapath.Attachment(ours), guest
				if !toGuest {
					from, to = guest, ours
				}
				runs[i] = through(t, from, to, n)
				a, b := ours.Counts()
				if !toGuest {
					a, b = b, a
				}
				assert.Zero(t, b)
				assert.InEpsilon(t, 0.02*n, a.Dropped, 0.2)
				assert.InEpsilon(t, 0.03*n, a.Duplicated, 0.2)
				assert.InEpsilon(t, 0.05*n, a.Reordered, 0.2)
				seen, late := make(map[uint32]int), 0
				for at, seq := range runs[i] {
					if seen[seq]++; at > 0 && seq < runs[i][at-1] {
						late++
					}
				}
				// A few may still be held back behind the last, and what comes behind it is
				// counted as well; two that are held back at once may come in order.
				assert.InDelta(t, n-a.Dropped, len(seen), 8)
				assert.InEpsilon(t, a.Reordered, late, 0.2)
				twice := 0
				for _, k := range seen {
					require.LessOrEqual(t, k, 2)
					twice += k - 1
				}
				assert.InDelta(t, a.Duplicated, twice, 8)
			}
			assert.Equal(t, runs[0], runs[1])
			other, guest := faultyPairOf(t, 3*n, 2, faults, faults)
			assert.NotEqual(t, runs[0], through(t, other, guest, n))
		})
	}
}

// What is held back comes after as many others as were asked at most.
func TestFaultyHoldsBackForSome(t *testing.T) {
	ours, guest := faultyPairOf(t, 1000, 3, Faults{Reorder: 0.1, Hold: 2}, Faults{})
	got := through(t, ours, guest, 900)
	most := 0
	for i, seq := range got {
		before := 0 // how many of the later ones came first
		for _, s := range got[:i] {
			if s > seq {
				before++
			}
		}
		most = max(most, before)
	}
	assert.Positive(t, most)
	// Those two, and of those that are held back themselves none.
	assert.LessOrEqual(t, most, 2)
}

// A link that is full takes nothing and says when it does again; one whose queue
// is full is no other.
func TestFaultyFull(t *testing.T) {
	ours, guest := faultyPairOf(t, 4, 4, Faults{}, Faults{})
	qp := ours.QueuePairs()[0]
	frame := func(seq uint32) []datapath.Frame { return []datapath.Frame{cut(makeFrame(1, seq, 60), 60)} }
	ours.SetFull(true)
	n, err := qp.WriteBatch(frame(0))
	require.NoError(t, err)
	require.Zero(t, n)
	assert.Empty(t, qp.Room())
	ours.SetFull(false)
	<-qp.Room()
	for seq := range uint32(4) {
		require.NoError(t, writeAll(qp, frame(seq)))
	}
	n, err = qp.WriteBatch(frame(4))
	require.NoError(t, err)
	require.Zero(t, n)
	l, in := lender{t: t}, make([]datapath.Frame, 4)
	n, err = guest.QueuePairs()[0].ReadBatch(in, l.get)
	require.NoError(t, err)
	require.Equal(t, 4, n)
	for seq, f := range in {
		assert.EqualValues(t, seq, binary.BigEndian.Uint32(join(f)[15:]))
	}
	<-qp.Room()
	require.NoError(t, writeAll(qp, frame(4)))
	ours.SetFaults(Faults{Drop: 1}, Faults{})
	for range 10 { // more than there is room for
		require.NoError(t, writeAll(qp, frame(5)))
	}
	to, _ := ours.Counts()
	assert.EqualValues(t, 10, to.Dropped)
}
