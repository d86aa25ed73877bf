package netstack

import (
	"sync"
	"sync/atomic"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/promoted"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// gsoMaxSize is the longest IP packet the stack hands down: IPv4's total
// length field holds no more.
const gsoMaxSize = 65535

// A linkEndpoint is gVisor's link endpoint over one attachment: the gateway's
// NIC on the guest's link.
type linkEndpoint struct {
	att    datapath.Attachment
	stats  *datapath.Stats
	offer  virtio.Offloads // what the guest was told it may send
	gso    stack.SupportedGSO
	rxCSum bool // frames say whether their checksum is good
	txCSum bool // the guest takes partial checksums
	uso    bool // the guest takes super-frames of datagrams
	mac    tcpip.LinkAddress
	mtu    uint32
	// maxPlain is the longest datagram that goes in one frame.
	maxPlain int
	filter   *filter
	neigh    *neighbour
	out      []*outbound
	onEnd    func(error) // called once, with what ended the attachment
	endOnce  sync.Once
	elapsed  func() int64 // monotonic nanoseconds

	udp      udpTable
	udpID    atomic.Uint32 // the next packet's identification (RFC 791), in its low half
	inlined  inlined
	promoted *promoted.Table // nil where flows are gVisor's
	driven   *driven         // nil where inbounds have goroutines
	runner   *runner

	lastFrame atomic.Int64 // when a frame last came, by elapsed; 0 never

	mu         sync.Mutex
	dispatcher stack.NetworkDispatcher
	wg         sync.WaitGroup // inbound and outbound goroutines
}

var (
	_ stack.LinkEndpoint       = (*linkEndpoint)(nil)
	_ stack.GSOEndpoint        = (*linkEndpoint)(nil)
	_ stack.QueueingDiscipline = (*linkEndpoint)(nil)
)

func newLinkEndpoint(att datapath.Attachment, o Options, elapsed func() int64, onEnd func(error)) *linkEndpoint {
	info := att.Info()
	l := &linkEndpoint{
		att:      att,
		stats:    att.Stats(),
		offer:    info.FromGuest,
		rxCSum:   info.FromGuest.Has(virtio.OffloadCSum),
		txCSum:   info.ToGuest.Has(virtio.OffloadCSum),
		uso:      info.ToGuest.Has(virtio.OffloadCSum | virtio.OffloadUSO4),
		mac:      tcpip.LinkAddress(o.MAC[:]),
		mtu:      uint32(o.MTU),
		maxPlain: min(o.MTU, gsoMaxSize) - header.IPv4MinimumSize - header.UDPMinimumSize,
		onEnd:    onEnd,
		elapsed:  elapsed,
	}
	// Without a virtio-net header, or when the guest takes no super-frames, the
	// stack cuts segments itself; the work above TCP is still done once for many.
	l.gso = stack.GVisorGSOSupported
	if info.ToGuest.Has(virtio.OffloadCSum | virtio.OffloadTSO4) {
		l.gso = stack.HostGSOSupported
	}
	l.filter = newFilter(o)
	l.neigh = newNeighbour(o, l.sendARP)
	for _, qp := range att.QueuePairs() {
		l.out = append(l.out, newOutbound(qp, l.stats))
	}
	return l
}

// WritePacket is where gVisor hands over a packet, in its queueing discipline's
// place: the packets of one flow take one queue pair.
func (l *linkEndpoint) WritePacket(pkt *stack.PacketBuffer) tcpip.Error {
	l.out[pkt.Hash%uint32(len(l.out))].send(pkt)
	return nil
}

// WritePackets is not on the path of packets, since WritePacket stands in for
// the discipline that would call it.
func (l *linkEndpoint) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for _, pkt := range pkts.AsSlice() {
		l.WritePacket(pkt)
	}
	return pkts.Len(), nil
}

// AddHeader prepends the Ethernet header. Everything goes to the node: it is
// the link's only neighbour.
func (l *linkEndpoint) AddHeader(pkt *stack.PacketBuffer) {
	node := l.neigh.mac()
	header.Ethernet(pkt.LinkHeader().Push(header.EthernetMinimumSize)).Encode(&header.EthernetFields{
		SrcAddr: l.mac,
		DstAddr: node,
		Type:    pkt.NetworkProtocolNumber,
	})
}

// Attach starts the goroutines that read frames; a nil dispatcher is the NIC's
// removal, which closes the attachment and so ends them.
func (l *linkEndpoint) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dispatcher = d
	if d == nil {
		l.att.Close()
		return
	}
	for i, qp := range l.att.QueuePairs() {
		in := newInbound(l, qp, d)
		if !in.drive() {
			l.wg.Go(in.run)
		}
		l.wg.Go(l.out[i].run)
	}
}

// end says what ended the attachment, once.
func (l *linkEndpoint) end(err error) {
	l.endOnce.Do(func() {
		for _, o := range l.out {
			o.stop()
		}
		l.onEnd(err)
	})
}

// The rest describes the link to gVisor.

func (l *linkEndpoint) Capabilities() stack.LinkEndpointCapabilities {
	if l.rxCSum {
		// inbound verifies what the guest did not mark, because gVisor cannot be
		// told of one packet at a time.
		return stack.CapabilityRXChecksumOffload
	}
	return 0
}

func (l *linkEndpoint) GSOMaxSize() uint32                      { return gsoMaxSize }
func (l *linkEndpoint) SupportedGSO() stack.SupportedGSO        { return l.gso }
func (l *linkEndpoint) MTU() uint32                             { return l.mtu }
func (l *linkEndpoint) SetMTU(uint32)                           {}
func (l *linkEndpoint) MaxHeaderLength() uint16                 { return header.EthernetMinimumSize }
func (l *linkEndpoint) LinkAddress() tcpip.LinkAddress          { return l.mac }
func (l *linkEndpoint) SetLinkAddress(tcpip.LinkAddress)        {}
func (l *linkEndpoint) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }
func (l *linkEndpoint) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (l *linkEndpoint) SetOnCloseAction(func())                 {}
func (l *linkEndpoint) Close()                                  { l.att.Close() }

func (l *linkEndpoint) IsAttached() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dispatcher != nil
}

func (l *linkEndpoint) Wait() {
	for _, o := range l.out {
		o.stop()
	}
	l.wg.Wait()
	if l.driven != nil {
		l.driven.stop() // the loop has ended
	}
}
