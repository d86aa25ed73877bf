package netstack

import (
	"bytes"
	"context"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// A rawGuest is the guest's end of a link that speaks frames, byte by byte.
type rawGuest struct {
	t    testing.TB
	host *Stack
	att  datapath.Attachment
	mac  tcpip.LinkAddress
	got  chan []byte
}

func newRawGuest(t testing.TB, o memory.Options) *rawGuest {
	t.Helper()
	ours, theirs := memory.Pair(o)
	return newRawGuestAt(t, ours, theirs)
}

// newRawGuestAt is newRawGuest at the ends of a link that is there.
func newRawGuestAt(t testing.TB, ours, theirs datapath.Attachment) *rawGuest {
	t.Helper()
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"})
	require.NoError(t, err)
	g := &rawGuest{t: t, host: host, att: theirs, mac: "\x02\x00\x00\x00\x00\x02", got: make(chan []byte, 1024)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		frames := make([]datapath.Frame, 1)
		for {
			n, err := theirs.QueuePairs()[0].ReadBatch(frames, func(int) [][]byte { return [][]byte{make([]byte, datapath.MaxFrame)} })
			if err != nil {
				return
			}
			for _, f := range frames[:n] {
				select {
				case g.got <- f.Segs[0][:f.N]:
				default:
				}
			}
		}
	}()
	t.Cleanup(func() {
		assert.NoError(t, host.Close())
		_ = theirs.Close()
		<-done
	})
	return g
}

// send hands a frame to the host and waits until it has been taken.
func (g *rawGuest) send(frame []byte, hdr virtio.NetHdr) {
	f := [1]datapath.Frame{{Hdr: hdr, Segs: [][]byte{frame}, N: len(frame)}}
	for {
		n, err := g.att.QueuePairs()[0].WriteBatch(f[:])
		require.NoError(g.t, err)
		if n == 1 {
			return
		}
		<-g.att.QueuePairs()[0].Room()
	}
}

func (g *rawGuest) arp(op header.ARPOp, senderMAC tcpip.LinkAddress, sender, target netip.Addr) {
	b := arpFrame(op, senderMAC, sender, header.EthernetBroadcastAddress, target)
	g.send(b, virtio.NetHdr{})
}

// quiet asserts that the host sends nothing in answer to what it was sent: it
// asks something it must answer, and takes that for the end.
func (g *rawGuest) quiet() {
	g.t.Helper()
	answers := g.settle()
	assert.Empty(g.t, answers, "answers that were not ours to give")
}

// settle returns what the host has sent until it answered an ARP request.
func (g *rawGuest) settle() (frames [][]byte) {
	g.t.Helper()
	g.arp(header.ARPRequest, g.mac, guestAddr.Addr(), hostAddr.Addr())
	for {
		select {
		case b := <-g.got:
			if etherType(b) == header.ARPProtocolNumber && header.ARP(b[14:]).Op() == header.ARPReply {
				assert.Equal(g.t, hostAddr.Addr().AsSlice(), header.ARP(b[14:]).ProtocolAddressSender())
				return frames
			}
			frames = append(frames, b)
		case <-time.After(5 * time.Second):
			g.t.Fatal("the gateway no longer answers")
		}
	}
}

// udpFrame builds an Ethernet frame with a UDP datagram in IPv4.
func (g *rawGuest) udpFrame(src, dst netip.AddrPort, payload []byte) []byte {
	b := make([]byte, 14+20+8+len(payload))
	header.Ethernet(b).Encode(&header.EthernetFields{SrcAddr: g.mac, DstAddr: g.host.link.mac, Type: header.IPv4ProtocolNumber})
	ip := header.IPv4(b[14:])
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(b) - 14), TTL: 64, Protocol: uint8(header.UDPProtocolNumber),
		SrcAddr: address(src.Addr()), DstAddr: address(dst.Addr()),
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	u := header.UDP(b[34:])
	u.Encode(&header.UDPFields{SrcPort: src.Port(), DstPort: dst.Port(), Length: uint16(8 + len(payload))})
	copy(b[42:], payload)
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, ip.SourceAddress(), ip.DestinationAddress(), u.Length())
	u.SetChecksum(^u.CalculateChecksum(checksum.Combine(sum, checksum.Checksum(payload, 0))))
	return b
}

