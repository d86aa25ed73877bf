package stack

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// # Theory of operation
//
// A flow is one client of one host port, TCP or UDP. It is made by
// flowTable.start, which takes its place under the limits and writes it into its
// row, and it ends in end, once, which gives back all of that. Nothing else
// changes a count, so "in use" always equals what is alive.
//
// A row that closes refuses new flows first and then aborts those it has. A flow
// registers before it opens anything, and what it opens later asks whether it
// was aborted meanwhile (own): so each is seen by exactly one of the two.

// Limits bounds what clients can make the daemon hold (C-53).
type Limits struct {
	Flows    int // live TCP flows
	UDPFlows int // live UDP flows; the idlest makes room for a new one
	Dials    int // TCP flows whose guest has not answered yet
	// Descriptors keeps some for whom they are not flows: a client is refused
	// whose own has this number or a higher one, of which the system gives the
	// lowest that is free. It bounds the host ports of each VM's guest, too (share).
	// Zero is for no such bounds.
	Descriptors uintptr
}

// A flow is one client's connection or exchange of datagrams.
type flow struct {
	id      uint64
	row     *row
	proto   listener.Proto
	client  netip.AddrPort
	host    netip.AddrPort
	guest   netip.AddrPort
	started time.Time

	toGuest, toHost relay.Meter
	half            atomic.Int32 // a relay.Half; or connecting

	conn *listener.Conn // of TCP, the client's

	mu      sync.Mutex
	source  func() string // the guest's end's LocalAddr, once there is one
	abort   []func()      // what to call to end it
	aborted bool
}

// connecting stands in flow.half before the guest has answered.
const connecting = -1

// own has the flow end by calling abort, at once if it was aborted already.
func (f *flow) own(abort func()) {
	f.mu.Lock()
	if !f.aborted {
		f.abort = append(f.abort, abort)
		f.mu.Unlock()
		return
	}
	f.mu.Unlock()
	abort()
}

// ownOnly has the flow end by calling aborts, and nothing it owned before: what
// served the dial alone is not kept for the flow's life.
func (f *flow) ownOnly(aborts ...func()) {
	f.mu.Lock()
	if !f.aborted {
		f.abort = aborts
		f.mu.Unlock()
		return
	}
	f.mu.Unlock()
	for _, abort := range aborts {
		abort()
	}
}

// kill aborts the flow: its client sees a reset.
func (f *flow) kill() {
	f.mu.Lock()
	calls := f.abort
	f.abort, f.aborted = nil, true
	f.mu.Unlock()
	for _, abort := range calls {
		abort()
	}
}

// clientGone reports whether a TCP flow's client is dead. Once we have ended the
// stream to it, a client that has ended its own looks dead too; it is left to
// the copy that reads it.
func (f *flow) clientGone() bool {
	return f.conn != nil && f.conn.Gone() && f.half.Load() != int32(relay.HalfGuest)
}

func (f *flow) setSource(local func() string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.source = local
}

// view describes the flow.
func (f *flow) view() FlowView {
	v := FlowView{
		ID: f.id, Proto: f.proto, Owner: f.row.owner, VM: f.row.spec.Target.VM,
		Client: f.client, Host: f.host, Guest: f.guest, Started: f.started, LastActive: f.started,
		ToGuest: f.toGuest.Bytes(), ToHost: f.toHost.Bytes(),
	}
	for _, last := range []time.Time{f.toGuest.Last(), f.toHost.Last()} {
		if last.After(v.LastActive) {
			v.LastActive = last
		}
	}
	switch f.half.Load() {
	case connecting:
		v.State = "connecting"
	case int32(relay.HalfClient):
		v.State = "half-closed-client"
	case int32(relay.HalfGuest):
		v.State = "half-closed-guest"
	default:
		v.State = "open"
	}
	f.mu.Lock()
	source := f.source
	f.mu.Unlock()
	if source != nil {
		v.Source = source()
	}
	return v
}

// A flowTable counts the live flows of all rows and numbers them.
type flowTable struct {
	limits Limits
	next   atomic.Uint64
	tcp    atomic.Int64
	udp    atomic.Int64
	dials  atomic.Int64

	mu   sync.Mutex
	ends map[endKey]uint64 // of the Forwarder's life, made with the first
}

// An endKey is what the ends of flows are counted by.
type endKey struct {
	of  TotalsKey
	why relay.End
}

// start makes a flow of r's, or says in one word why not. conn is the client's
// connection, nil for UDP.
func (t *flowTable) start(r *row, conn *listener.Conn, client, host, guest netip.AddrPort) (f *flow, refused string) {
	f = &flow{
		id: t.next.Add(1), row: r, proto: listener.UDP, conn: conn, client: client, host: host, guest: guest, started: time.Now(),
	}
	count := &t.udp
	if conn != nil {
		f.proto = listener.TCP
		f.half.Store(connecting)
		count = &t.tcp
		if count.Add(1) > int64(t.limits.Flows) {
			count.Add(-1)
			return nil, refusedLimit
		}
	} else {
		count.Add(1) // its table evicts
	}
	if !r.admit(f) {
		count.Add(-1)
		return nil, refusedNoVM
	}
	return f, ""
}

// relayed counts why a flow ended that the guest had taken.
func (t *flowTable) relayed(f *flow, why relay.End) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ends == nil {
		t.ends = make(map[endKey]uint64)
	}
	t.ends[endKey{f.row.totalsKey(), why}]++
}

// addEnds adds the ends of flows to what has passed.
func (t *flowTable) addEnds(passed map[TotalsKey]*Totals) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, n := range t.ends {
		sumOf(passed, k.of).Ended[k.why.String()] += n
	}
}

// end gives back what start took.
func (t *flowTable) end(f *flow) {
	if f.proto == listener.TCP {
		t.tcp.Add(-1)
	} else {
		t.udp.Add(-1)
	}
	f.row.dismiss(f)
}
