package netstack

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// A neighbour is what the link knows of the node's Ethernet address. It is
// asked for by probe, and believed whenever the node speaks ARP of its own
// address (RFC 826; RFC 5227 announcements after a new NIC among them).
type neighbour struct {
	node    netip.Addr
	own     netip.Addr
	ownMAC  tcpip.LinkAddress
	sendARP func(op header.ARPOp, dst tcpip.LinkAddress, dstIP netip.Addr)

	addr   atomic.Pointer[tcpip.LinkAddress]
	asking atomic.Bool // somebody is waiting

	mu      sync.Mutex
	waiting []chan struct{} // closed by the node's next answer
}

func newNeighbour(o Options, sendARP func(header.ARPOp, tcpip.LinkAddress, netip.Addr)) *neighbour {
	n := &neighbour{node: o.Node, own: o.Gateway.Addr(), ownMAC: tcpip.LinkAddress(o.MAC[:]), sendARP: sendARP}
	// Until the node has answered, frames go to everyone on the link: that is
	// the one guest.
	everyone := header.EthernetBroadcastAddress
	n.addr.Store(&everyone)
	return n
}

// mac returns the node's Ethernet address.
func (n *neighbour) mac() tcpip.LinkAddress { return *n.addr.Load() }

// known reports whether the node has ever answered: until then a packet from its
// address does not tell where to send ours.
func (n *neighbour) known() bool { return n.mac() != header.EthernetBroadcastAddress }

// probe asks for the node's address and returns how long the answer took. It
// gives up when ctx does or the link has ended.
func (n *neighbour) probe(ctx context.Context, ended <-chan struct{}) (time.Duration, error) {
	answered := make(chan struct{})
	n.mu.Lock()
	n.waiting = append(n.waiting, answered)
	n.asking.Store(true)
	n.mu.Unlock()

	start := time.Now()
	n.sendARP(header.ARPRequest, header.EthernetBroadcastAddress, n.node)
	select {
	case <-answered:
		return time.Since(start), nil
	case <-ended:
		n.forget(answered)
		return 0, datapath.ErrClosed
	case <-ctx.Done():
		n.forget(answered)
		return 0, ctx.Err()
	}
}

// heard is told that the node has sent something: an answer, or a packet of any
// flow, which says as much and comes also when a busy guest is slow to answer.
func (n *neighbour) heard() {
	if !n.asking.Load() {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, w := range n.waiting {
		close(w)
	}
	n.waiting = nil
	n.asking.Store(false)
}

// forget takes back a wait.
func (n *neighbour) forget(answered chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.waiting = slices.DeleteFunc(n.waiting, func(w chan struct{}) bool { return w == answered })
}

// handle takes an ARP packet and reports whether it was in order: false for
// one that claims our own address.
func (n *neighbour) handle(a header.ARP) bool {
	if !a.IsValid() {
		return true
	}
	senderIP := netip.AddrFrom4([4]byte(a.ProtocolAddressSender()))
	senderMAC := tcpip.LinkAddress(a.HardwareAddressSender())
	targetIP := netip.AddrFrom4([4]byte(a.ProtocolAddressTarget()))
	if senderIP == n.own {
		return false // C-49: neither believed nor answered
	}
	if senderIP == n.node && usableMAC(senderMAC, n.ownMAC) {
		if n.mac() != senderMAC {
			n.addr.Store(&senderMAC)
		}
		n.heard()
	}
	if a.Op() == header.ARPRequest && targetIP == n.own && usableMAC(senderMAC, n.ownMAC) {
		n.sendARP(header.ARPReply, senderMAC, senderIP)
	}
	return true
}

// usableMAC reports whether mac can be the address of a NIC other than ours:
// unicast and not zero.
func usableMAC(mac, own tcpip.LinkAddress) bool {
	return mac[0]&1 == 0 && mac != own && mac != "\x00\x00\x00\x00\x00\x00"
}

// arpFrame builds an ARP packet of ours in its Ethernet frame (RFC 826), which
// is padded to Ethernet's least length without checksum, 60.
func arpFrame(op header.ARPOp, own tcpip.LinkAddress, ownIP netip.Addr, dst tcpip.LinkAddress, dstIP netip.Addr) []byte {
	b := make([]byte, 60)
	header.Ethernet(b).Encode(&header.EthernetFields{SrcAddr: own, DstAddr: dst, Type: header.ARPProtocolNumber})
	a := header.ARP(b[header.EthernetMinimumSize:])
	a.SetIPv4OverEthernet()
	a.SetOp(op)
	copy(a.HardwareAddressSender(), own)
	copy(a.ProtocolAddressSender(), ownIP.AsSlice())
	if op == header.ARPReply {
		copy(a.HardwareAddressTarget(), dst)
	}
	copy(a.ProtocolAddressTarget(), dstIP.AsSlice())
	return b
}

// etherType returns the type field of an Ethernet header, which is long enough.
func etherType(b []byte) tcpip.NetworkProtocolNumber {
	return tcpip.NetworkProtocolNumber(binary.BigEndian.Uint16(b[12:]))
}
