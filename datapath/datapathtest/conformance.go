package datapathtest

import (
	"testing"

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
