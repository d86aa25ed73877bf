package stack

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// leaveWatch is how long a dial runs before it is watched whether the client
// leaves meanwhile: longer than any guest nearby takes to answer, so that the
// usual flow pays nothing for it.
const leaveWatch = 20 * time.Millisecond

// errLeft says that the client left before the guest answered.
var errLeft = errors.New("client left")

// errDials says that too many guests have not answered yet.
var errDials = errors.New("too many dials under way")

// A dialing is a connection to the guest under way, for one client's flow. It holds
// no goroutine: the guest's answer, the client's leaving and the clock each come
// by a call.
type dialing struct {
	f    *Forwarder
	flow *flow
	then func(relay.GuestConn, error)

	mu     sync.Mutex
	cause  error  // why it was given up
	over   bool   // then was called, or is about to be
	cancel func() // nil until the Guest has been asked
	timer  *time.Timer
}

// startDial connects fl to the guest and calls then with the outcome, once, perhaps
// before it returns, unless the client leaves or the flow is aborted meanwhile.
func (f *Forwarder) startDial(fl *flow, vm *VM, then func(relay.GuestConn, error)) {
	if f.flows.dials.Add(1) > int64(f.flows.limits.Dials) {
		f.flows.dials.Add(-1)
		then(nil, errDials)
		return
	}
	d := &dialing{f: f, flow: fl, then: then}
	fl.own(func() { d.giveUp(net.ErrClosed) })
	cancel := vm.Guest.StartTCP(fl.guest, d.answered)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.over:
	case d.cause != nil:
		go cancel() // answered may be called from within
	default:
		d.cancel = cancel
		d.timer = time.AfterFunc(min(leaveWatch, f.opts.Timeouts.Connect), d.watch)
	}
}

// answered is told the Guest's outcome.
func (d *dialing) answered(guest relay.GuestConn, err error) {
	d.mu.Lock()
	if d.timer != nil {
		d.timer.Stop()
	}
	if d.over {
		d.mu.Unlock()
		return
	}
	d.over = true
	if err != nil && d.cause != nil {
		err = d.cause
	}
	d.mu.Unlock()
	d.f.flows.dials.Add(-1)
	d.then(guest, err)
}

// giveUp ends the dial, the first time, for why.
func (d *dialing) giveUp(why error) {
	d.mu.Lock()
	first := !d.over && d.cause == nil
	if first {
		d.cause = why
	}
	cancel := d.cancel
	d.mu.Unlock()
	if first && cancel != nil {
		cancel()
	}
}

// watch begins to look after a dial that takes its time.
func (d *dialing) watch() {
	limit := d.f.opts.Timeouts.Connect
	d.mu.Lock()
	defer d.mu.Unlock() // Watch is before that of who copies, or not at all
	if d.over {
		return
	}
	d.timer = time.AfterFunc(limit-min(leaveWatch, limit), func() { d.giveUp(syscall.ETIMEDOUT) })
	// A client that cannot be watched is left to the clock.
	_ = d.flow.conn.Watch(func(r listener.Ready) {
		if r&listener.ReadyEnd != 0 && d.flow.conn.Gone() {
			d.giveUp(errLeft)
		}
	})
}
