package listener

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
)

// # Theory of operation
//
// A claim is one publish of one owner. It wants, on every address its Spec
// means under the Policy, the whole range of its host ports, all or nothing: a
// publish of which one family or one port led to somebody else's guest would
// be a trap. It is in exactly one of two states:
//
//	          no holder overlaps
//	   ask ───────────────────────► holding ──► gone
//	    │                              ▲          (its owner states a set without it)
//	    └──► waiting at its blocker ───┘
//	         a holder overlaps       the blocker is gone, and no other holder overlaps
//
// Holders never overlap each other, so the holders of one (protocol, address)
// are a sorted slice of intervals and a range of 65 000 ports is one entry. Two
// claims overlap when protocol and family are the same, the port ranges meet,
// and the addresses are equal or one is the family's wildcard: what bind(2)
// calls EADDRINUSE for sockets made the way this package makes them (IPv6
// sockets are v6-only, so the families never meet).
//
// A waiting claim is kept with the one holder that blocks it. A holder changes
// in no way but leaving, so as long as it is there the claim stays blocked and
// nothing needs to look at it. When it leaves, the claims that waited at it are
// looked at again in the order of asking: each takes its ports or waits at the
// next holder in its way. So the first to ask wins, a holder is never evicted
// (C-45), a claim that is free to hold is never left waiting, and leaving costs
// as much as there is that waited for it.
//
// An owner states its whole set (C-2). Claims it keeps are not touched. A claim
// that changes in its target only is the same claim to the others: it keeps its
// ports, or its place in line.

// A Claim is one publish of one owner: the ledger's row.
type Claim struct {
	Owner Owner
	Spec  Spec
}

// A Table says which claim has which host ports (C-1, C-3). It opens nothing
// and asks nobody. It is not safe for concurrent use.
type Table struct {
	policy Policy
	owners map[Owner]Set[*claim]
	held   map[place][]interval // sorted by first; never overlapping
	asked  uint64               // claims so far, for the order of asking
}

// A place is where ports are numbered on their own.
type place struct {
	proto Proto
	addr  netip.Addr
}

// An interval is the ports [first, last] of a place and who holds them.
type interval struct {
	first, last uint16
	holder      *claim
}

// A claim is a Claim in the Table, or what the daemon reserved for itself.
type claim struct {
	Claim
	reserved string // what for; then there is no Claim
	seq      uint64 // order of asking
	picked   uint16 // of host port 0: the number the kernel chose; 0 before
	blocker  *claim // who it waits for; nil while it holds
	at       netip.AddrPort
	waiting  map[*claim]struct{} // who waits for it
}

// Stated implements Stated.
func (c *claim) Stated() *Spec { return &c.Spec }

// NewTable returns a Table in which nothing is held.
func NewTable(p Policy) *Table {
	return &Table{policy: p, owners: make(map[Owner]Set[*claim]), held: make(map[place][]interval)}
}

// Reserve keeps a port for the daemon itself for good, so that no publish gets
// it: what is a name for sentences ("metrics"). It returns a *ConflictError
// when a publish holds the port already; port 0 reserves nothing.
func (t *Table) Reserve(proto Proto, ap netip.AddrPort, what string) error {
	if ap.Port() == 0 {
		return nil
	}
	p, iv := place{proto, ap.Addr().Unmap()}, interval{ap.Port(), ap.Port(), &claim{reserved: what}}
	if in, at := t.overlap(p, iv); in != nil {
		return in.conflict(proto, at)
	}
	t.insert(p, iv)
	return nil
}

// Claim makes specs the whole set of what o asks for. Equal specs are one.
// Afterwards Conflict tells each spec's state. It returns the claims of any
// owner that waited before and hold now, in the order of asking: their sockets
// can be opened as soon as those of the claims that went are closed.
func (t *Table) Claim(o Owner, specs []Spec) (promoted []Claim) {
	now, fresh, gone := t.owners[o].State(specs, func(s Spec) *claim { return &claim{Claim: Claim{o, s}} })
	if len(now) == 0 {
		delete(t.owners, o)
	} else {
		t.owners[o] = now
	}

	// Those with the same host ports as one that goes are that one to others.
	places := make(map[Spec]uint64, len(gone))
	for _, c := range gone {
		if seq, ok := places[hostPart(c.Spec)]; !ok || c.seq < seq {
			places[hostPart(c.Spec)] = c.seq
		}
	}
	for _, c := range fresh {
		if seq, ok := places[hostPart(c.Spec)]; ok {
			c.seq = seq
			delete(places, hostPart(c.Spec))
			continue
		}
		t.asked++
		c.seq = t.asked
	}
	slices.SortFunc(fresh, bySeq)

	line := t.leave(gone)
	for _, c := range fresh {
		t.take(c)
	}
	return t.promote(line)
}

// Picked tells the number the kernel chose for a claim with host port 0, which
// is the claim's from then on; 0 when its sockets are closed. It returns the
// claims that hold now because the earlier number is free. The error is a
// *ConflictError when the number is another claim's, whose sockets are not open
// at the moment: close yours and ask the kernel again.
func (t *Table) Picked(o Owner, s Spec, port uint16) (promoted []Claim, err error) {
	c, _ := t.owners[o].Find(&s)
	if c == nil || s.Host.Port() != 0 || c.picked == port {
		return nil, nil
	}
	line := t.leave([]*claim{c})
	c.picked = port
	t.take(c)
	if c.blocker != nil {
		err = c.blocker.conflict(s.Proto, c.at)
		delete(c.blocker.waiting, c)
		c.blocker, c.picked = nil, 0
	}
	return t.promote(line), err
}

