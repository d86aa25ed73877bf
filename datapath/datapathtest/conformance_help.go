package datapathtest

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
)

// Conformance, what its parts share: series of frames, and assertions.

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
