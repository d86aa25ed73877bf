package netstack

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/relay"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// maxSegmentsIn bounds how many datagrams a super-frame of the guest's may hold:
// Linux makes no more (UDP_MAX_SEGMENTS since 6.9), and one of 65507 single bytes
// would cost more than the guest paid for it.
const maxSegmentsIn = 128

// A udpTable knows the flows by their port, and those for which gVisor has
// something. Safe for concurrent use.
type udpTable struct {
	mu    sync.RWMutex
	conns map[uint16]*UDPConn

	woken   atomic.Bool // ready is not empty
	readyMu sync.Mutex
	ready   []*UDPConn
}

func (t *udpTable) add(c *UDPConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns == nil {
		t.conns = make(map[uint16]*UDPConn)
	}
	t.conns[c.port] = c
}

func (t *udpTable) remove(c *UDPConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c.port)
}

func (t *udpTable) lookUp(port uint16) *UDPConn {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.conns[port]
}

// wake has c drained. It is called under gVisor's locks.
func (t *udpTable) wake(c *UDPConn) {
	t.readyMu.Lock()
	defer t.readyMu.Unlock()
	if !c.queued {
		c.queued = true
		t.ready = append(t.ready, c)
		t.woken.Store(true)
	}
}

// drain delivers what gVisor has for flows.
func (t *udpTable) drain() {
	t.readyMu.Lock()
	ready := t.ready
	t.ready = nil
	t.woken.Store(false)
	for _, c := range ready {
		c.queued = false
	}
	t.readyMu.Unlock()
	for _, c := range ready {
		c.drain()
	}
}

// runFull is how many datagrams of a run are delivered without waiting for the
// end of the batch: as many as the kernel takes at once.
const runFull = 64

// A udpRun is datagrams for one flow that inbound has read one after the other.
// They lie in the batch's memory.
type udpRun struct {
	conn      *UDPConn
	datagrams []relay.Datagram
}

// add appends a frame's payload, in two pieces, as datagrams of size bytes, of
// which the last may be shorter.
func (r *udpRun) add(first, rest []byte, size int) {
	for len(first)+len(rest) > size {
		n := min(size, len(first))
		r.datagrams = append(r.datagrams, relay.Datagram{first[:n], rest[:size-n]})
		first, rest = first[n:], rest[size-n:]
	}
	r.datagrams = append(r.datagrams, relay.Datagram{first, rest})
	if len(r.datagrams) >= runFull {
		r.flush()
	}
}

// flush delivers the run.
func (r *udpRun) flush() {
	if len(r.datagrams) == 0 {
		return
	}
	r.conn.tell(r.datagrams, nil)
	clear(r.datagrams)
	r.datagrams = r.datagrams[:0]
}

// end delivers the run and forgets its flow.
func (r *udpRun) end() {
	r.flush()
	r.conn = nil
}

// takeUDP takes a packet that check4 has let pass if it is a datagram of a flow,
// and whole, or several of them in a super-frame. All others are gVisor's.
func (in *inbound) takeUDP(h *virtio.NetHdr, head, body []byte) bool {
	ip := header.IPv4(head[header.EthernetMinimumSize:])
	if ip.TransportProtocol() != header.UDPProtocolNumber || ip.More() || ip.FragmentOffset() != 0 {
		return false
	}
	l4 := header.EthernetMinimumSize + int(ip.HeaderLength())
	length := int(ip.TotalLength()) - int(ip.HeaderLength())
	if len(head) < l4+header.UDPMinimumSize {
		return false
	}
	udp := header.UDP(head[l4:])
	if int(udp.Length()) != length || length < header.UDPMinimumSize {
		return false
	}
	c := in.flowAt(udp.DestinationPort())
	if c == nil || c.peer != netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[12:16])), udp.SourcePort()) {
		return false
	}
	size := length - header.UDPMinimumSize
	first := head[l4+header.UDPMinimumSize : min(len(head), l4+length)]
	rest := body[:size-len(first)]
	switch {
	case h.GSOType == virtio.GSOUDPL4: // with a checksum that is partial
		if size > maxSegmentsIn*int(h.GSOSize) {
			return false
		}
		size = int(h.GSOSize)
	case h.GSOType != virtio.GSONone:
		return false
	case !in.link.rxCSum && (!ip.IsChecksumValid() || !sumValid(ip, head[l4:l4+header.UDPMinimumSize+len(first)], rest)):
		return false // for gVisor to count
	}
	in.udp.add(first, rest, size)
	return true
}

// flowAt makes the flow with our port the one whose run goes on, and returns it.
func (in *inbound) flowAt(port uint16) *UDPConn {
	if c := in.udp.conn; c != nil && c.port == port && c.deliver.Load() != nil {
		return c
	}
	in.udp.flush()
	in.udp.conn = in.link.udp.lookUp(port)
	return in.udp.conn
}
