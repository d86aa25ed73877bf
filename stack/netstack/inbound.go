package netstack

import (
	"encoding/binary"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/promoted"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// readBatch is how many frames one ReadBatch may bring.
	readBatch = 32
	// headSize is the first view's length: Ethernet, IPv4 and TCP with all the
	// options that data segments carry (14 + 20 + 32), and one of gVisor's
	// chunk sizes. gVisor clones the chunk its headers lie in, once a packet.
	headSize = 128
	// bodySize holds the rest of the longest frame: 65560 - 128 < 65536.
	bodySize = 64 << 10
	// udpChecksumOffset is where UDP keeps its checksum (RFC 768).
	udpChecksumOffset = 6
	// minFragmentMTU is the least MTU that is believed of a path: what every
	// host takes whole (RFC 791). Less would make crumbs of a flow.
	minFragmentMTU = 576
)

// A loan is the memory lent for one frame.
type loan struct {
	head, body *buffer.View
	segs       [2][]byte
}

// An inbound reads the frames of one queue pair and delivers them to the stack.
type inbound struct {
	link   *linkEndpoint
	qp     datapath.QueuePair
	stack  stack.NetworkDispatcher
	frames [readBatch]datapath.Frame
	loans  [readBatch]loan
	lent   int // of loans, in this batch
	udp    udpRun

	held     *Conn                 // its lock is ours; see inline.go
	promoted *promoted.Batch       // nil where flows are gVisor's
	observer datapath.DropObserver // nil without
}

func newInbound(l *linkEndpoint, qp datapath.QueuePair, d stack.NetworkDispatcher) *inbound {
	observer, _ := qp.(datapath.DropObserver)
	in := &inbound{link: l, qp: qp, stack: d, observer: observer}
	if l.promoted != nil {
		in.promoted = l.promoted.NewBatch()
	}
	return in
}

// run reads until the attachment ends.
func (in *inbound) run() {
	defer in.release()
	get := in.lend
	for {
		in.lent = 0
		n, err := in.qp.ReadBatch(in.frames[:], get)
		if err != nil {
			in.link.end(err)
			return
		}
		in.takeBatch(n)
	}
}

// takeBatch delivers the n frames that were read last, and what follows from them.
func (in *inbound) takeBatch(n int) {
	in.link.runner.enter()
	in.link.lastFrame.Store(in.link.elapsed())
	j := 0
	for i := range n {
		f := &in.frames[i]
		// Loans are used in order; one that a skipped frame had is passed by.
		for j < in.lent && !in.loans[j].holds(f) {
			j++
		}
		if j == in.lent {
			break // not our memory: a transport that breaks its contract
		}
		in.take(f, &in.loans[j])
		j++
	}
	in.udp.end()
	in.settle()
	if in.promoted != nil {
		in.promoted.End()
	}
	in.link.runner.leave()
}

// holds reports whether f lies in l's memory.
func (l *loan) holds(f *datapath.Frame) bool {
	return len(f.Segs) > 0 && len(f.Segs[0]) > 0 && &f.Segs[0][0] == &l.segs[0][0]
}

// lend returns the memory of the batch's next frame, of n bytes or, when n is
// 0, of any length.
func (in *inbound) lend(n int) [][]byte {
	if in.lent == readBatch {
		return nil
	}
	l := &in.loans[in.lent]
	in.lent++
	if l.head == nil {
		l.head = buffer.NewViewSize(headSize)
	}
	l.segs[0] = l.head.AsSlice()
	if n > 0 && n <= headSize {
		return l.segs[:1]
	}
	want := bodySize
	if n > 0 {
		want = n - headSize
	}
	if l.body != nil && l.body.Size() < want {
		l.body.Release()
		l.body = nil
	}
	if l.body == nil {
		l.body = buffer.NewViewSize(want)
	}
	l.segs[1] = l.body.AsSlice()
	return l.segs[:2]
}

