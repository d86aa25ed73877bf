package netstack

import (
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// TestStalled: a link is stalled from the first packet that waits, anew from each
// that the guest takes, and no more when it has them all.
func TestStalled(t *testing.T) {
	ours, guest := memory.Pair(memory.Options{Depth: 2})
	defer guest.Close()
	defer ours.Close()
	o := newOutbound(ours.QueuePairs()[0], ours.Stats())
	send := func() {
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(make([]byte, 60))})
		o.send(pkt)
		pkt.DecRef()
	}
	read := func(n int) {
		frames := make([]datapath.Frame, n)
		got, err := guest.QueuePairs()[0].ReadBatch(frames, func(n int) [][]byte { return [][]byte{make([]byte, n)} })
		require.NoError(t, err)
		require.Equal(t, n, got)
	}
	send()
	send()
	assert.Zero(t, o.stalled(), "they are in the queue")
	send()
	send()
	since := o.stuck.Load()
	assert.Positive(t, since)
	time.Sleep(time.Millisecond)
	first := o.stalled()
	assert.GreaterOrEqual(t, first, time.Millisecond)
	o.drain()
	assert.Equal(t, since, o.stuck.Load(), "the guest has taken none")
	read(1)
	o.drain()
	assert.Greater(t, o.stuck.Load(), since, "it has taken one, and one waits")
	read(2)
	o.drain()
	assert.Zero(t, o.stalled())

	send()
	send()
	require.Positive(t, o.stuck.Load())
	o.drop()
	assert.Zero(t, o.stalled(), "the attachment has ended")
}
