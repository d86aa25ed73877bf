package stack

import (
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// # Theory of operation
//
// Everything is counted where it happens, in its row. Totals adds the rows up
// when somebody asks, so traffic pays nothing for it; what a row had counted when
// it left is kept (retire), so no total ever falls. Both happen under
// Forwarder.mu, and so a row is added once: it is there, or among those that have
// left. What is still refused in the name of a row that has left is not counted.
//
// Why flows end is counted beside the rows, by the flowTable: many end because
// their row leaves, and no row shows it.

// refusals are all the reasons there are, so that each is counted from zero.
var refusals = [...]string{
	refusedByGuest, refusedUnreachable, refusedTimeout, refusedNoVM, refusedLimit, refusedNoPort, refusedNoFD, refusedRange, refusedLeft,
	refusedOther, droppedDatagram, refusedEvicted,
}

// ends are all the reasons there are for a TCP flow's end, likewise.
var ends = [...]relay.End{relay.EndClosed, relay.EndClientReset, relay.EndGuestReset, relay.EndIdle, relay.EndAborted}

// A TotalsKey is what rows are added up by.
type TotalsKey struct {
	VM    string
	Proto listener.Proto
}

// Totals are the rows that lead to one VM by one protocol, added up. All but
// Active count from the Forwarder's beginning and never fall.
type Totals struct {
	Active  int               // live flows
	Flows   uint64            // flows begun, as FlowCount.Total
	Refused map[string]uint64 // by reason, as FlowCount.Refused; every reason is there
	// Ended counts the flows that the guest had taken, by why they ended, in
	// relay.End's words; every one is there. Flows of UDP are not counted.
	Ended   map[string]uint64
	ToGuest uint64 // payload bytes
	ToHost  uint64
}

// NewTotals returns Totals that have counted nothing.
func NewTotals() *Totals {
	t := &Totals{Refused: make(map[string]uint64, len(refusals)), Ended: make(map[string]uint64, len(ends))}
	for _, reason := range refusals {
		t.Refused[reason] = 0
	}
	for _, end := range ends {
		t.Ended[end.String()] = 0
	}
	return t
}

// A RowsKey is what rows are counted by.
type RowsKey struct {
	VM    string
	Kind  string // of the owner
	State listener.State
}

// Totals adds up what passes and has passed, and counts the rows there are. It
// costs about a microsecond for each row with a flow, and no memory. The maps are
// the caller's.
func (f *Forwarder) Totals() (passed map[TotalsKey]*Totals, rows map[RowsKey]int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	passed = make(map[TotalsKey]*Totals)
	for key, t := range f.retired {
		sumOf(passed, key).add(t)
	}
	rows = make(map[RowsKey]int)
	for r := range f.rows() {
		rows[RowsKey{r.spec.Target.VM, r.owner.Kind, r.outcome.State}]++
		sumOf(passed, r.totalsKey()).addRow(r)
	}
	f.flows.addEnds(passed)
	return passed, rows
}

// retire keeps what rows have counted that leave and have no flow any more. mu is
// held.
func (f *Forwarder) retire(rows []*row) {
	for _, r := range rows {
		sumOf(f.retired, r.totalsKey()).addRow(r)
	}
}

// sumOf returns the sum of a key, from zero.
func sumOf(sums map[TotalsKey]*Totals, key TotalsKey) *Totals {
	t := sums[key]
	if t == nil {
		t = NewTotals()
		sums[key] = t
	}
	return t
}

func (t *Totals) add(o *Totals) {
	t.Active += o.Active
	t.Flows += o.Flows
	t.ToGuest += o.ToGuest
	t.ToHost += o.ToHost
	for reason, n := range o.Refused {
		t.Refused[reason] += n
	}
}

// addRow adds what r has counted, its live flows among it.
func (t *Totals) addRow(r *row) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t.Active += len(r.flows)
	t.Flows += r.total
	t.ToGuest += r.toGuest
	t.ToHost += r.toHost
	for f := range r.flows {
		t.ToGuest += f.toGuest.Bytes()
		t.ToHost += f.toHost.Bytes()
	}
	for reason, n := range r.refused {
		t.Refused[reason] += n
	}
}

func (r *row) totalsKey() TotalsKey { return TotalsKey{r.spec.Target.VM, r.spec.Proto} }
