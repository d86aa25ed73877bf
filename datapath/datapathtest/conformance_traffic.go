package datapathtest

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
)

// Conformance, of frames that arrive: each whole, once, in order, and counted.

// sizesToGuest: a frame of any length the transport carries arrives whole, with
// nothing before or behind it, however it is laid out.
func sizesToGuest(t *testing.T, ours datapath.Attachment, guest Peer) {
	qp := ours.QueuePairs()[0]
	seq, total := uint32(0), 0
	for _, n := range sizes(maxFrame(guest)) {
		for _, seg := range []int{n, 14, 1000} {
			want := makeFrame(1, seq, n)
			f := cut(want, seg)
			require.NoError(t, writeAll(qp, []datapath.Frame{f}))
			assert.Equal(t, want, join(f), "WriteBatch changed the frame it was lent")
			got, err := recv(guest)
			require.NoError(t, err, "%d bytes", n)
			require.True(t, bytes.Equal(want, got), "%d bytes in segments of %d arrived as %d bytes", n, seg, len(got))
			seq++
			total += n
		}
	}
	assertToGuest(t, ours, seq)
	assert.EqualValues(t, total, ours.Stats().ToGuest.Bytes.Load(), "bytes counted to the guest")
	assert.Empty(t, ours.Stats().AllDrops())
}

// sizesFromGuest: the same towards us.
func sizesFromGuest(t *testing.T, ours datapath.Attachment, guest Peer) {
	in := read(t, ours, 4)
	for seq, n := range sizes(maxFrame(guest)) {
		want := makeFrame(2, uint32(seq), n)
		require.NoError(t, guest.Send(want), "%d bytes", n)
		got, err := in.next()
		require.NoError(t, err, "%d bytes", n)
		require.True(t, bytes.Equal(want, got), "%d bytes arrived as %d", n, len(got))
	}
	assertFromGuest(t, ours, in)
	assert.Empty(t, ours.Stats().AllDrops())
}

// batchesToGuest: batches of any length arrive whole and in order.
func batchesToGuest(t *testing.T, ours datapath.Attachment, guest Peer) {
	seq := uint32(0)
	for _, batch := range []int{1, 2, 7, 64, 200} {
		var frames []datapath.Frame
		for i := range batch {
			frames = append(frames, cut(makeFrame(1, seq+uint32(i), 60+(i*97)%1455), 54))
		}
		wrote := make(chan error, 1)
		go func() { wrote <- writeAll(ours.QueuePairs()[0], frames) }()
		for i := range batch {
			got, err := recv(guest)
			require.NoError(t, err, "frame %d of a batch of %d", i, batch)
			require.True(t, bytes.Equal(makeFrame(1, seq+uint32(i), 60+(i*97)%1455), got), "frame %d of a batch of %d", i, batch)
		}
		require.NoError(t, <-wrote)
		seq += uint32(batch)
	}
	assertToGuest(t, ours, seq)
	assert.Empty(t, ours.Stats().AllDrops())
}

// batchesFromGuest: frames come whole and in order, however many are asked for.
func batchesFromGuest(t *testing.T, ours datapath.Attachment, guest Peer) {
	in := read(t, ours, 3)
	const frames = 500
	sent := make(chan error, 1)
	go func() { sent <- sendAll(guest, 2, frames) }()
	mustTakeInOrder(t, in, 2, frames)
	require.NoError(t, <-sent)
	assertFromGuest(t, ours, in)
}

// bothWays: the two directions do not disturb each other. Between queue pairs
// there is no order: a transport may move a flow to the one we last wrote it to.
func bothWays(t *testing.T, ours datapath.Attachment, guest Peer) {
	in := read(t, ours, 64)
	const frames = 500
	errs := make(chan error, 2)
	go func() { errs <- sendAll(guest, 2, frames) }()
	go func() {
		var batch []datapath.Frame
		for seq := range uint32(frames) {
			batch = append(batch, cut(makeFrame(1, seq, sizeOf(seq)), 700))
		}
		errs <- writeAll(ours.QueuePairs()[0], batch)
	}()
	arrived := make(chan error, 1)
	go func() { arrived <- recvInOrder(guest, 1, 0, frames) }()
	if len(ours.QueuePairs()) == 1 {
		mustTakeInOrder(t, in, 2, frames)
	} else {
		mustTakeAll(t, in, 2, frames)
	}
	require.NoError(t, <-arrived)
	require.NoError(t, <-errs)
	require.NoError(t, <-errs)
	assertFromGuest(t, ours, in)
	assertToGuest(t, ours, frames)
}