// Conflict returns nil for a claim that holds its ports, and a *ConflictError
// that names the holder it waits for otherwise. Asking for what was not claimed
// is nil as well.
func (t *Table) Conflict(o Owner, s Spec) error {
	c, _ := t.owners[o].Find(&s)
	if c == nil || c.blocker == nil {
		return nil
	}
	return c.blocker.conflict(s.Proto, c.at)
}

// leave takes claims out of the table and returns who waited for them, less
// themselves, in the order of asking.
func (t *Table) leave(gone []*claim) (line []*claim) {
	for _, c := range gone {
		if c.blocker != nil {
			delete(c.blocker.waiting, c)
			c.blocker = nil
			continue
		}
		for p, iv := range t.wants(c) {
			t.remove(p, iv)
		}
	}
	for _, c := range gone {
		// Only holders have a line, and one that waited for another of gone has
		// left it above.
		line = slices.AppendSeq(line, maps.Keys(c.waiting))
		c.waiting = nil
	}
	slices.SortFunc(line, bySeq)
	return line
}

// promote gives those in line another try.
func (t *Table) promote(line []*claim) (promoted []Claim) {
	for _, c := range line {
		if t.take(c); c.blocker == nil {
			promoted = append(promoted, c.Claim)
		}
	}
	return promoted
}

// take makes c hold what it wants, or wait at the first holder in its way.
func (t *Table) take(c *claim) {
	c.blocker = nil
	for p, iv := range t.wants(c) {
		if in, at := t.overlap(p, iv); in != nil {
			if in.waiting == nil {
				in.waiting = make(map[*claim]struct{})
			}
			in.waiting[c] = struct{}{}
			c.blocker, c.at = in, at
			return
		}
	}
	for p, iv := range t.wants(c) {
		t.insert(p, iv)
	}
}

// wants yields what c must hold: a range on each of its addresses; nothing
// while the kernel has not picked.
func (t *Table) wants(c *claim) iter.Seq2[place, interval] {
	return func(yield func(place, interval) bool) {
		iv := interval{c.Spec.Host.Port(), c.Spec.lastHostPort(), c}
		if iv.first == 0 {
			iv.first, iv.last = c.picked, c.picked
		}
		if iv.first == 0 {
			return
		}
		for _, a := range t.policy.Addrs(c.Spec.Host.Addr()) {
			if !yield(place{c.Spec.Proto, a}, iv) {
				return
			}
		}
	}
}

// overlap returns the holder of the lowest port of iv at p, if any, and the
// address and port where they meet.
func (t *Table) overlap(p place, iv interval) (holder *claim, at netip.AddrPort) {
	look := func(q place) {
		held := t.held[q]
		i := search(held, iv.first)
		if i == len(held) || held[i].first > iv.last {
			return
		}
		port := max(iv.first, held[i].first)
		// Same port on several addresses under a wildcard: the first to ask.
		if holder == nil || port < at.Port() || port == at.Port() && held[i].holder.seq < holder.seq {
			holder, at = held[i].holder, netip.AddrPortFrom(q.addr, port)
		}
	}
	if !p.addr.IsUnspecified() {
		look(p)
		look(place{p.proto, wildcard(p.addr)})
		return holder, at
	}
	for q := range t.held {
		if q.proto == p.proto && q.addr.Is4() == p.addr.Is4() {
			look(q)
		}
	}
	return holder, at
}

func (t *Table) insert(p place, iv interval) {
	held := t.held[p]
	t.held[p] = slices.Insert(held, search(held, iv.first), iv)
}

func (t *Table) remove(p place, iv interval) {
	held := t.held[p]
	i := search(held, iv.first)
	if held = slices.Delete(held, i, i+1); len(held) == 0 {
		delete(t.held, p)
		return
	}
	t.held[p] = held
}

// search returns the index of the first interval that ends at port or after.
func search(held []interval, port uint16) int {
	i, _ := slices.BinarySearchFunc(held, port, func(iv interval, port uint16) int { return cmp.Compare(iv.last, port) })
	return i
}

func bySeq(a, b *claim) int { return cmp.Compare(a.seq, b.seq) }

// hostPart is what others see of a spec: the protocol and the host ports.
func hostPart(s Spec) Spec {
	return Spec{Proto: s.Proto, Host: s.Canonical().Host, Ports: s.Ports}
}

func wildcard(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func (c *claim) conflict(proto Proto, at netip.AddrPort) error {
	return &ConflictError{Proto: proto, At: at, Holder: c.Claim, Reserved: c.reserved}
}

// A ConflictError says that a host port is another publish's, or the daemon's
// own. It matches ErrConflict; its text is the sentence of the Failed row.
type ConflictError struct {
	Proto Proto
	// At is the lowest port in dispute and the holder's address for it.
	At netip.AddrPort
	// Holder has the port; zero when it is Reserved.
	Holder Claim
	// Reserved is what the daemon uses the port for ("metrics"); else empty.
	Reserved string
}

// Error names the port and its holder.
func (e *ConflictError) Error() string {
	if e.Reserved != "" {
		return fmt.Sprintf("host port %s/%s is reserved by culvert's %s", e.At, e.Proto, e.Reserved)
	}
	sentence := fmt.Sprintf("host port %s/%s belongs to %s", e.At, e.Proto, e.Holder.Owner)
	if row := e.Holder.Spec.String(); row != e.Holder.Owner.ID {
		sentence += " (" + row + ")"
	}
	return sentence
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }
