package datapathtest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// Conformance runs what every Attachment must do, as the comments of
// datapath.Attachment and datapath.QueuePair promise it, each part in a subtest
// with an attachment of its own.
//
// open joins a new attachment with the guest's end of it, which sends nothing by
// itself; what else it makes it cleans up with t.Cleanup. Conformance closes
// both ends.
func Conformance(t *testing.T, open func(t *testing.T) (ours datapath.Attachment, guest Peer)) {
	t.Helper()
	for _, part := range []struct {
		name string
		run  func(*testing.T, datapath.Attachment, Peer)
	}{
		{"Fixed", fixed},
		{"SizesToGuest", sizesToGuest},
		{"SizesFromGuest", sizesFromGuest},
		{"BatchesToGuest", batchesToGuest},
		{"BatchesFromGuest", batchesFromGuest},
		{"BothWays", bothWays},
		{"ManySegments", manySegments},
		{"ConcurrentWriters", concurrentWriters},
		{"FB127_FB131_FullThenDrained", fullThenDrained},
		{"FullThenGone", fullThenGone},
		{"FB143_TooLong", tooLong},
		{"FB146_TooShort", tooShort},
		{"CloseUnblocks", closeUnblocks},
		{"CloseConcurrently", closeConcurrently},
		{"FB019_PeerLeaves", peerLeaves},
	} {
		t.Run(part.name, func(t *testing.T) {
			Leaks(t)
			ours, guest := mustOpen(t, open)
			part.run(t, ours, guest)
		})
	}
	t.Run("FB121_FB130_AttachDetach", func(t *testing.T) { attachDetach(t, open) })
}

// mustOpen calls open and sees to it that the test's end closes both ends.
func mustOpen(t *testing.T, open func(*testing.T) (datapath.Attachment, Peer)) (datapath.Attachment, Peer) {
	ours, guest := open(t)
	t.Cleanup(func() {
		assert.NoError(t, ours.Close())
		assert.NoError(t, guest.Leave())
		assert.NoError(t, guest.Leave(), "leaving again")
	})
	return ours, guest
}

// fixed: what describes an attachment stays what it is.
func fixed(t *testing.T, ours datapath.Attachment, _ Peer) {
	info := ours.Info()
	assert.NotEmpty(t, info.Transport)
	assert.NotEmpty(t, info.Name)
	assert.Equal(t, info, ours.Info())
	for _, o := range []virtio.Offloads{info.ToGuest, info.FromGuest} {
		if o != 0 {
			assert.True(t, o.Has(virtio.OffloadCSum), "%v: every other offload needs csum", o.Names())
		}
	}
	qps := ours.QueuePairs()
	require.NotEmpty(t, qps)
	assert.Same(t, &qps[0], &ours.QueuePairs()[0])
	for _, qp := range qps {
		assert.Equal(t, qp.Room(), qp.Room())
	}
	require.NotNil(t, ours.Stats())
	assert.Same(t, ours.Stats(), ours.Stats())
	assert.Empty(t, ours.Stats().AllDrops())

	n, err := qps[0].WriteBatch(nil)
	assert.Zero(t, n)
	assert.NoError(t, err)
}

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

// mustFill writes until WriteBatch is short and returns how many frames were
// taken. A transport that is never full is written to as often as a full one
// would have needed, and reports full = false.
func mustFill(t *testing.T, ours datapath.Attachment, guest Peer) (taken uint32, full bool) {
	qp := ours.QueuePairs()[0]
	most := uint32(1 << 13) // 8192 frames of 787 bytes on average: 6 MiB
	if !neverFull(guest) {
		most = 1 << 18 // 196 MiB: more than any bounded queue holds
	}
	for taken < most {
		frames := []datapath.Frame{
			cut(makeFrame(1, taken, sizeOf(taken)), 2000),
			cut(makeFrame(1, taken+1, sizeOf(taken+1)), 2000),
		}
		n, err := qp.WriteBatch(frames)
		require.NoError(t, err)
		taken += uint32(n)
		if n < len(frames) {
			require.False(t, neverFull(guest), "the peer says that its transport is never full")
			return taken, true
		}
	}
	require.True(t, neverFull(guest), "%d frames went nowhere and WriteBatch is not short", taken)
	return taken, false
}

