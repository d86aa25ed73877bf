package listener

import "net/netip"

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
	Proto Proto
	// Host is where to listen. The zero address, and a wildcard of either
	// family, mean the policy's default in both families (C-6). Port 0 asks the
	// kernel to choose; it needs Ports == 1.
	Host netip.AddrPort
	// Ports is how many ports from Host's on, and likewise from Target's on: 1,
	// or the length of a range.
	Ports  uint16
	Target Target
	Source Source
}

// A Target is where a publish leads inside a VM.
type Target struct {
	// VM is the VM's name; never empty in a Spec that is published.
	VM string
	// Addr is the guest's address and port. The zero address means the VM's
	// node address.
	Addr netip.AddrPort
}
