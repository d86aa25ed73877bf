package netstack

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// tracedDrops returns how many packets of a stream say each reason, how many say
// none, and how many reasons stand without a frame.
func tracedDrops(t *testing.T, stream io.Reader) (drops map[string]uint64, others, frameless int) {
	t.Helper()
	drops = make(map[string]uint64)
	r := trace.NewBlockReader(stream)
	var interfaces []trace.Interface
	for {
		b, err := r.Next()
		if err == io.EOF {
			return drops, others, frameless
		}
		require.NoError(t, err)
		switch b.Kind {
		case trace.BlockInterface:
			i, err := b.Interface()
			require.NoError(t, err)
			interfaces = append(interfaces, i)
		case trace.BlockPacket:
			p, err := b.Packet()
			require.NoError(t, err)
			why := ""
			for _, c := range p.Comments {
				if rest, ok := strings.CutPrefix(c, "drop "); ok {
					why = rest
				}
			}
			if interfaces[p.Interface].Text {
				frameless++
			}
			if why == "" {
				others++
			} else {
				drops[why]++
			}
		}
	}
}

// TestTracedDrops: whatever the stack drops, of mutated frames and of what a
// guest takes no more of, stands in the trace with its reason, once (C-50).
func TestTracedDrops(t *testing.T) {
	datapathtest.Leaks(t)
	tracer := trace.New(trace.Options{})
	ours, theirs := memory.Pair(memory.Options{ToGuest: everyOffload, FromGuest: everyOffload})
	att, err := tracer.Wrap("vm", ours)
	require.NoError(t, err)
	all, err := tracer.Open(trace.ReaderOptions{Snap: 128})
	require.NoError(t, err)
	dropsOnly, err := tracer.Open(trace.ReaderOptions{Snap: 128, Drops: true})
	require.NoError(t, err)
	g := newRawGuestAt(t, att, theirs)
	g.settle()

	rng := rand.New(rand.NewPCG(3, 4))
	good := g.udpFrame(netip.AddrPortFrom(guestAddr.Addr(), 1000), netip.AddrPortFrom(hostAddr.Addr(), 80), []byte("hello"))
	const sent = 4000
	for i := range sent {
		b := bytes.Clone(good)
		for range rng.IntN(3) {
			b[rng.IntN(40)] ^= 1 << rng.IntN(8)
		}
		var hdr virtio.NetHdr
		if rng.IntN(4) == 0 {
			hdr = virtio.NetHdr{Flags: uint8(rng.IntN(3)), GSOType: uint8(rng.IntN(7)), CSumStart: uint16(rng.IntN(60)), CSumOffset: uint16(rng.IntN(20))}
		}
		g.send(b[:14+rng.IntN(len(b)-13)], hdr)
		if i%500 == 0 {
			g.settle()
		}
	}
	g.settle()
	stats := g.host.Stats().Link
	require.Zero(t, stats.Drops(datapath.DropQueueFull))
	require.NoError(t, g.host.Close())
	all.Close()
	dropsOnly.Close()
	var one, two bytes.Buffer
	require.NoError(t, all.Stream(context.Background(), &one, nil))
	require.NoError(t, dropsOnly.Stream(context.Background(), &two, nil))
	require.Zero(t, all.Lost())

	want := stats.AllDrops()
	require.Greater(t, len(want), 5, "%v", want)
	got, others, frameless := tracedDrops(t, &one)
	assert.Equal(t, want, got)
	assert.Zero(t, frameless)
	dropped := uint64(0)
	for _, n := range want {
		dropped += n
	}
	assert.EqualValues(t, stats.FromGuest.Frames.Load()+stats.ToGuest.Frames.Load()-dropped, others)
	got, others, _ = tracedDrops(t, &two)
	assert.Equal(t, want, got)
	assert.Zero(t, others)
}

// TestTracedOverflow: of what a guest takes no more of as well.
func TestTracedOverflow(t *testing.T) {
	datapathtest.Leaks(t)
	tracer := trace.New(trace.Options{})
	ours, theirs := memory.Pair(memory.Options{Depth: 1})
	defer theirs.Close()
	att, err := tracer.Wrap("vm", ours)
	require.NoError(t, err)
	r, err := tracer.Open(trace.ReaderOptions{Drops: true})
	require.NoError(t, err)
	host, err := New(att, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"})
	require.NoError(t, err)
	for range maxBacklog + 8 {
		host.link.sendARP(header.ARPRequest, header.EthernetBroadcastAddress, guestAddr.Addr())
	}
	require.NoError(t, host.Close())
	r.Close()
	var out bytes.Buffer
	require.NoError(t, r.Stream(context.Background(), &out, nil))
	got, others, _ := tracedDrops(t, &out)
	assert.Equal(t, map[string]uint64{"queue-full": 7}, got)
	assert.Zero(t, others)
}