// fullThenDrained: a guest that takes no frames makes WriteBatch short, never
// blocks it, and loses nothing; once it reads again Room fires and all arrive
// without further traffic.
func fullThenDrained(t *testing.T, ours datapath.Attachment, guest Peer) {
	taken, full := mustFill(t, ours, guest)
	if !full {
		assertToGuest(t, ours, taken)
		return
	}
	qp := ours.QueuePairs()[0]
	const more = 50
	var rest []datapath.Frame
	for seq := taken; seq < taken+more; seq++ {
		rest = append(rest, cut(makeFrame(1, seq, sizeOf(seq)), 2000))
	}
	wrote := make(chan error, 1)
	go func() { wrote <- writeAll(qp, rest) }()
	require.NoError(t, recvInOrder(guest, 1, 0, taken+more))
	require.NoError(t, <-wrote)
	assertToGuest(t, ours, taken+more)
	assert.Empty(t, ours.Stats().AllDrops())
}

// fullThenGone: a writer that waits for room learns that the guest has gone.
func fullThenGone(t *testing.T, ours datapath.Attachment, guest Peer) {
	if !ours.Info().Connected {
		return // fixed by the transport: a datagram peer leaves without a sign
	}
	_, full := mustFill(t, ours, guest)
	in := read(t, ours, 1)
	wrote := make(chan error, 1)
	go func() {
		qp := ours.QueuePairs()[0]
		for {
			if err := writeAll(qp, []datapath.Frame{cut(makeFrame(1, 0, 1514), 2000)}); err != nil {
				wrote <- err
				return
			}
			if !full {
				select { // never full: it is Room alone that tells a writer
				case <-qp.Room():
				case <-time.After(patience):
					wrote <- errors.New("no value from Room at the end")
					return
				}
			}
		}
	}()
	require.NoError(t, guest.Leave())
	assert.ErrorIs(t, <-wrote, datapath.ErrPeerGone)
	for range ours.QueuePairs() {
		assert.ErrorIs(t, in.ended(), datapath.ErrPeerGone)
	}
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

// closeUnblocks: Close ends calls under way and those that follow, with
// ErrClosed, and wakes whoever waits for room.
func closeUnblocks(t *testing.T, ours datapath.Attachment, _ Peer) {
	in := read(t, ours, 8)
	time.Sleep(20 * time.Millisecond) // most likely it waits by now; either way it has to return
	require.NoError(t, ours.Close())
	for range ours.QueuePairs() {
		assert.ErrorIs(t, in.ended(), datapath.ErrClosed)
	}
	assertEnded(t, ours, datapath.ErrClosed)
	assertWoken(t, ours)
	assert.NoError(t, ours.Close(), "closing again")
	assertEnded(t, ours, datapath.ErrClosed)
}

// closeConcurrently: any number may close, while others read and write.
func closeConcurrently(t *testing.T, ours datapath.Attachment, guest Peer) {
	in := read(t, ours, 8)
	var wg sync.WaitGroup
	for _, qp := range ours.QueuePairs() {
		wg.Go(func() {
			for {
				_, err := qp.WriteBatch([]datapath.Frame{cut(makeFrame(1, 0, 200), 100)})
				if err != nil {
					assert.ErrorIs(t, err, datapath.ErrClosed)
					return
				}
			}
		})
	}
	for {
		if _, err := recv(guest); !assert.NoError(t, err) {
			break
		} else if ours.Stats().ToGuest.Frames.Load() > 10 {
			break // the writers are under way
		}
	}
	for range 4 {
		wg.Go(func() { assert.NoError(t, ours.Close()) })
	}
	wg.Wait()
	for range ours.QueuePairs() {
		assert.ErrorIs(t, in.ended(), datapath.ErrClosed)
	}
}

// peerLeaves: where the transport can tell, the guest's going ends every call
// with ErrPeerGone, until we close.
func peerLeaves(t *testing.T, ours datapath.Attachment, guest Peer) {
	in := read(t, ours, 8)
	require.NoError(t, writeAll(ours.QueuePairs()[0], []datapath.Frame{cut(makeFrame(1, 0, 60), 60)}))
	_, err := recv(guest)
	require.NoError(t, err)
	require.NoError(t, guest.Leave())
	if ours.Info().Connected {
		for range ours.QueuePairs() {
			assert.ErrorIs(t, in.ended(), datapath.ErrPeerGone)
		}
		assertEnded(t, ours, datapath.ErrPeerGone)
		assertWoken(t, ours)
	}
	require.NoError(t, ours.Close())
	if !ours.Info().Connected {
		for range ours.QueuePairs() {
			assert.ErrorIs(t, in.ended(), datapath.ErrClosed)
		}
	}
	assertEnded(t, ours, datapath.ErrClosed)
}

// attachDetach: attaching and going, from either side and in the middle of
// traffic, leaves nothing behind however often it is done.
func attachDetach(t *testing.T, open func(*testing.T) (datapath.Attachment, Peer)) {
	Leaks(t)
	for i := range 20 {
		t.Run("", func(t *testing.T) {
			ours, guest := mustOpen(t, open)
			in := read(t, ours, 8)
			var wg sync.WaitGroup
			wg.Go(func() { _ = sendAll(guest, 2, 100) })
			wg.Go(func() {
				for range 100 {
					if _, err := ours.QueuePairs()[0].WriteBatch([]datapath.Frame{cut(makeFrame(1, 0, 700), 300)}); err != nil {
						return
					}
				}
			})
			if i%4 >= 2 {
				_, err := in.next()
				assert.NoError(t, err)
			}
			if i%2 == 0 {
				assert.NoError(t, guest.Leave())
			}
			assert.NoError(t, ours.Close())
			assert.NoError(t, guest.Leave())
			wg.Wait()
			for range ours.QueuePairs() {
				err := in.ended()
				assert.True(t, errors.Is(err, datapath.ErrClosed) || errors.Is(err, datapath.ErrPeerGone), "%v", err)
			}
		})
	}
}

// sizeOf spreads the lengths of a series of frames over Ethernet's.
func sizeOf(seq uint32) int { return 60 + int(seq*389%1455) }

// sendAll sends a series of frames from the guest.
func sendAll(guest Peer, writer byte, frames uint32) error {
	for seq := range frames {
		if err := guest.Send(makeFrame(writer, seq, sizeOf(seq))); err != nil {
			return err
		}
	}
	return nil
}

// recvInOrder receives a series of frames at the guest, from the first sequence
// number up to and without the last.
func recvInOrder(guest Peer, writer byte, first, last uint32) error {
	for seq := first; seq < last; seq++ {
		got, err := recv(guest)
		if err != nil {
			return err
		}
		if !bytes.Equal(makeFrame(writer, seq, sizeOf(seq)), got) {
			_, have := writerOf(got)
			return fmt.Errorf("at the guest: frame %d of %d bytes expected, a damaged one or frame %d of %d bytes came",
				seq, sizeOf(seq), have, len(got))
		}
	}
	return nil
}

// mustTakeInOrder takes a series of frames from the guest.
func mustTakeInOrder(t *testing.T, in *inbox, writer byte, frames uint32) {
	t.Helper()
	for seq := range frames {
		got, err := in.next()
		require.NoError(t, err, "frame %d", seq)
		require.True(t, bytes.Equal(makeFrame(writer, seq, sizeOf(seq)), got), "frame %d is damaged or out of order", seq)
	}
}

// mustTakeAll takes a series of frames from the guest, each once, in any order.
func mustTakeAll(t *testing.T, in *inbox, writer byte, frames uint32) {
	t.Helper()
	seen := make(map[uint32]bool)
	for range frames {
		got, err := in.next()
		require.NoError(t, err, "after %d frames", len(seen))
		_, seq := writerOf(got)
		require.True(t, bytes.Equal(makeFrame(writer, seq, sizeOf(seq)), got), "frame %d is damaged", seq)
		require.False(t, seen[seq], "frame %d came twice", seq)
		seen[seq] = true
	}
}

// assertEnded asserts that every call of every queue pair returns want.
func assertEnded(t *testing.T, ours datapath.Attachment, want error) {
	t.Helper()
	l := lender{t: t}
	for _, qp := range ours.QueuePairs() {
		n, err := qp.ReadBatch(make([]datapath.Frame, 1), l.get)
		assert.ErrorIs(t, err, want)
		assert.Zero(t, n)
		n, err = qp.WriteBatch([]datapath.Frame{cut(makeFrame(1, 0, 60), 60)})
		assert.ErrorIs(t, err, want)
		assert.Zero(t, n)
	}
}

// assertWoken asserts that whoever waits for room at the end is woken. It takes
// the one value there is.
func assertWoken(t *testing.T, ours datapath.Attachment) {
	t.Helper()
	for _, qp := range ours.QueuePairs() {
		select {
		case <-qp.Room():
		case <-time.After(patience):
			assert.Fail(t, "Room did not fire at the end")
		}
	}
}

func assertToGuest(t *testing.T, ours datapath.Attachment, frames uint32) {
	t.Helper()
	assert.EqualValues(t, frames, ours.Stats().ToGuest.Frames.Load(), "frames counted to the guest")
}

// assertFromGuest asserts that what was counted is what was read, once both
// have come to rest: a guest's own stack may still be sending.
func assertFromGuest(t *testing.T, ours datapath.Attachment, in *inbox) {
	t.Helper()
	from := &ours.Stats().FromGuest
	assert.Eventually(t, func() bool {
		return from.Frames.Load() == in.count.Load() && from.Bytes.Load() == in.bytes.Load()
	}, patience, 5*time.Millisecond, "counted %d frames, %d bytes from the guest", from.Frames.Load(), from.Bytes.Load())
}