// manySegments: more segments than one writev takes (IOV_MAX is 1024) are no
// reason to lose a frame.
func manySegments(t *testing.T, ours datapath.Attachment, guest Peer) {
	want := makeFrame(1, 0, 1514)
	require.NoError(t, writeAll(ours.QueuePairs()[0], []datapath.Frame{cut(want, 1)}))
	got, err := recv(guest)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
}

// concurrentWriters: any number may write at once, to one queue pair and to
// several; each one's frames arrive whole and in its order.
func concurrentWriters(t *testing.T, ours datapath.Attachment, guest Peer) {
	const writers, frames = 4, 200
	qps := ours.QueuePairs()
	errs := make(chan error, writers)
	for w := range writers {
		go func() {
			for seq := uint32(0); seq < frames; seq += 4 {
				var batch []datapath.Frame
				for i := range uint32(4) {
					batch = append(batch, cut(makeFrame(byte(w), seq+i, sizeOf(seq+i)), 300))
				}
				if err := writeShared(qps[w%len(qps)], batch); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	var next [writers]uint32
	for range writers * frames {
		got, err := recv(guest)
		require.NoError(t, err, "next of each writer: %v", next)
		w, seq := writerOf(got)
		require.Less(t, int(w), writers)
		require.Equal(t, next[w], seq, "order of writer %d", w)
		require.True(t, bytes.Equal(makeFrame(w, seq, sizeOf(seq)), got))
		next[w]++
	}
	for range writers {
		require.NoError(t, <-errs)
	}
	assertToGuest(t, ours, writers*frames)
}

// tooLong: a frame longer than MaxFrame is counted and dropped, either way, and
// the next one arrives.
func tooLong(t *testing.T, ours datapath.Attachment, guest Peer) {
	in := read(t, ours, 2)
	for _, n := range []int{datapath.MaxFrame + 1, 70_000} {
		before := ours.Stats().Drops(datapath.DropTooLong)
		require.NoError(t, writeAll(ours.QueuePairs()[0], []datapath.Frame{
			cut(makeFrame(1, 0, n), 40_000),
			cut(makeFrame(1, 1, 60), 60),
		}))
		got, err := recv(guest)
		require.NoError(t, err)
		require.True(t, bytes.Equal(makeFrame(1, 1, 60), got))
		assert.Equal(t, before+1, ours.Stats().Drops(datapath.DropTooLong))
	}
	assertToGuest(t, ours, 2)

	for _, n := range []int{datapath.MaxFrame + 1, 70_000} {
		before := ours.Stats().Drops(datapath.DropTooLong)
		sendErr := guest.Send(makeFrame(2, 0, n))
		require.NoError(t, guest.Send(makeFrame(2, 1, 60)))
		got, err := in.next()
		require.NoError(t, err)
		require.True(t, bytes.Equal(makeFrame(2, 1, 60), got), "a frame of %d bytes was taken", n)
		if sendErr == nil { // else the transport itself cannot carry it
			assert.Equal(t, before+1, ours.Stats().Drops(datapath.DropTooLong))
		}
	}
	assertFromGuest(t, ours, in)
}

// tooShort: whatever is shorter than an Ethernet header is delivered as it is or
// dropped, but accounted for, and the next frame arrives.
func tooShort(t *testing.T, ours datapath.Attachment, guest Peer) {
	in := read(t, ours, 2)
	st := ours.Stats()
	for n := range 14 {
		require.NoError(t, writeAll(ours.QueuePairs()[0], []datapath.Frame{{Segs: [][]byte{make([]byte, 14)}, N: n}}))
	}
	require.NoError(t, writeAll(ours.QueuePairs()[0], []datapath.Frame{cut(makeFrame(1, 1, 60), 60)}))
	got, err := recv(guest)
	require.NoError(t, err)
	require.True(t, bytes.Equal(makeFrame(1, 1, 60), got))
	assert.EqualValues(t, 14+1, st.ToGuest.Frames.Load()+st.Drops(datapath.DropTooShort))

	toGuest := st.Drops(datapath.DropTooShort)
	var sent uint64
	for n := range 14 {
		if guest.Send(make([]byte, n)) == nil {
			sent++
		}
	}
	require.NoError(t, guest.Send(makeFrame(2, 1, 60)))
	got, err = in.next()
	require.NoError(t, err)
	require.True(t, bytes.Equal(makeFrame(2, 1, 60), got))
	assert.Equal(t, sent+1, in.count.Load()+st.Drops(datapath.DropTooShort)-toGuest)
	assertFromGuest(t, ours, in)
}
