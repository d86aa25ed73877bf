package listener

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
)

// A Proto is a transport protocol that the relay carries.
type Proto uint8

// The protocols.
const (
	TCP Proto = iota + 1
	UDP
)

// String returns "tcp" or "udp".
func (p Proto) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return "unknown"
}

// A Source is whose address the guest sees as a flow's other end (C-24).
type Source uint8

// The sources.
const (
	SourceGateway Source = iota // the gateway's address on the guest's link
	SourceClient                // the client's own address and port (not yet served)
)

// String returns "gateway" or "client".
func (s Source) String() string {
	if s == SourceClient {
		return "client"
	}
	return "gateway"
}

// A Spec is one publish: a host port, or a range, and where it leads. It is
// comparable; equal specs are the same listener.
type Spec struct {
	// The small fields stand together: a ledger keeps several copies of each
	// Spec, and 16 bytes of padding in one make a megabyte of 20 000 publishes.
	Proto  Proto
	Source Source
	// Ports is how many ports from Host's on, and likewise from Target's on: 1,
	// or the length of a range.
	Ports uint16
	// Host is where to listen. The zero address, and a wildcard of either
	// family, mean the policy's default in both families (C-6). Port 0 asks the
	// kernel to choose; it needs Ports == 1.
	Host   netip.AddrPort
	Target Target
	// Allow says which clients are served (C-45); empty means all.
	Allow Prefixes
}

// A Target is where a publish leads inside a VM.
type Target struct {
	// VM is the VM's name; never empty in a Spec that is published.
	VM string
	// Addr is the guest's address and port. The zero address means the VM's
	// node address.
	Addr netip.AddrPort
}

// Canonical returns s with its addresses in the one form that equal publishes
// share: a host wildcard is the zero address (both mean the policy's, C-6), and
// an IPv4 address in IPv6 clothes is an IPv4 address.
func (s Spec) Canonical() Spec {
	host := s.Host.Addr().Unmap()
	if host.IsUnspecified() {
		host = netip.Addr{}
	}
	s.Host = netip.AddrPortFrom(host, s.Host.Port())
	s.Target.Addr = netip.AddrPortFrom(s.Target.Addr.Addr().Unmap(), s.Target.Addr.Port())
	return s
}

// Validate says why s cannot be published, whoever made it: ParseSpec, or an
// engine in a guest. It looks at the numbers and addresses only; VM and Source
// are the caller's.
func (s Spec) Validate() error {
	if s.Proto != TCP && s.Proto != UDP {
		return errors.New("protocol is neither tcp nor udp")
	}
	if s.Ports == 0 {
		return errors.New("no ports")
	}
	if s.Host.Port() == 0 && s.Ports != 1 {
		return errors.New("host port 0 (the kernel picks) cannot start a range")
	}
	if int(s.Host.Port())+int(s.Ports)-1 > maxPort {
		return fmt.Errorf("host ports end after %d", maxPort)
	}
	if s.Target.Addr.Port() == 0 {
		return fmt.Errorf("guest port 0 is not in 1-%d", maxPort)
	}
	if int(s.Target.Addr.Port())+int(s.Ports)-1 > maxPort {
		return fmt.Errorf("guest ports end after %d", maxPort)
	}
	if err := validHost(s.Host.Addr()); err != nil {
		return err
	}
	return validGuest(s.Target.Addr.Addr())
}

// validHost says why no listener can be bound to a. The zero address and
// wildcards are fine: they mean the policy's.
func validHost(a netip.Addr) error {
	switch {
	case a.Zone() != "":
		return errors.New("host address has a zone, which a publish cannot carry")
	case a.IsMulticast() || a == broadcast:
		return errors.New("host address is no single host's")
	}
	return nil
}

// validGuest says why no packet from outside the guest can be meant for a. The
// zero address is fine: it means the node's.
func validGuest(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return nil
	case a.Zone() != "":
		return errors.New("guest address has a zone, which a publish cannot carry")
	case a.IsUnspecified() || a.IsMulticast() || a == broadcast:
		return errors.New("guest address is no single host's")
	case a.Unmap().IsLoopback():
		return errors.New("guest address is the guest's own loopback, which no packet from outside reaches")
	}
	return nil
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// lastHostPort is the last host port of s; a range past 65535 is cut there.
func (s Spec) lastHostPort() uint16 { return last(s.Host.Port(), s.Ports) }

func last(first, n uint16) uint16 {
	return uint16(min(int(first)+max(int(n), 1)-1, maxPort))
}

// String returns s in the form that ParseSpec takes, with the protocol:
// "8080:80/tcp", "[::1]:5353:10.0.2.7:53/udp", "6000-6009:7000-7009/tcp". The
// VM and the source are not in it.
func (s Spec) String() string {
	s = s.Canonical()
	b := make([]byte, 0, 64)
	b = appendAddrPorts(b, s.Host, s.Ports)
	b = append(b, ':')
	b = appendAddrPorts(b, s.Target.Addr, s.Ports)
	b = append(b, '/')
	return string(append(b, s.Proto.String()...))
}

// HostString returns where s listens as a row shows it: "127.0.0.1:8080",
// "[::1]:53", "127.0.0.1:6000-6009". A publish for the policy's addresses in
// both families shows the IPv4 one; Outcome.Bound has both.
func (s Spec) HostString(p Policy) string {
	host := netip.AddrPortFrom(p.Addrs(s.Host.Addr())[0], s.Host.Port())
	return string(appendAddrPorts(make([]byte, 0, 64), host, s.Ports))
}

// GuestString returns where s leads as a row shows it: "10.0.2.2:80",
// "10.0.2.2:7000-7009". node stands in for a target without an address; when
// that is not known either, only the ports are shown.
func (s Spec) GuestString(node netip.Addr) string {
	guest := s.Target.Addr.Addr()
	if !guest.IsValid() {
		guest = node
	}
	return string(appendAddrPorts(make([]byte, 0, 64), netip.AddrPortFrom(guest, s.Target.Addr.Port()), s.Ports))
}

func appendAddrPorts(b []byte, first netip.AddrPort, n uint16) []byte {
	switch a := first.Addr(); {
	case !a.IsValid():
	case a.Is4():
		b = append(a.AppendTo(b), ':')
	default:
		b = append(a.AppendTo(append(b, '[')), ']', ':')
	}
	b = strconv.AppendUint(b, uint64(first.Port()), 10)
	if n > 1 {
		b = strconv.AppendUint(append(b, '-'), uint64(last(first.Port(), n)), 10)
	}
	return b
}
