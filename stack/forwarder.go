package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// Timeouts of a Forwarder; zero means the default in brackets.
type Timeouts struct {
	Connect   time.Duration // for the guest to answer a connect [3 s]
	HalfClose time.Duration // for a half-closed flow without traffic [1 h]
	UDPIdle   time.Duration // for a UDP flow without traffic [90 s]
	Drain     time.Duration // for flows to end by themselves in Shutdown [5 s]
	BindRetry time.Duration // between tries of a failed bind [30 s]
}

// Options of a Forwarder. The zero value is loopback only with every default.
type Options struct {
	Policy   listener.Policy
	Timeouts Timeouts
	Limits   Limits // zero fields mean 65536 flows, 16384 UDP flows, 4096 dials
	Log      *slog.Logger
}

func (o *Options) setDefaults() {
	for _, d := range []struct {
		at  *time.Duration
		def time.Duration
	}{
		{&o.Timeouts.Connect, 3 * time.Second}, {&o.Timeouts.HalfClose, time.Hour}, {&o.Timeouts.UDPIdle, 90 * time.Second},
		{&o.Timeouts.Drain, 5 * time.Second}, {&o.Timeouts.BindRetry, 30 * time.Second},
	} {
		if *d.at == 0 {
			*d.at = d.def
		}
	}
	for _, d := range []struct {
		at  *int
		def int
	}{{&o.Limits.Flows, 65536}, {&o.Limits.UDPFlows, 16384}, {&o.Limits.Dials, 4096}} {
		if *d.at == 0 {
			*d.at = d.def
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

// A Forwarder opens host listeners and carries their flows to VMs. It is a
// reconcile.Publisher. All methods are safe for concurrent use.
type Forwarder struct {
	opts     Options
	log      *slog.Logger
	group    *listener.Group
	sessions *relay.Sessions
	flows    flowTable
	icmp     *icmpSender
	inbox    inbox // of the group's goroutine

	ctx     context.Context // of dials and the sweep; ends in Shutdown
	cancel  context.CancelFunc
	sweeper sync.WaitGroup

	mu      sync.Mutex
	table   *listener.Table
	owners  map[listener.Owner]listener.Set[*row]
	failing map[*row]time.Time // rows that are tried again, and when
	blocked map[*row]struct{}  // those of them whose port is in use
	share   share
	retired map[TotalsKey]*Totals // of rows that have left
	vms     map[string]*VM
	nodes   map[string]netip.Addr // of VMs that are, or were, there
	// gateways are our own addresses on VMs' links.
	gateways map[string]netip.Addr
	asked    uint64
	retry    *time.Timer // for the earliest RetryAt, or before it; nil when no row is failing
	closed   bool
	changed  chan struct{}
}

// ErrShutDown says that the Forwarder has been shut down.
var ErrShutDown = errors.New("culvert is shutting down")

// New returns a Forwarder without rows or VMs. Shutdown frees it.
func New(o Options) (*Forwarder, error) {
	o.setDefaults()
	f := &Forwarder{
		opts: o, log: o.Log, flows: flowTable{limits: o.Limits},
		table: listener.NewTable(o.Policy), owners: make(map[listener.Owner]listener.Set[*row]),
		failing: make(map[*row]time.Time), blocked: make(map[*row]struct{}), retired: make(map[TotalsKey]*Totals),
		share: newShare(o.Limits.Descriptors),
		vms:   make(map[string]*VM), nodes: make(map[string]netip.Addr), gateways: make(map[string]netip.Addr), changed: make(chan struct{}),
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	group, err := listener.NewGroup(f)
	if err != nil {
		return nil, fmt.Errorf("make listener group: %w", err)
	}
	f.group = group
	f.icmp = newICMPSender()
	f.sessions = relay.NewSessions(udpHandler{f}, o.Timeouts.UDPIdle, o.Limits.UDPFlows)
	f.sweeper.Go(f.sweep)
	return f, nil
}

// Reserve keeps a host port for the daemon itself: a publish of it is Failed.
// It is called before the first Publish.
func (f *Forwarder) Reserve(proto listener.Proto, ap netip.AddrPort, what string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table.Reserve(proto, ap, what)
}

// SetGateway says which address is our own on the link of a VM: what leads there
// is Skipped. It is called before anything is published to that VM.
func (f *Forwarder) SetGateway(vm string, own netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gateways[vm] = own
}

// node returns the address that a target without one means.
func (vm *VM) node() netip.Addr {
	if vm.Node.IsValid() {
		return vm.Node
	}
	return vm.Node6
}

// AttachVM opens the rows of a VM that has come. A VM of that name that is
// attached already is detached first.
func (f *Forwarder) AttachVM(name string, vm VM) {
	f.DetachVM(name)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.vms[name], f.nodes[name] = &vm, vm.node()
	if b, ok := vm.Guest.(besider); ok {
		b.Beside(f.group.Poll)
	}
	f.tryRows(func(r *row) bool { return r.spec.Target.VM == name })
}

// DetachVM retires all that leads to a VM: its sockets are closed, its flows
// reset, and its rows Pending when it returns (C-26). A VM that is not there is
// no error.
func (f *Forwarder) DetachVM(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.vms[name] == nil {
		return
	}
	delete(f.vms, name)
	var rows []*row
	for r := range f.rows() {
		if r.spec.Target.VM == name {
			rows = append(rows, r)
		}
	}
	f.closeRows(rows)
	if f.closed {
		return // the rows are the past, and nothing to log
	}
	now := time.Now()
	for _, r := range rows {
		f.judge(r, now)
	}
	f.notify()
}

// Publish implements reconcile.Publisher.
func (f *Forwarder) Publish(_ context.Context, o listener.Owner, specs []listener.Spec) []listener.Outcome {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return refusedOutcomes(specs)
	}
	wanted, fresh, gone := f.owners[o].State(specs, func(s listener.Spec) *row {
		f.asked++
		return &row{owner: o, spec: s, allow: s.Allow.List(), seq: f.asked, closing: true}
	})
	if len(gone) == 0 && len(fresh) == 0 {
		return f.outcomes(specs, wanted)
	}
	f.closeRows(gone)
	f.retire(gone)
	for _, r := range gone {
		f.forget(r)
	}
	promoted := f.table.Claim(o, slices.DeleteFunc(slices.Clone(specs), func(s listener.Spec) bool { return f.never(s) != nil }))
	if len(wanted) == 0 {
		delete(f.owners, o)
	} else {
		f.owners[o] = wanted
	}
	f.openRows(fresh, promoted)
	if len(gone) > 0 {
		f.retryBlocked()
	}
	f.notify()
	return f.outcomes(specs, wanted)
}

// Withdraw implements reconcile.Publisher.
func (f *Forwarder) Withdraw(ctx context.Context, o listener.Owner) { f.Publish(ctx, o, nil) }

// Owners implements reconcile.Publisher.
func (f *Forwarder) Owners() []listener.Owner {
	f.mu.Lock()
	defer f.mu.Unlock()
	owners := make([]listener.Owner, 0, len(f.owners))
	for o := range f.owners {
		owners = append(owners, o)
	}
	return owners
}

// outcomes returns those of rows for specs, all of which they have. mu is held.
func (f *Forwarder) outcomes(specs []listener.Spec, rows listener.Set[*row]) []listener.Outcome {
	out := make([]listener.Outcome, len(specs))
	for i := range specs {
		r, _ := rows.Find(&specs[i])
		out[i] = f.outcome(r)
	}
	return out
}

func refusedOutcomes(specs []listener.Spec) []listener.Outcome {
	out := make([]listener.Outcome, len(specs))
	for i, s := range specs {
		out[i] = listener.Outcome{Spec: s, State: listener.Pending, Detail: ErrShutDown.Error(), Err: ErrShutDown, Since: time.Now()}
	}
	return out
}

// notify tells watchers that rows have changed. mu is held.
func (f *Forwarder) notify() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// Changed returns a channel that is closed when a row changes its state or
// comes or goes. Ask for it before reading Rows.
func (f *Forwarder) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

// Rows returns the ledger, in the order of asking.
func (f *Forwarder) Rows() []Row {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.views(slices.SortedFunc(f.rows(), bySeq))
}

// RowsOf returns the rows of owners, one owner's after another's and each's in the
// order of asking. It costs what they have, however long the ledger is.
func (f *Forwarder) RowsOf(owners ...listener.Owner) []Row {
	f.mu.Lock()
	defer f.mu.Unlock()
	rows := make([]*row, 0, len(owners))
	for _, o := range owners {
		before := len(rows)
		rows = append(rows, f.owners[o]...)
		slices.SortFunc(rows[before:], bySeq)
	}
	return f.views(rows)
}

// views describes rows. mu is held.
func (f *Forwarder) views(rows []*row) []Row {
	views := make([]Row, len(rows))
	for i, r := range rows {
		views[i] = r.view(f.outcome(r), f.opts.Policy, f.nodes[r.spec.Target.VM])
	}
	return views
}

// Flows returns the live flows, oldest first.
func (f *Forwarder) Flows() []FlowView {
	f.mu.Lock()
	rows := slices.Collect(f.rows())
	f.mu.Unlock()
	var views []FlowView
	for _, r := range rows {
		views = append(views, r.views()...)
	}
	slices.SortFunc(views, func(a, b FlowView) int { return cmp.Compare(a.ID, b.ID) })
	return views
}

// sweepEvery is how often flows are looked at whose client may have left
// unnoticed: within C-19's 3 s. One look costs a poll(2), 10 000 of them some
// 5 ms, a quarter of a percent of a processor.
const sweepEvery = 2 * time.Second

// sweep ends flows whose client is gone while nobody reads it: the guest takes
// nothing, so the copy towards it waits there, and what the client sent and its
// socket would be held until the guest moves.
func (f *Forwarder) sweep() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
			f.killGone()
		}
	}
}

