package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// # Theory of operation
//
// A row is in one state, which follows from the first of these that is so:
//
//	it can never be        Skipped     Spec invalid, or not served by this version
//	another row has it     Failed      until the Table promotes it
//	its VM is not there    Pending     until AttachVM
//	its VM's guest has     Failed      tried again after Timeouts.BindRetry
//	its share already
//	a bind failed          Failed      tried again after Timeouts.BindRetry, and
//	                                   when a row leaves that may have blocked it
//	else                   Forwarded
//
// Everything that opens or closes a row runs under mu, one at a time: what it
// waits for while holding it is the end of flows that have been aborted, which
// needs no lock of the Forwarder's and no answer of a guest. Clients never wait
// for mu: the way from an accepted client to its row is the socket's token.

// rows goes through all rows. mu is held.
func (f *Forwarder) rows() func(yield func(*row) bool) {
	return func(yield func(*row) bool) {
		for _, rows := range f.owners {
			for _, r := range rows {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// openRows opens new rows, and those that other rows' leaving promoted, in the
// order of asking. mu is held.
func (f *Forwarder) openRows(fresh []*row, promoted []listener.Claim) {
	fresh = append(fresh, f.claimed(promoted)...)
	slices.SortFunc(fresh, bySeq)
	fresh = slices.Compact(fresh)
	for len(fresh) > 0 {
		r := fresh[0]
		fresh = fresh[1:]
		fresh = append(fresh, f.claimed(f.try(r))...)
	}
	f.schedule()
}

// claimed returns the rows that have these claims. mu is held.
func (f *Forwarder) claimed(claims []listener.Claim) (rows []*row) {
	for _, c := range claims {
		if r, ok := f.owners[c.Owner].Find(&c.Spec); ok {
			rows = append(rows, r)
		}
	}
	return rows
}

// tryRows tries the meant rows, in the order of asking. mu is held.
func (f *Forwarder) tryRows(meant func(*row) bool) {
	var rows []*row
	for r := range f.rows() {
		if meant(r) {
			rows = append(rows, r)
		}
	}
	f.openRows(rows, nil)
	f.notify()
}

// tryThese tries rows again. mu is held.
func (f *Forwarder) tryThese(rows []*row) {
	if len(rows) > 0 {
		f.openRows(rows, nil)
		f.notify()
	}
}

// closeRows closes rows and waits until nothing of theirs is left: first no new
// client, then no flow. mu is held.
func (f *Forwarder) closeRows(rows []*row) {
	for _, r := range rows {
		r.shut()
		if r.opened != nil {
			r.opened.Close()
			f.share.set(r, 0)
		}
	}
	for _, r := range rows {
		r.kill()
	}
	gone := make(map[*row]bool)
	for _, r := range rows {
		if r.spec.Proto == listener.UDP && r.active() > 0 {
			gone[r] = true
		}
	}
	if len(gone) > 0 { // the rest need not go through all sessions
		f.sessions.CloseWhere(func(k relay.UDPKey) bool {
			s, ok := k.Socket.(*listener.Socket)
			if !ok {
				return false
			}
			r, ok := s.Token().(*row)
			return ok && gone[r]
		})
	}
	for _, r := range rows {
		r.ended.Wait()
	}
}

func bySeq(a, b *row) int { return cmp.Compare(a.seq, b.seq) }

// try opens what of r is not open, if it may be. It returns the claims that may
// be opened because of it. mu is held.
func (f *Forwarder) try(r *row) (promoted []listener.Claim) {
	now := time.Now()
	if f.judge(r, now) {
		return nil
	}
	sockets := int(r.spec.Ports) * len(f.opts.Policy.Addrs(r.spec.Host.Addr()))
	if !f.share.allows(r, sockets) {
		f.settle(r, listener.Outcome{Spec: r.spec, State: listener.Failed, Detail: errShare.Error(), Err: errShare}, now)
		return nil
	}
	vm := f.vms[r.spec.Target.VM]
	r.open(vm) // before the sockets: they accept at once
	if r.opened == nil {
		r.opened = listener.Open(f.group, r.spec, f.opts.Policy, r)
	} else {
		r.opened.Retry()
	}
	promoted, err := f.claimPicked(r)
	o := r.opened.Outcome()
	if len(o.Bound) == 0 {
		sockets = 0
	}
	f.share.set(r, sockets)
	if err != nil {
		o.State, o.Detail, o.Err = listener.Failed, err.Error(), err
	}
	f.settle(r, o, now)
	return promoted
}

// pickTries bounds how often the kernel is asked for a number that no closed
// row of ours has a claim to. It draws from some 28 000; if our closed rows had
// half of them, all tries would fail once in 256 times.
const pickTries = 8

// claimPicked makes the number the kernel chose r's in the table. It returns
// the claims that may be opened because the number before is free, and an error
// when r has got none; its sockets are closed then. mu is held.
func (f *Forwarder) claimPicked(r *row) (promoted []listener.Claim, err error) {
	if r.spec.Host.Port() != 0 {
		return nil, nil
	}
	for range pickTries {
		bound := r.opened.Bound()
		if len(bound) == 0 {
			return promoted, nil
		}
		var free []listener.Claim
		free, err = f.table.Picked(r.owner, r.spec, bound[0].Port())
		promoted = append(promoted, free...)
		if err == nil {
			return promoted, nil
		}
		r.opened.Close()
		r.opened = listener.Open(f.group, r.spec, f.opts.Policy, r)
	}
	r.opened.Close()
	// Not a conflict: nobody promotes r, it is tried again.
	return promoted, fmt.Errorf("the kernel picked %d numbers that other publishes have; the last time: %v", pickTries, err)
}

// judge settles r if its state follows without a try to bind, and reports
// whether it does. mu is held.
func (f *Forwarder) judge(r *row, now time.Time) bool {
	o := listener.Outcome{Spec: r.spec}
	err := f.never(r.spec)
	conflict := f.table.Conflict(r.owner, r.spec)
	switch {
	case err != nil:
		o.State, o.Detail, o.Err = listener.Skipped, err.Error(), err
	case conflict != nil:
		o.State, o.Detail, o.Err = listener.Failed, conflict.Error(), conflict
	case f.vms[r.spec.Target.VM] == nil:
		o.State, o.Detail, o.Err = listener.Pending, fmt.Sprintf("VM %s is not there", r.spec.Target.VM), listener.ErrNoVM
	default:
		return false
	}
	f.settle(r, o, now)
	return true
}

// never says why s can never be published. Such a spec has no claim to a port.
// mu is held.
func (f *Forwarder) never(s listener.Spec) error {
	if s.Source != listener.SourceGateway {
		return errors.New("this version shows the guest the gateway's address only; publish with --source gateway")
	}
	if s.Target.Addr.Addr().Is6() {
		return fmt.Errorf("this version reaches the guest over IPv4 only, and %s is not", s.Target.Addr.Addr())
	}
	if own, known := f.gateways[s.Target.VM]; known && s.Target.Addr.Addr() == own {
		return fmt.Errorf("%s is culvert's own address on the VM's link, where nothing serves; leave it out to mean the VM, or name an address behind it", own)
	}
	return s.Validate()
}

// settle gives r its outcome and logs a change. mu is held.
func (f *Forwarder) settle(r *row, o listener.Outcome, now time.Time) {
	f.forget(r)
	if o.State == listener.Failed && !errors.Is(o.Err, listener.ErrConflict) {
		f.failing[r] = now.Add(f.opts.Timeouts.BindRetry)
		if errors.Is(o.Err, listener.ErrInUse) {
			f.blocked[r] = struct{}{}
		}
	}
	if !r.settle(o, now) {
		return
	}
	level := slog.LevelInfo
	if o.State == listener.Failed || o.State == listener.Skipped {
		level = slog.LevelWarn
	}
	f.log.Log(context.Background(), level, "publish "+o.State.String(),
		"owner", r.owner.String(), "vm", r.spec.Target.VM, "publish", r.spec.String(), "bound", o.Bound, "detail", o.Detail)
}

// outcome returns r's outcome; it is the caller's. mu is held.
func (f *Forwarder) outcome(r *row) listener.Outcome {
	o := listener.Outcome{
		Spec: r.spec, State: r.outcome.State, Detail: r.outcome.Detail, Err: r.outcome.Err,
		RetryAt: f.failing[r], Since: r.outcome.Since,
	}
	if r.opened != nil {
		o.Bound = r.opened.Bound()
	}
	return o
}

// forget has r not tried again. mu is held.
func (f *Forwarder) forget(r *row) {
	delete(f.failing, r)
	delete(f.blocked, r)
}

// retryBlocked tries at once what could not be bound because a port was in use:
// a row that left may have held it (C-7). mu is held.
func (f *Forwarder) retryBlocked() { f.tryThese(slices.Collect(maps.Keys(f.blocked))) }

// schedule sees to it that the earliest retry has a timer. It is called with
// every row, and a guest may have tens of thousands that fail: all wait equally
// long, so a timer that is set is early enough. mu is held.
func (f *Forwarder) schedule() {
	if f.retry != nil || f.closed || len(f.failing) == 0 {
		return
	}
	var next time.Time
	for _, at := range f.failing {
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	f.retry = time.AfterFunc(time.Until(next), f.retryDue)
}

// retryDue tries the rows whose time has come; none where they have left.
func (f *Forwarder) retryDue() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.retry = nil
	now := time.Now()
	var due []*row
	for r, at := range f.failing {
		if !at.After(now) {
			due = append(due, r)
		}
	}
	f.tryThese(due)
	f.schedule()
}
