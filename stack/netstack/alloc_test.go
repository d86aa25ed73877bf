package netstack

import (
	"net/netip"
	"testing"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/stretchr/testify/assert"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// A countingPair takes every frame and hands out the same ones.
type countingPair struct {
	datapath.QueuePair
	written int
}

func (p *countingPair) WriteBatch(frames []datapath.Frame) (int, error) {
	p.written += len(frames)
	return len(frames), nil
}

// A sink is a dispatcher that lets packets go.
type sink struct{ packets int }

func (s *sink) DeliverNetworkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) { s.packets++ }
func (s *sink) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer)    {}

// TestAllocsOutbound: handing a packet to the guest allocates nothing.
func TestAllocsOutbound(t *testing.T) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, whose sync.Pool drops at random")
	}
	qp := &countingPair{}
	o := newOutbound(qp, &datapath.Stats{})
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: 66, Payload: buffer.MakeWithData(make([]byte, 60000)),
	})
	defer pkt.DecRef()
	pkt.TransportHeader().Push(32)
	pkt.NetworkHeader().Push(20)
	pkt.LinkHeader().Push(14)
	pkt.GSOOptions = stack.GSO{Type: stack.GSOTCPv4, NeedsCsum: true, CsumOffset: 16, MSS: 1448, L3HdrLen: 20}
	assert.Zero(t, testing.AllocsPerRun(1000, func() { o.send(pkt) }))
	assert.Positive(t, qp.written)
}

// TestAllocsInbound: taking a frame, small or super, up to gVisor's door
// allocates nothing.
func TestAllocsInbound(t *testing.T) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, whose sync.Pool drops at random")
	}
	g := newRawGuest(t, offloads["csum+tso"])
	small := g.udpFrame(netip.AddrPortFrom(guestAddr.Addr(), 1), netip.AddrPortFrom(hostAddr.Addr(), 2), make([]byte, 20))
	long := g.udpFrame(netip.AddrPortFrom(guestAddr.Addr(), 1), netip.AddrPortFrom(hostAddr.Addr(), 2), make([]byte, 1400))
	super := make([]byte, 60000)
	copy(super, long)
	header.IPv4(super[14:]).SetTotalLength(uint16(len(super) - 14))
	header.IPv4(super[14:]).SetChecksum(0)
	header.IPv4(super[14:]).SetChecksum(^header.IPv4(super[14:]).CalculateChecksum())
	for name, frame := range map[string][]byte{"small": small, "long": long, "super": super} {
		t.Run(name, func(t *testing.T) {
			s := &sink{}
			in := newInbound(g.host.link, nil, s)
			defer in.release()
			f := datapath.Frame{N: len(frame), Hdr: virtio.NetHdr{Flags: virtio.FlagDataValid}}
			if len(frame) > 1500 {
				f.Hdr = virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 34, CSumOffset: 6, GSOType: virtio.GSOTCPv4, GSOSize: 1448}
			}
			assert.Zero(t, testing.AllocsPerRun(1000, func() {
				in.lent = 0
				f.Segs = in.lend(0)
				n := copy(f.Segs[0], frame)
				copy(f.Segs[1], frame[n:])
				in.take(&f, &in.loans[0])
			}))
			assert.Positive(t, s.packets, g.host.Stats().Link.AllDrops())
		})
	}
}