// TestFB152_ARPForOwnAddressOnly asks for every address of the link (C-49).
func TestFB152_ARPForOwnAddressOnly(t *testing.T) {
	g := newRawGuest(t, memory.Options{})
	a := netip.MustParseAddr("198.18.0.0")
	for range 256 {
		if a != hostAddr.Addr() {
			g.arp(header.ARPRequest, g.mac, guestAddr.Addr(), a)
		}
		a = a.Next()
	}
	g.arp(header.ARPRequest, g.mac, netip.IPv4Unspecified(), guestAddr.Addr()) // RFC 5227 probe for its own
	g.quiet()
}

// TestFB154_Poisoning claims the gateway's address and speaks for others.
func TestFB154_Poisoning(t *testing.T) {
	g := newRawGuest(t, memory.Options{})
	g.settle()
	g.arp(header.ARPReply, g.mac, hostAddr.Addr(), hostAddr.Addr())
	g.arp(header.ARPRequest, g.mac, hostAddr.Addr(), hostAddr.Addr())
	g.quiet()
	assert.EqualValues(t, 2, g.host.Stats().Link.Drops(datapath.DropSpoofed))
	// Addresses a NIC cannot have are not believed.
	for _, mac := range []tcpip.LinkAddress{"\xff\xff\xff\xff\xff\xff", "\x00\x00\x00\x00\x00\x00", "\x01\x00\x5e\x00\x00\x01", g.host.link.mac} {
		g.arp(header.ARPReply, mac, guestAddr.Addr(), hostAddr.Addr())
	}
	g.settle()
	assert.Equal(t, g.mac, g.host.link.neigh.mac())
	// A new NIC with the node's address is believed at once (FB-124).
	g.mac = "\x02\x00\x00\x00\x00\x03"
	g.settle()
	assert.Equal(t, g.mac, g.host.link.neigh.mac())
}

// TestC48_NothingReached dials the host's loopback and foreign addresses
// through the link, and speaks from foreign ones.
func TestC48_NothingReached(t *testing.T) {
	g := newRawGuest(t, memory.Options{})
	g.settle()
	node := netip.AddrPortFrom(guestAddr.Addr(), 1000)
	for _, dst := range []string{"127.0.0.1:80", "0.0.0.0:80", "255.255.255.255:67", "224.0.0.251:5353", "239.255.255.250:1900", "198.18.0.255:80", "10.0.0.1:80"} {
		g.send(g.udpFrame(node, netip.MustParseAddrPort(dst), []byte("x")), virtio.NetHdr{})
	}
	assert.Empty(t, g.settle())
	assert.EqualValues(t, 7, g.host.Stats().Link.Drops(datapath.DropUnwanted))
	own := netip.AddrPortFrom(hostAddr.Addr(), 80)
	for _, src := range []string{"127.0.0.1:80", "198.18.0.77:80", "8.8.8.8:53", "0.0.0.0:1"} {
		g.send(g.udpFrame(netip.MustParseAddrPort(src), own, []byte("x")), virtio.NetHdr{})
	}
	g.send(g.udpFrame(own, own, []byte("x")), virtio.NetHdr{})
	assert.Empty(t, g.settle())
	assert.EqualValues(t, 4, g.host.Stats().Link.Drops(datapath.DropForeign))
	assert.EqualValues(t, 1, g.host.Stats().Link.Drops(datapath.DropSpoofed))
	// To the gateway itself the node is told that nobody is there.
	g.send(g.udpFrame(node, own, []byte("x")), virtio.NetHdr{})
	answers := g.settle()
	require.Len(t, answers, 1)
	assert.EqualValues(t, header.ICMPv4ProtocolNumber, header.IPv4(answers[0][14:]).Protocol())
}

