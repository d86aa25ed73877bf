package docker

import (
	"net/netip"
	"time"
)

// A Container is a running container, as far as it concerns the host. All of it
// comes from the guest: texts are bounded and checked by Client, and mean
// nothing but what they say.
type Container struct {
	// ID is the full ID, 64 hexadecimal digits.
	ID string
	// Name is the bare name, without the engine's slash.
	Name string
	// Started is when it was started, by the guest's clock.
	Started time.Time
	// Project and Service are Compose's labels; empty outside Compose.
	Project, Service string
	// Addrs are its own addresses in its networks, in the order of the networks'
	// names.
	Addrs []netip.Addr
	// Bindings are its publishes, one for each entry of the engine (a range is
	// many; 0.0.0.0 and :: are two), sorted and without repeats.
	Bindings []Binding
	// Unusable are entries that lead nowhere, each with the reason: no host port,
	// an impossible number (C-34, FB-094).
	Unusable []Unusable
}

// A Binding is one port of a container that the engine publishes in the guest.
type Binding struct {
	// Proto is "tcp", "udp" or "sctp", lower-cased.
	Proto string
	// Port is the container's own port number, never 0.
	Port uint16
	// HostIP is the guest's address that was asked for; the zero address when
	// none was.
	HostIP netip.Addr
	// HostPort is the engine's port number in the guest, never 0.
	HostPort uint16
}

// An Unusable is an entry of the engine's that is no Binding.
type Unusable struct {
	// Proto and Port as far as they are known: "" and 0 otherwise.
	Proto string
	Port  uint16
	// Reason is the sentence for people: "no host port".
	Reason string
}