func (f *Forwarder) killGone() {
	f.mu.Lock()
	rows := slices.Collect(f.rows())
	f.mu.Unlock()
	for _, r := range rows {
		for _, fl := range r.live() {
			if fl.clientGone() {
				fl.kill()
			}
		}
	}
}

// Shutdown stops accepting, lets TCP flows end by themselves for Timeouts.Drain
// or until ctx ends, resets the rest, and frees everything. It returns at once
// when it was called before.
func (f *Forwarder) Shutdown(ctx context.Context) {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return
	}
	f.closed = true
	if f.retry != nil {
		f.retry.Stop()
	}
	rows := slices.Collect(f.rows())
	for _, r := range rows {
		r.shut()
		if r.opened != nil {
			r.opened.Close()
		}
		if r.spec.Proto == listener.UDP {
			r.kill() // they answer through the socket that is closed
		}
	}
	f.mu.Unlock()

	// A VM that goes meanwhile has its flows reset by DetachVM.
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for _, r := range rows {
			r.ended.Wait()
		}
	}()
	drain, cancel := context.WithTimeout(ctx, f.opts.Timeouts.Drain)
	defer cancel()
	select {
	case <-drained:
	case <-drain.Done():
		for _, r := range rows {
			r.kill()
		}
		<-drained
	}
	f.cancel()
	f.sweeper.Wait()
	f.sessions.Close()
	_ = f.group.Close() // close(2) of sockets reports nothing to act upon
	f.icmp.close()
}