// TestC47_ChecksumsAndHeaders sends frames whose header lies.
func TestC47_ChecksumsAndHeaders(t *testing.T) {
	g := newRawGuest(t, memory.Options{ToGuest: everyOffload, FromGuest: everyOffload})
	g.settle()
	own, node := netip.AddrPortFrom(hostAddr.Addr(), 80), netip.AddrPortFrom(guestAddr.Addr(), 1000)
	stats := g.host.Stats().Link
	good := g.udpFrame(node, own, []byte("hello"))
	send := func(reason datapath.DropReason, hdr virtio.NetHdr, edit func(b []byte)) {
		t.Helper()
		before := stats.Drops(reason)
		b := bytes.Clone(good)
		if edit != nil {
			edit(b)
		}
		g.send(b, hdr)
		assert.Empty(t, g.settle())
		assert.Equal(t, before+1, stats.Drops(reason), reason)
	}
	send(datapath.DropBadChecksum, virtio.NetHdr{}, func(b []byte) { b[45] ^= 1 })
	send(datapath.DropBadChecksum, virtio.NetHdr{}, func(b []byte) { b[22]-- }) // TTL
	send(datapath.DropBadHeader, virtio.NetHdr{}, func(b []byte) { b[14] = 0x41 })
	send(datapath.DropBadHeader, virtio.NetHdr{}, func(b []byte) { b[16] = 0xff }) // total length
	send(datapath.DropBadHeader, virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 60000, CSumOffset: 6}, nil)
	send(datapath.DropBadHeader, virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 20, CSumOffset: 6}, nil)
	send(datapath.DropNotOffered, virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 34, CSumOffset: 6, GSOType: virtio.GSOTCPv6, GSOSize: 1448}, nil)
	send(datapath.DropBadHeader, virtio.NetHdr{GSOType: virtio.GSOTCPv4}, nil)
	for _, n := range []int{14, 33} {
		before := stats.Drops(datapath.DropTooShort)
		g.send(good[:n], virtio.NetHdr{})
		assert.Empty(t, g.settle())
		assert.Equal(t, before+1, stats.Drops(datapath.DropTooShort))
	}
	// A partial checksum in its right place is taken, whatever the sum.
	b := bytes.Clone(good)
	b[40], b[41] = 0, 1
	g.send(b, virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 34, CSumOffset: 6})
	assert.Len(t, g.settle(), 1, "port unreachable")
}

// TestFB151_TooLong sends a whole packet beyond the MTU.
func TestFB151_TooLong(t *testing.T) {
	g := newRawGuest(t, memory.Options{})
	b := g.udpFrame(netip.AddrPortFrom(guestAddr.Addr(), 1), netip.AddrPortFrom(hostAddr.Addr(), 2), make([]byte, 8000))
	g.send(b, virtio.NetHdr{})
	g.quiet()
	assert.EqualValues(t, 1, g.host.Stats().Link.Drops(datapath.DropTooLong))
}

// TestFB148_Mutations feeds mutated frames and headers, seeded, and checks that
// the gateway lives on with flat memory.
func TestFB148_Mutations(t *testing.T) {
	datapathtest.Leaks(t)
	g := newRawGuest(t, memory.Options{ToGuest: everyOffload, FromGuest: everyOffload})
	g.settle()
	rng := rand.New(rand.NewPCG(1, 2))
	own, node := netip.AddrPortFrom(hostAddr.Addr(), 80), netip.AddrPortFrom(guestAddr.Addr(), 1000)
	seeds := [][]byte{
		g.udpFrame(node, own, make([]byte, 100)),
		g.udpFrame(node, own, make([]byte, 1400)),
		arpFrame(header.ARPRequest, g.mac, guestAddr.Addr(), header.EthernetBroadcastAddress, hostAddr.Addr()),
	}
	tcp := bytes.Clone(seeds[0])
	tcp[23] = uint8(header.TCPProtocolNumber)
	seeds = append(seeds, tcp)
	runtime.GC()
	for range 20000 {
		b := bytes.Clone(seeds[rng.IntN(len(seeds))])
		for range rng.IntN(6) {
			b[rng.IntN(min(len(b), 80))] = byte(rng.Uint32())
		}
		b = b[:rng.IntN(len(b)+1)]
		if len(b) == 0 {
			continue
		}
		var h virtio.NetHdr
		if rng.IntN(2) == 0 {
			h = virtio.NetHdr{
				Flags: uint8(rng.IntN(4)), GSOType: []uint8{0, 0, 1, 3, 4, 5, 0x81, 0xff}[rng.IntN(8)],
				HdrLen: uint16(rng.IntN(200)), GSOSize: uint16(rng.IntN(2000)),
				CSumStart: uint16(rng.IntN(100)), CSumOffset: uint16(rng.IntN(20)),
			}
		}
		g.send(b, h)
	}
	// MAC and addresses may have been learnt anew from the noise; the node
	// itself is heard all the same.
	g.settle()
}

