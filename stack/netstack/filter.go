package netstack

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/culvertnet/culvert/datapath"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// A filter decides which of the guest's packets the stack gets to see (C-47 …
// C-49): those from an address that is the guest's to use, to an address that
// is ours. The guest's are the node and, while flows to them live, the
// addresses behind it that a publish named.
type filter struct {
	own, own6   netip.Addr
	node, node6 netip.Addr

	mu     sync.Mutex
	dialed map[netip.Addr]int                      // live flows by address
	behind atomic.Pointer[map[netip.Addr]struct{}] // the keys of dialed, for readers
}

func newFilter(o Options) *filter {
	f := &filter{
		own: o.Gateway.Addr(), own6: o.Gateway6.Addr(), node: o.Node, node6: o.Node6,
		dialed: make(map[netip.Addr]int),
	}
	f.behind.Store(new(map[netip.Addr]struct{}))
	return f
}

// allow admits packets from dst until release.
func (f *filter) allow(dst netip.Addr) { f.count(dst, 1) }

// release ends one allow.
func (f *filter) release(dst netip.Addr) { f.count(dst, -1) }

func (f *filter) count(dst netip.Addr, n int) {
	if dst == f.node || dst == f.node6 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.dialed[dst]
	if f.dialed[dst] = was + n; was+n == 0 {
		delete(f.dialed, dst)
	}
	if was > 0 && was+n > 0 {
		return
	}
	behind := make(map[netip.Addr]struct{}, len(f.dialed))
	for a := range f.dialed {
		behind[a] = struct{}{}
	}
	f.behind.Store(&behind)
}

// check reports whether the stack may see a packet from src to dst, and if not
// why it is dropped.
func (f *filter) check(src, dst netip.Addr) (datapath.DropReason, bool) {
	if dst != f.own && dst != f.own6 {
		return datapath.DropUnwanted, false // broadcast, multicast, or a route the guest imagines
	}
	if src == f.node || src == f.node6 {
		return 0, true
	}
	if src == f.own || src == f.own6 {
		return datapath.DropSpoofed, false
	}
	if _, ok := (*f.behind.Load())[src]; ok {
		return 0, true
	}
	return datapath.DropForeign, false
}

// addrs4 returns the addresses of an IPv4 header, which is long enough.
func addrs4(ip header.IPv4) (src, dst netip.Addr) {
	return netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20]))
}
