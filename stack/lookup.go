package stack

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
)

const (
	// indexAge is how old a Lookup's index may be when it does not know a flow.
	indexAge = 100 * time.Millisecond
	// indexShare bounds what making it costs: one part in so many of the time.
	indexShare = 20
	// maxPoints is up to how many ports a row is indexed port by port.
	maxPoints = 256
)

// A Lookup finds the flow that a frame on a VM's link belongs to. Flows pay
// nothing for it: it makes an index of those that live when it is asked for one
// that it does not know, and not too often. It is safe for concurrent use.
type Lookup struct {
	forwarder *Forwarder

	mu     sync.Mutex
	made   time.Time
	took   time.Duration
	flows  map[flowEnds]*flow
	points map[guestEnd]target // by where rows lead
	ranges []rangeTarget       // of rows with more ports than maxPoints
}

// flowEnds is what a flow's frames say.
type flowEnds struct {
	vm            string
	proto         listener.Proto
	source, guest netip.AddrPort
}

type guestEnd struct {
	vm    string
	proto listener.Proto
	at    netip.AddrPort
}

// A target is who leads somewhere; nobody in particular if two do.
type target struct {
	owner   listener.Owner
	several bool
}

type rangeTarget struct {
	guestEnd
	ports uint16
	owner listener.Owner
}

// NewLookup returns a Lookup of f's flows.
func NewLookup(f *Forwarder) *Lookup { return &Lookup{forwarder: f} }

// Find returns whose flow it is that frames with these ends belong to, and its
// number. The number is 0 where only the owner is certain: the guest has not
// answered yet, or the flow has ended. source is the end that is not the guest.
func (l *Lookup) Find(vm string, proto listener.Proto, source, guest netip.AddrPort) (o listener.Owner, id uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := flowEnds{vm, proto, source, guest}
	fl := l.flows[k]
	if (fl == nil || !fl.row.has(fl)) && time.Since(l.made) > max(indexAge, indexShare*l.took) {
		l.index()
		fl = l.flows[k]
	}
	if fl != nil {
		return fl.row.owner, fl.id, true
	}
	end := guestEnd{vm, proto, guest}
	if t, ok := l.points[end]; ok {
		return t.owner, 0, !t.several
	}
	for _, r := range l.ranges {
		if r.vm == vm && r.proto == proto && r.at.Addr() == guest.Addr() &&
			guest.Port() >= r.at.Port() && guest.Port()-r.at.Port() < r.ports {
			return r.owner, 0, true
		}
	}
	return o, 0, false
}

// index makes the index anew. mu is held.
func (l *Lookup) index() {
	start := time.Now()
	l.flows, l.points, l.ranges = make(map[flowEnds]*flow), make(map[guestEnd]target), nil
	f := l.forwarder
	f.mu.Lock()
	rows := slices.Collect(f.rows())
	nodes := make(map[*row]netip.Addr, len(rows))
	for _, r := range rows {
		if nodes[r] = r.spec.Target.Addr.Addr(); !nodes[r].IsValid() {
			nodes[r] = f.nodes[r.spec.Target.VM]
		}
	}
	f.mu.Unlock()
	for _, r := range rows {
		vm, proto, port := r.spec.Target.VM, r.spec.Proto, r.spec.Target.Addr.Port()
		for _, fl := range r.live() {
			if source, err := netip.ParseAddrPort(fl.view().Source); err == nil {
				l.flows[flowEnds{vm, proto, source, fl.guest}] = fl
			}
		}
		end := guestEnd{vm, proto, netip.AddrPortFrom(nodes[r], port)}
		if r.spec.Ports > maxPoints {
			l.ranges = append(l.ranges, rangeTarget{end, r.spec.Ports, r.owner})
			continue
		}
		for i := range max(r.spec.Ports, 1) {
			end.at = netip.AddrPortFrom(nodes[r], port+i)
			t, taken := l.points[end]
			l.points[end] = target{owner: r.owner, several: taken && (t.several || t.owner != r.owner)}
		}
	}
	l.made = time.Now()
	l.took = l.made.Sub(start)
}

// has reports whether f is live.
func (r *row) has(f *flow) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.flows[f]
	return ok
}
