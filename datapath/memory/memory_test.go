package memory

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
)

func TestConformance(t *testing.T) {
	t.Run("Default", func(t *testing.T) { datapathtest.Conformance(t, opener(Options{})) })
	t.Run("Shallow", func(t *testing.T) { datapathtest.Conformance(t, opener(Options{Depth: 1})) })
	t.Run("QueuePairs", func(t *testing.T) {
		datapathtest.Conformance(t, opener(Options{QueuePairs: 3, Depth: 16}))
	})
	// What tests put between is an attachment as well as long as it does no harm.
	t.Run("Faultless", func(t *testing.T) {
		datapathtest.Conformance(t, func(*testing.T) (datapath.Attachment, datapathtest.Peer) {
			ours, guest := Pair(Options{QueuePairs: 3, Depth: 16})
			return datapathtest.NewFaulty(ours, 1, datapathtest.Faults{}, datapathtest.Faults{}), newPeer(guest)
		})
	})
}

func opener(o Options) func(*testing.T) (datapath.Attachment, datapathtest.Peer) {
	return func(*testing.T) (datapath.Attachment, datapathtest.Peer) {
		ours, guest := Pair(o)
		return ours, newPeer(guest)
	}
}

// A peer plays the guest at the other end of a pair.
type peer struct {
	datapath.Attachment
}

func newPeer(guest datapath.Attachment) *peer { return &peer{Attachment: guest} }

func (p *peer) MaxFrame() int { return datapath.MaxFrame }

func (p *peer) Send(frame []byte) error {
	if len(frame) < 14 || len(frame) > datapath.MaxFrame {
		return errors.New("the guest's end takes no such frame")
	}
	qp := p.QueuePairs()[0]
	for {
		n, err := qp.WriteBatch([]datapath.Frame{{Segs: [][]byte{frame}, N: len(frame)}})
		if err != nil || n == 1 {
			return err
		}
		<-qp.Room()
	}
}

// Recv looks at each queue in turn: a pair has no call that waits for all.
func (p *peer) Recv(timeout time.Duration) ([]byte, error) {
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(100 * time.Microsecond) {
		for _, qp := range p.QueuePairs() {
			if qp.(*queuePair).rx.len() == 0 {
				continue
			}
			frames := make([]datapath.Frame, 1)
			_, err := qp.ReadBatch(frames, func(n int) [][]byte { return [][]byte{make([]byte, n)} })
			if err != nil {
				return nil, err
			}
			return frames[0].Segs[0][:frames[0].N], nil
		}
	}
	return nil, errors.New("no frame in time")
}

func (p *peer) Leave() error { return p.Close() }

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n
}

// TestHeaders: a virtio-net header arrives as it was written, both ways, and
// each end is told of the offloads of its direction.
func TestHeaders(t *testing.T) {
	o := Options{Name: "vm1", ToGuest: virtio.OffloadCSum | virtio.OffloadTSO4, FromGuest: virtio.OffloadCSum}
	ours, guest := Pair(o)
	defer func() { require.NoError(t, ours.Close()) }()
	defer func() { require.NoError(t, guest.Close()) }()
	assert.Equal(t, datapath.Info{
		Transport: "memory", Name: "vm1", ToGuest: o.ToGuest, FromGuest: o.FromGuest, Connected: true,
	}, ours.Info())
	assert.Equal(t, datapath.Info{
		Transport: "memory", Name: "vm1", ToGuest: o.FromGuest, FromGuest: o.ToGuest, Connected: true,
	}, guest.Info())

	hdr := virtio.NetHdr{
		Flags: virtio.FlagNeedsCSum, GSOType: virtio.GSOTCPv4, HdrLen: 54, GSOSize: 1448,
		CSumStart: 34, CSumOffset: 16, NumBuffers: 1,
	}
	for _, way := range []struct{ from, to datapath.Attachment }{{ours, guest}, {guest, ours}} {
		sent := datapath.Frame{Hdr: hdr, Segs: [][]byte{make([]byte, 5000)}, N: 5000}
		n, err := way.from.QueuePairs()[0].WriteBatch([]datapath.Frame{sent})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		got := make([]datapath.Frame, 2)
		n, err = way.to.QueuePairs()[0].ReadBatch(got, func(n int) [][]byte { return [][]byte{make([]byte, n)} })
		require.NoError(t, err)
		require.Equal(t, 1, n)
		assert.Equal(t, hdr, got[0].Hdr)
		assert.Equal(t, 5000, got[0].N)
		assert.EqualValues(t, 1, way.from.Stats().ToGuest.Frames.Load())
		assert.EqualValues(t, 5000, way.to.Stats().FromGuest.Bytes.Load())
	}
}

// TestDepth: a queue takes exactly Depth frames, and room comes with the first
// one read, not before.
func TestDepth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, guest := Pair(Options{Depth: 3})
		defer func() { assert.NoError(t, guest.Close()) }()
		defer func() { assert.NoError(t, ours.Close()) }()
		qp := ours.QueuePairs()[0]
		frames := make([]datapath.Frame, 5)
		for i := range frames {
			frames[i] = datapath.Frame{Segs: [][]byte{make([]byte, 60)}, N: 60}
		}
		n, err := qp.WriteBatch(frames)
		require.NoError(t, err)
		require.Equal(t, 3, n)

		woken := false
		go func() { <-qp.Room(); woken = true }()
		synctest.Wait()
		require.False(t, woken, "room before the guest read")
		_, err = guest.QueuePairs()[0].ReadBatch(make([]datapath.Frame, 1), func(n int) [][]byte { return [][]byte{make([]byte, n)} })
		require.NoError(t, err)
		synctest.Wait()
		require.True(t, woken)
		n, err = qp.WriteBatch(frames[3:])
		require.NoError(t, err)
		require.Equal(t, 1, n)
	})
}

// TestAllocs: a frame costs no allocation once its slot has held one as long.
func TestAllocs(t *testing.T) {
	ours, guest := Pair(Options{})
	defer func() { require.NoError(t, ours.Close()) }()
	defer func() { require.NoError(t, guest.Close()) }()
	out := []datapath.Frame{{Segs: [][]byte{make([]byte, 54), make([]byte, 1460)}, N: 1514}}
	in := make([]datapath.Frame, 1)
	lent := [][]byte{make([]byte, 128), make([]byte, datapath.MaxFrame)}
	get := func(int) [][]byte { return lent }
	cross := func() {
		if n, err := ours.QueuePairs()[0].WriteBatch(out); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if n, err := guest.QueuePairs()[0].ReadBatch(in, get); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	for range 256 {
		cross() // once round the ring
	}
	assert.Zero(t, testing.AllocsPerRun(1000, cross))
}
