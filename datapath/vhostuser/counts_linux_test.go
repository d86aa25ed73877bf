package vhostuser

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// of returns what the first pair has counted in one direction.
func of(t *testing.T, a datapath.Attachment, toGuest bool) datapath.Queue {
	t.Helper()
	for _, q := range a.Stats().Queues() {
		if q.Pair == 0 && q.ToGuest == toGuest {
			return q
		}
	}
	require.FailNow(t, "it has counted nothing")
	return datapath.Queue{}
}

// TestCallsCounted: a batch that the driver wants to be told of is a call, another
// is not, and which frames leave something to their receiver is seen.
func TestCallsCounted(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	mustWrite(t, a, frame(60, 1)) // the first one calls in any case
	assert.Equal(t, datapath.Queue{ToGuest: true, Calls: 1}, of(t, a, true))
	v.rx[0].DisableCalls()
	mustWrite(t, a, frame(60, 2), frame(60, 3))
	mustWrite(t, a, frame(13, 4)) // dropped: the driver is shown nothing
	assert.Equal(t, datapath.Queue{ToGuest: true, Calls: 1, Quiet: 1}, of(t, a, true))
	for range 3 {
		v.mustRecv(t)
	}
	v.rx[0].EnableCalls()

	partial := virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 34, CSumOffset: 16}
	super := partial
	super.GSOType, super.GSOSize, super.HdrLen = virtio.GSOTCPv4, 50, 54
	var batch []datapath.Frame
	for _, hdr := range []virtio.NetHdr{partial, super, super, {}} {
		require.NoError(t, v.tx[0].Add(hdr, frame(150, 5)))
		batch = append(batch, datapath.Frame{Hdr: hdr, Segs: [][]byte{frame(150, 5)}, N: 150})
	}
	v.tx[0].Publish()
	n, err := a.QueuePairs()[0].WriteBatch(batch)
	require.NoError(t, err)
	require.Len(t, batch, n)
	assert.Equal(t, datapath.Queue{ToGuest: true, Calls: 2, Quiet: 1, Partial: 1, Super: 2}, of(t, a, true))
	mustRead(t, a, 4)
	from := of(t, a, false)
	assert.EqualValues(t, 1, from.Partial)
	assert.EqualValues(t, 2, from.Super)
}

// TestKicksCounted: a reader that waits is kicked, one without a kick looks.
func TestKicksCounted(t *testing.T) {
	datapathtest.Leaks(t)
	for name, noKick := range map[string]bool{"kicked": false, "polled": true} {
		t.Run(name, func(t *testing.T) {
			cfg := plain()
			cfg.noKick = noKick
			_, a, v := mustOpen(t, cfg)
			seen := func(q datapath.Queue) (bool, uint64) {
				if noKick {
					assert.Zero(t, q.Kicks)
					return q.Polls > 0, q.Polls
				}
				return q.Kicks > 0, q.Kicks + q.Polls
			}
			// A frame may come before its reader waits, so there are some.
			sent := uint64(0)
			require.Eventually(t, func() bool {
				read := make(chan struct{})
				go func() {
					defer close(read)
					mustRead(t, a, 1)
				}()
				time.Sleep(time.Millisecond)
				v.send(t, frame(60, 1))
				sent++
				<-read
				found, n := seen(of(t, a, false))
				assert.LessOrEqual(t, n, sent, "each frame was found once")
				return found
			}, patience, time.Millisecond)

			// So does a writer that waits for room.
			require.Zero(t, of(t, a, true).Kicks)
			taken := 0
			for n := 1; n == 1; taken += n {
				var err error
				n, err = write(a, frame(1514, 2))
				require.NoError(t, err)
			}
			for range taken {
				v.mustRecv(t) // posts buffers
			}
			require.Eventually(t, func() bool { found, _ := seen(of(t, a, true)); return found }, patience, time.Millisecond)
		})
	}
}

// TestCountsBeginAnew with each attachment, and nobody reads another's.
func TestCountsBeginAnew(t *testing.T) {
	datapathtest.Leaks(t)
	l, a, v := mustOpen(t, plain())
	for seq := range uint32(5) {
		exchange(t, a, v, seq)
	}
	assert.NotEmpty(t, a.Stats().Queues())
	require.NoError(t, a.Close())
	assert.Nil(t, a.Stats().Queues())
	next := mustAccept(t, l)
	assert.Equal(t, datapath.Queue{ToGuest: true}, of(t, next, true))
	assert.Equal(t, datapath.Queue{}, of(t, next, false))
	assert.Nil(t, a.Stats().Queues())
}

// TestCountsAreReadInTraffic: reading them disturbs nobody.
func TestCountsAreReadInTraffic(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	done, reading := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(reading)
		for {
			select {
			case <-done:
				return
			default:
				a.Stats().Queues()
			}
		}
	}()
	for seq := range uint32(500) {
		exchange(t, a, v, seq)
	}
	close(done)
	<-reading
}
