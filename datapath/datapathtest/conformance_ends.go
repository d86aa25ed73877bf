package datapathtest

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
)

// Conformance, of what hinders frames: a guest that takes none, and ends from either
// side.

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