// take checks one frame and delivers it, or counts why not.
func (in *inbound) take(f *datapath.Frame, l *loan) {
	link := in.link
	if f.N < header.EthernetMinimumSize {
		in.drop(f, datapath.DropTooShort)
		return
	}
	if err := f.Hdr.Check(f.N, link.offer); err != nil {
		reason := datapath.DropBadHeader
		if err == virtio.ErrNotOffered {
			reason = datapath.DropNotOffered
		}
		in.drop(f, reason)
		return
	}
	head := l.segs[0][:min(f.N, headSize)]
	var body []byte
	if f.N > headSize {
		body = l.segs[1][:f.N-headSize]
	}
	eth := header.Ethernet(head)
	if eth.SourceAddress() == link.mac {
		in.drop(f, datapath.DropSpoofed)
		return
	}
	switch etherType(head) {
	case header.ARPProtocolNumber:
		if !link.neigh.handle(header.ARP(head[header.EthernetMinimumSize:])) {
			in.drop(f, datapath.DropSpoofed)
		}
		return
	case header.IPv4ProtocolNumber:
		if eth.DestinationAddress() != link.mac {
			in.drop(f, datapath.DropUnwanted)
			return
		}
		if reason, ok := in.check4(&f.Hdr, head, body); !ok {
			in.drop(f, reason)
			return
		}
		if link.neigh.known() {
			link.neigh.heard()
		}
		if in.takePromoted(head, body) || in.takeUDP(&f.Hdr, head, body) {
			return
		}
		if f.Hdr.GSOType == virtio.GSOUDPL4 {
			in.drop(f, datapath.DropUnwanted) // many in one, which gVisor would take for one
			return
		}
	default:
		in.drop(f, datapath.DropUnwanted)
		return
	}
	in.holdFlow(head, f.N)
	in.deliver(header.IPv4ProtocolNumber, f.N, l)
	if link.udp.woken.Load() {
		in.udp.flush() // came before
		link.udp.drain()
	}
}

// holdFlow takes the lock of the flow whose segment of n bytes head begins, if it can, and
// settles with the flow before.
func (in *inbound) holdFlow(head []byte, n int) {
	var c *Conn
	ip := header.IPv4(head[header.EthernetMinimumSize:])
	hlen := int(ip.HeaderLength())
	if n <= inlineSegment && ip.TransportProtocol() == header.TCPProtocolNumber && !ip.More() && ip.FragmentOffset() == 0 && len(ip) >= hlen+header.TCPMinimumSize {
		c = in.link.inlined.find(tupleOf(ip, hlen))
	}
	if c == in.held {
		return
	}
	in.settle()
	if c != nil && c.take() {
		in.held = c
	}
}

// settle works on the segments that were delivered to the flow that is held.
func (in *inbound) settle() {
	if c := in.held; c != nil {
		in.held = nil
		c.work()
	}
}

// drop counts a frame that the stack does not get to see, and shows it to who
// traces the link.
func (in *inbound) drop(f *datapath.Frame, why datapath.DropReason) {
	if in.observer == nil {
		in.link.stats.Drop(why)
		return
	}
	in.link.stats.DropShown(why)
	in.observer.DroppedFromGuest(f, why)
}

