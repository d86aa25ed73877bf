package stack

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
)

// Why a client was refused, as Row.Flows.Refused names it.
const (
	refusedByGuest     = "refused"        // the guest answered with a reset
	refusedUnreachable = "unreachable"    // the guest answered that it has no such host, net or port
	refusedTimeout     = "timeout"        // the guest did not answer within Timeouts.Connect
	refusedNoVM        = "no-vm"          // the VM is not there, or leaving
	refusedLimit       = "limit"          // Limits.Flows or Limits.Dials reached
	refusedNoPort      = "no-source-port" // every port towards this guest port is in use
	refusedNoFD        = "no-descriptor"  // out of descriptors or memory on the host
	refusedRange       = "source-range"   // the client is in none of Spec.Allow
	refusedLeft        = "client-left"    // the client reset or left before the guest answered
	refusedOther       = "error"          //
	droppedDatagram    = "dropped"        // a datagram for which there was no room
	refusedEvicted     = "evicted"        // a UDP flow that made room for a new one
)

// A row is one publish of one owner: its sockets and its flows.
type row struct {
	owner listener.Owner
	spec  listener.Spec
	allow []netip.Prefix // spec.Allow
	seq   uint64         // order of asking

	// Under Forwarder.mu.
	opened  *listener.Opened // nil before the first try
	outcome outcome
	sockets int // counted in the share of its VM's guest

	vm atomic.Pointer[VM] // where its flows go; nil while closed

	mu      sync.Mutex
	closing bool // refuses flows
	flows   map[*flow]struct{}
	ended   sync.WaitGroup // one for each of flows
	total   uint64
	refused map[string]uint64
	toGuest uint64 // of flows that have ended
	toHost  uint64
}

// An outcome is what a listener.Outcome says that is not known otherwise: from
// the row's spec, its sockets, and when it is tried again.
type outcome struct {
	State  listener.State
	Detail string
	Err    error
	Since  time.Time
}

// Stated implements listener.Stated.
func (r *row) Stated() *listener.Spec { return &r.spec }

// admit takes a flow in, unless the row is closing.
func (r *row) admit(f *flow) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing {
		return false
	}
	if r.flows == nil {
		r.flows = make(map[*flow]struct{})
	}
	r.flows[f] = struct{}{}
	r.total++
	r.ended.Add(1)
	return true
}

// dismiss lets an ended flow go, and keeps its bytes.
func (r *row) dismiss(f *flow) {
	r.mu.Lock()
	delete(r.flows, f)
	r.toGuest += f.toGuest.Bytes()
	r.toHost += f.toHost.Bytes()
	r.mu.Unlock()
	r.ended.Done()
}

// allows reports whether a client at addr is served (C-45).
func (r *row) allows(addr netip.Addr) bool {
	return r.spec.Allow == "" || slices.ContainsFunc(r.allow, func(p netip.Prefix) bool { return p.Contains(addr.Unmap()) })
}

// refuse counts a client that got nothing.
func (r *row) refuse(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refused == nil {
		r.refused = make(map[string]uint64)
	}
	r.refused[reason]++
}

// open lets flows in, towards vm.
func (r *row) open(vm *VM) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closing = false
	r.vm.Store(vm)
}

// shut refuses new flows.
func (r *row) shut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closing = true
	r.vm.Store(nil)
}

// live returns the flows there are.
func (r *row) live() []*flow {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.flows))
}

// active returns how many flows there are.
func (r *row) active() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.flows)
}

// kill aborts the flows there are.
func (r *row) kill() {
	for _, f := range r.live() {
		f.kill()
	}
}

// view describes the row. node is the VM's, the zero address when it has not
// been there yet.
func (r *row) view(o listener.Outcome, policy listener.Policy, node netip.Addr) Row {
	v := Row{Owner: r.owner, Outcome: o, Host: r.spec.HostString(policy), Guest: r.spec.GuestString(node)}
	r.mu.Lock()
	defer r.mu.Unlock()
	v.Flows = FlowCount{Active: len(r.flows), Total: r.total, Refused: maps.Clone(r.refused)}
	v.ToGuest, v.ToHost = r.toGuest, r.toHost
	for f := range r.flows {
		v.ToGuest += f.toGuest.Bytes()
		v.ToHost += f.toHost.Bytes()
	}
	return v
}

// views describes the row's flows.
func (r *row) views() []FlowView {
	flows := r.live()
	views := make([]FlowView, len(flows))
	for i, f := range flows {
		views[i] = f.view()
	}
	return views
}

// settle takes a new outcome and reports whether it is a change of state.
func (r *row) settle(o listener.Outcome, now time.Time) bool {
	since := r.outcome.Since
	changed := r.outcome.State != o.State || r.outcome.Detail != o.Detail
	if r.outcome.State != o.State {
		since = now
	}
	r.outcome = outcome{State: o.State, Detail: o.Detail, Err: o.Err, Since: since}
	return changed
}
