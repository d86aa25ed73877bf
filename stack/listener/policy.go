package listener

import (
	"fmt"
	"net/netip"
)

// A Policy says which addresses a publish without one listens on (C-6). It is
// comparable and never changes while listeners stand on it.
type Policy struct {
	// ExposeToLAN is false for loopback only, true for every interface.
	ExposeToLAN bool
}

var (
	loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	loopback6 = netip.IPv6Loopback()
	// What Addrs answers for no address: shared, never written to.
	bothLoopbacks = []netip.Addr{loopback4, loopback6}
	bothWildcards = []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
)

// Addrs returns the addresses that a Spec's host address means: itself, or the
// policy's IPv4 and IPv6 address when it is zero or a wildcard of either
// family. The caller must not write to the slice.
func (p Policy) Addrs(host netip.Addr) []netip.Addr {
	host = host.Unmap()
	switch {
	case host.IsValid() && !host.IsUnspecified():
		return []netip.Addr{host}
	case p.ExposeToLAN:
		return bothWildcards
	}
	return bothLoopbacks
}

// GuestHost says which host address is meant by addr, the HostIp of an engine
// inside a guest, which knows nothing of the host and is not trusted (C-6):
//
//   - none or a wildcard, and an address of the guest itself: the policy's,
//     given as the zero address;
//   - loopback: itself;
//   - an address of the host: itself, when ExposeToLAN is set;
//   - any other: an error, whose text is the sentence of a Skipped row.
//
// isHostAddr and isGuestAddr are asked about unmapped addresses.
func (p Policy) GuestHost(addr netip.Addr, isHostAddr, isGuestAddr func(netip.Addr) bool) (host netip.Addr, err error) {
	addr = addr.Unmap()
	switch {
	case !addr.IsValid() || addr.IsUnspecified():
		return netip.Addr{}, nil
	case addr.IsLoopback():
		return addr.WithZone(""), nil
	case isGuestAddr(addr):
		return netip.Addr{}, nil
	case !p.ExposeToLAN:
		return netip.Addr{}, fmt.Errorf("host address %s was asked for from inside the VM; only loopback is given to a VM unless exposeToLAN is on", addr)
	case addr.Zone() != "" || addr.IsMulticast() || !isHostAddr(addr):
		return netip.Addr{}, fmt.Errorf("host address %s was asked for from inside the VM; the host has no such address", addr)
	}
	return addr, nil
}