// TestC47_NoRoom floods the host from a guest that takes no frames: what waits
// is bounded and the rest is counted.
func TestC47_NoRoom(t *testing.T) {
	ours, theirs := memory.Pair(memory.Options{Depth: 8})
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"})
	require.NoError(t, err)
	defer host.Close()
	g := &rawGuest{t: t, host: host, att: theirs, mac: "\x02\x00\x00\x00\x00\x02"}
	ping := g.udpFrame(netip.AddrPortFrom(guestAddr.Addr(), 1), netip.AddrPortFrom(hostAddr.Addr(), 9), []byte("x"))
	g.arp(header.ARPRequest, g.mac, guestAddr.Addr(), hostAddr.Addr())
	conns := make([]interface{ Close() error }, 0)
	for range 3000 {
		g.send(ping, virtio.NetHdr{})
		c, err := host.DialUDP(netip.AddrPortFrom(guestAddr.Addr(), 9))
		require.NoError(t, err)
		_, _ = c.Write([][]byte{[]byte("y")})
		conns = append(conns, c)
	}
	o := host.link.out[0]
	o.mu.Lock()
	assert.LessOrEqual(t, len(o.waiting), maxBacklog)
	o.mu.Unlock()
	assert.Positive(t, host.Stats().Link.Drops(datapath.DropQueueFull))
	for _, c := range conns {
		_ = c.Close()
	}
	_, err = host.DialTCP(expired(t), netip.AddrPortFrom(guestAddr.Addr(), 9))
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	_ = theirs.Close()
}

func expired(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// TestProbeHearsTraffic: a guest that is too busy to answer ARP, and sends
// packets of its flows, is there.
func TestProbeHearsTraffic(t *testing.T) {
	g := newRawGuest(t, memory.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := g.host.Probe(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	g.settle() // the node is known now
	answered := make(chan error, 1)
	go func() {
		_, err := g.host.Probe(t.Context())
		answered <- err
	}()
	frame := g.udpFrame(netip.AddrPortFrom(guestAddr.Addr(), 1), netip.AddrPortFrom(hostAddr.Addr(), 2), []byte("x"))
	for {
		g.send(frame, virtio.NetHdr{})
		select {
		case err := <-answered:
			require.NoError(t, err)
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// TestC47_SmallFrameHoldsNoLongOnesMemory: on a transport that knows lengths, a
// long frame that is dropped leaves its loan to the next, small one, which must
// not keep it.
func TestC47_SmallFrameHoldsNoLongOnesMemory(t *testing.T) {
	g := newRawGuest(t, memory.Options{})
	in := newInbound(g.host.link, nil, &sink{})
	defer in.release()
	for _, n := range []int{headSize + 1, 1000, 20000} {
		in.lent = 0
		in.lend(65000) // of a frame that was dropped
		in.lent = 0
		in.lend(headSize + n)
		kept := in.loans[0].keepBody(n)
		assert.LessOrEqual(t, kept.Capacity(), max(2*n, 64), "what %d bytes hold", n)
		kept.Release()
	}
}

// TestFB142_ForgedPacketTooBig: a claim that the path takes next to nothing is
// dropped, one that a path can have is not.
func TestFB142_ForgedPacketTooBig(t *testing.T) {
	g := newRawGuest(t, memory.Options{})
	g.settle()
	own, node := netip.AddrPortFrom(hostAddr.Addr(), 80), netip.AddrPortFrom(guestAddr.Addr(), 1000)
	for mtu, dropped := range map[uint16]uint64{0: 1, 68: 1, 575: 1, 576: 0, 1280: 0} {
		before := g.host.Stats().Link.Drops(datapath.DropBadHeader)
		b := g.udpFrame(node, own, make([]byte, 28))
		b[23] = uint8(header.ICMPv4ProtocolNumber)
		icmp := b[34:]
		icmp[0], icmp[1], icmp[6], icmp[7] = 3, 4, byte(mtu>>8), byte(mtu)
		ip := header.IPv4(b[14:])
		ip.SetChecksum(0)
		ip.SetChecksum(^ip.CalculateChecksum())
		g.send(b, virtio.NetHdr{})
		g.settle()
		assert.Equal(t, before+dropped, g.host.Stats().Link.Drops(datapath.DropBadHeader), "MTU %d", mtu)
	}
}
