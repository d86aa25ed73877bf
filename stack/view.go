package stack

import (
	"net/netip"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// A Guest is what flows need of a VM: dials towards it. *netstack.Stack is one.
// All methods are safe for concurrent use.
type Guest interface {
	// StartTCP begins to connect to dst. done is called once with the outcome, from
	// any goroutine, perhaps before StartTCP returns; it does not wait. Its errors
	// match syscall.ECONNREFUSED (the guest refused), EHOSTUNREACH or ENETUNREACH (it
	// said unreachable), EADDRNOTAVAIL (no source port left), net.ErrClosed (the
	// stack is closing, or cancel was called). cancel gives up, if it is not too late.
	StartTCP(dst netip.AddrPort, done func(relay.GuestConn, error)) (cancel func())
	// DialUDP makes a connected endpoint with a source port of its own.
	DialUDP(dst netip.AddrPort) (relay.GuestPacketConn, error)
}

// A besider is a Guest whose own goroutine may be so busy that others on its processor
// are not woken, and calls poll for them now and then.
type besider interface{ Beside(poll func()) }

// A VM is what the Forwarder is told of one life of a VM.
type VM struct {
	Guest Guest
	// Node and Node6 are the node's addresses; the zero address where it has
	// none. A target without an address means Node, or Node6 without Node.
	Node, Node6 netip.Addr
}

// A Row is one line of the ledger: a publish, who asked, what became of it and
// what passed it.
type Row struct {
	Owner   listener.Owner
	Outcome listener.Outcome
	// Host is the address and port (or "first-last") as asked for, with the
	// policy's address where none was: "127.0.0.1:8080".
	Host string
	// Guest is the target with the node's address filled in: "10.0.2.2:80".
	Guest   string
	Flows   FlowCount
	ToGuest uint64 // payload bytes, ended and live flows together
	ToHost  uint64
}

// FlowCount counts a row's flows.
type FlowCount struct {
	Active int
	Total  uint64 // flows begun, those that the guest then refused among them
	// Refused counts by reason: clients that got no flow ("refused",
	// "unreachable", "timeout", "no-vm", "limit", "no-source-port",
	// "no-descriptor", "source-range", "error"), clients that left before they had one
	// ("client-left"), and of UDP, flows that made room ("evicted") and datagrams
	// for which there was none ("dropped").
	Refused map[string]uint64
}

// A FlowView is a live flow as `culvert flows` shows it.
type FlowView struct {
	ID              uint64
	Proto           listener.Proto
	Owner           listener.Owner
	VM              string
	Client          netip.AddrPort // the client's address
	Host            netip.AddrPort // the host address and port it came to
	Source          string         // its source as the guest sees it, "IP:port"
	Guest           netip.AddrPort
	State           string // "connecting", "open", "half-closed-client", "half-closed-guest"
	Started         time.Time
	LastActive      time.Time
	ToGuest, ToHost uint64
}