// check4 checks an IPv4 packet behind its Ethernet header: lengths, addresses,
// and the checksums that nobody vouches for. gVisor checks the rest.
func (in *inbound) check4(h *virtio.NetHdr, head, body []byte) (datapath.DropReason, bool) {
	ip := header.IPv4(head[header.EthernetMinimumSize:])
	total := len(ip) + len(body)
	if len(ip) < header.IPv4MinimumSize {
		return datapath.DropTooShort, false
	}
	hlen := int(ip.HeaderLength())
	if header.IPVersion(ip) != header.IPv4Version || hlen < header.IPv4MinimumSize || hlen > len(ip) ||
		int(ip.TotalLength()) < hlen || int(ip.TotalLength()) > total {
		return datapath.DropBadHeader, false
	}
	if h.GSOType == virtio.GSONone && int(ip.TotalLength()) > int(in.link.mtu) {
		return datapath.DropTooLong, false
	}
	if reason, ok := in.link.filter.check(addrs4(ip)); !ok {
		return reason, false
	}
	if ip.TransportProtocol() == header.ICMPv4ProtocolNumber && ip.FragmentOffset() == 0 {
		if reason, ok := checkICMP(head[min(len(head), header.EthernetMinimumSize+hlen):]); !ok {
			return reason, false
		}
	}
	if !in.link.rxCSum {
		return 0, true // gVisor verifies every one itself
	}
	if !ip.IsChecksumValid() {
		return datapath.DropBadChecksum, false
	}
	if ip.More() || ip.FragmentOffset() != 0 {
		// A fragment's checksum spans its siblings; what is put together again
		// is verified by gVisor, which marks it so. A fragment cannot be partial.
		if h.Flags&virtio.FlagNeedsCSum != 0 {
			return datapath.DropBadHeader, false
		}
		return 0, true
	}
	var at uint16 // where the transport's checksum lies in its header
	switch ip.TransportProtocol() {
	case header.TCPProtocolNumber:
		at = header.TCPChecksumOffset
	case header.UDPProtocolNumber:
		at = udpChecksumOffset
	default:
		return 0, true // ICMP: gVisor verifies its sum whatever the link says
	}
	l4 := header.EthernetMinimumSize + hlen
	if h.Flags&virtio.FlagNeedsCSum != 0 {
		// A partial sum must be this packet's own: we take it as good.
		if int(h.CSumStart) != l4 || h.CSumOffset != at {
			return datapath.DropBadHeader, false
		}
		return 0, true
	}
	if h.Flags&virtio.FlagDataValid != 0 {
		return 0, true
	}
	payload := int(ip.TotalLength()) - hlen
	if payload < int(at)+2 {
		return datapath.DropTooShort, false
	}
	first := head[l4:min(len(head), l4+payload)]
	if !sumValid(ip, first, body[:payload-len(first)]) {
		return datapath.DropBadChecksum, false
	}
	return 0, true
}

// sumValid verifies the checksum of TCP or UDP over a whole packet, which lies in
// two pieces, or reports that the sender made none (UDP, RFC 768).
func sumValid(ip header.IPv4, first, rest []byte) bool {
	if ip.TransportProtocol() == header.UDPProtocolNumber && len(first) >= header.UDPMinimumSize && header.UDP(first).Checksum() == 0 {
		return true
	}
	var sum checksum.Checksumer
	sum.Add(first)
	sum.Add(rest)
	pseudo := header.PseudoHeaderChecksum(ip.TransportProtocol(), ip.SourceAddress(), ip.DestinationAddress(), uint16(len(first)+len(rest)))
	return checksum.Combine(sum.Checksum(), pseudo) == 0xffff
}

// checkICMP drops a claim that a packet was too big for a path that no path has
// (RFC 1191: type 3, code 4, next-hop MTU in the last two of eight bytes; 0 is
// of routers older than that). gVisor verifies the checksum, whatever the link
// says.
func checkICMP(icmp []byte) (datapath.DropReason, bool) {
	if len(icmp) >= 8 && icmp[0] == 3 && icmp[1] == 4 && binary.BigEndian.Uint16(icmp[6:]) < minFragmentMTU {
		return datapath.DropBadHeader, false
	}
	return 0, true
}

// deliver hands the frame of n bytes in l to the stack, which keeps its memory.
func (in *inbound) deliver(proto tcpip.NetworkProtocolNumber, n int, l *loan) {
	head := l.head
	l.head = nil
	if n < headSize {
		head.CapLength(n)
	}
	data := buffer.MakeWithView(head)
	if n > headSize {
		_ = data.Append(l.keepBody(n - headSize)) // fails for a nil view alone
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: data})
	pkt.LinkHeader().Consume(header.EthernetMinimumSize)
	pkt.NetworkProtocolNumber = proto
	in.stack.DeliverNetworkPacket(proto, pkt)
	pkt.DecRef()
}

// keepBody returns a view of the body's first n bytes that the stack may keep: in
// the memory they were read into, unless that is more than twice as much. So a
// byte of payload never holds more than two, and a guest cannot have small
// frames hold the memory lent for a long one that was dropped.
func (l *loan) keepBody(n int) *buffer.View {
	if 2*n <= l.body.Capacity() {
		return buffer.NewViewWithData(l.segs[1][:n])
	}
	body := l.body
	l.body = nil
	body.CapLength(n)
	return body
}

// release frees what was lent last.
func (in *inbound) release() {
	for i := range in.loans {
		l := &in.loans[i]
		if l.head != nil {
			l.head.Release()
		}
		if l.body != nil {
			l.body.Release()
		}
	}
}
