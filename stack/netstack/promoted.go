package netstack

import (
	"net/netip"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/promoted"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// # Theory of operation
//
// With Options.Promoted the flows to the guest are not gVisor's but package
// promoted's, where the link has the offloads that this takes. The reader of frames
// knows them by their addresses and ports and gives them their segments; whatever else
// comes is gVisor's. The daemon's own connections (DialContext) are still endpoints of
// gVisor's: their ports are some of their own, and those of promoted flows are the others.

const (
	// ownPorts bound what the daemon's own connections come from beside promoted flows:
	// some a VM, to its engine and its cluster.
	firstOwnPort, lastOwnPort = 1024, 2047
	// promotedWindow is what a promoted flow takes at most before its client has: 1 MiB
	// is what is under way at 10 Gbit/s in 800 µs.
	promotedWindow = 1 << 20
)

// promotable says whether flows may do without gVisor on a link like this: checksums
// and segmentation are left to who takes the frame.
func promotable(info datapath.Info) bool {
	need := virtio.OffloadCSum | virtio.OffloadTSO4
	return info.ToGuest.Has(need) && info.FromGuest.Has(virtio.OffloadCSum) && promoted.Supported()
}

// Promoted says whether the flows to the guest are promoted: Options ask for it, and
// the link and the kernel allow it.
func (s *Stack) Promoted() bool { return s.link.promoted != nil }

// newPromoted makes the table of s's promoted flows.
func newPromoted(s *Stack) *promoted.Table {
	return promoted.NewTable(promoted.Options{
		Link:  promotedLink{s.link},
		Clock: promotedClock{s.clock},
		MAC:   [6]byte([]byte(s.link.mac)),
		Addr:  s.opts.Gateway.Addr(),
		MTU:   s.opts.MTU,

		FirstPort: lastOwnPort + 1,
		LastPort:  lastPort,
		Window:    func() int { return min(promotedWindow, s.budget.receive()) },
		Later:     func(f func()) { s.runner.add(task(f)) },
		Opened: func(guest netip.Addr) {
			s.book(guest)
		},
		Closed: func(netip.Addr) {
			s.budget.add(-1)
			s.flows.Add(-1)
		},
		Freed: s.link.filter.release,
	})
}

// Beside has poll called now and then while the goroutine that serves this guest's flows
// is busy, if there is one: see promoted.Table.Beside.
func (s *Stack) Beside(poll func()) {
	if s.link.promoted != nil {
		s.link.promoted.Beside(poll)
	}
}

// A task is a function as a runnable.
type task func()

func (t task) run() { t() }

// A promotedLink is the link as promoted flows know it.
type promotedLink struct{ *linkEndpoint }

// Send implements promoted.Link.
func (l promotedLink) Send(flow uint32, frames []datapath.Frame, w promoted.Waiter) int {
	return l.out[flow%uint32(len(l.out))].sendOrWait(frames, w)
}

// Node implements promoted.Link.
func (l promotedLink) Node() (mac [6]byte) {
	copy(mac[:], l.neigh.mac())
	return mac
}

// A promotedClock is the stack's clock as promoted flows know it.
type promotedClock struct{ *clock }

// Now implements promoted.Clock.
func (c promotedClock) Now() time.Duration { return c.elapsed() }

// Until implements promoted.Clock.
func (c promotedClock) Until(f func()) promoted.Timer { return &promotedTimer{clock: c.clock, f: f} }

// Resumed implements promoted.Clock.
func (c promotedClock) Resumed() time.Time { return c.resumed() }

// A promotedTimer is one of the stack's clock's, made when it is first set.
type promotedTimer struct {
	clock *clock
	f     func()
	timer interface {
		Stop() bool
		Reset(time.Duration)
	}
}

// Set implements promoted.Timer.
func (t *promotedTimer) Set(d time.Duration) {
	if t.timer == nil {
		t.timer = t.clock.AfterFunc(d, t.f)
		return
	}
	t.timer.Reset(d)
}

// Stop implements promoted.Timer.
func (t *promotedTimer) Stop() {
	if t.timer != nil {
		t.timer.Stop()
	}
}

// takePromoted takes a packet that check4 has let pass if it is of a promoted flow, or
// about one.
func (in *inbound) takePromoted(head, body []byte) bool {
	if in.promoted == nil {
		return false
	}
	ip := header.IPv4(head[header.EthernetMinimumSize:])
	if ip.More() || ip.FragmentOffset() != 0 {
		return false
	}
	hlen := int(ip.HeaderLength())
	length := int(ip.TotalLength()) - hlen
	switch ip.TransportProtocol() {
	case header.ICMPv4ProtocolNumber:
		return in.takeUnreachable(ip[hlen:], body, length)
	case header.TCPProtocolNumber:
	default:
		return false
	}
	if len(ip) < hlen+header.TCPMinimumSize {
		return false
	}
	segment := ip[hlen:]
	tcp := header.TCP(segment)
	c := in.link.promoted.Lookup([4]byte(ip[12:16]), tcp.SourcePort(), tcp.DestinationPort())
	if c == nil {
		return false
	}
	s, ok := promoted.Parse(segment, body, length)
	if !ok {
		return false // for gVisor to count
	}
	in.promoted.Take(c, &s)
	return true
}

// takeUnreachable takes what a router behind the node says of a flow that the guest has
// not answered (RFC 792: type 3, and the packet that it is about, with 8 bytes of TCP).
func (in *inbound) takeUnreachable(icmp, body []byte, length int) bool {
	const about = header.ICMPv4MinimumSize
	if len(icmp) < about+header.IPv4MinimumSize || length < len(icmp) || header.ICMPv4(icmp).Type() != header.ICMPv4DstUnreachable {
		return false
	}
	sent := header.IPv4(icmp[about:])
	hlen := int(sent.HeaderLength())
	if hlen < header.IPv4MinimumSize || len(sent) < hlen+8 || sent.TransportProtocol() != header.TCPProtocolNumber {
		return false
	}
	tcp := header.TCP(sent[hlen:])
	c := in.link.promoted.Lookup([4]byte(sent[16:20]), tcp.DestinationPort(), tcp.SourcePort())
	if c == nil {
		return false
	}
	var sum checksum.Checksumer
	sum.Add(icmp)
	sum.Add(body[:min(length-len(icmp), len(body))])
	if sum.Checksum() != 0xffff {
		return false // for gVisor to count
	}
	switch header.ICMPv4(icmp).Code() {
	case header.ICMPv4NetUnreachable, header.ICMPv4DestinationNetworkUnknown, header.ICMPv4NetProhibited:
		c.Unreachable(syscall.ENETUNREACH)
	case header.ICMPv4FragmentationNeeded:
	case header.ICMPv4PortUnreachable:
		c.Unreachable(syscall.ECONNREFUSED)
	default:
		c.Unreachable(syscall.EHOSTUNREACH)
	}
	return true
}
