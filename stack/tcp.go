package stack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// leaveWatch is how long a dial runs before it is watched whether the client
// leaves meanwhile: longer than any guest nearby takes to answer, so that the
// usual flow pays nothing for it.
const leaveWatch = 20 * time.Millisecond

// Accepted implements listener.Handler: it gives the client its flow.
func (f *Forwarder) Accepted(s *listener.Socket, c *listener.Conn) {
	r := s.Token().(*row)
	vm := r.vm.Load()
	if vm == nil {
		r.refuse(refusedNoVM)
		c.Abort()
		return
	}
	if !r.allows(c.RemoteAddr().Addr()) {
		r.refuse(refusedRange)
		c.Abort()
		return
	}
	if f.reserved(c) {
		r.refuse(refusedNoFD)
		c.Abort()
		return
	}
	guest := r.target(vm, s.Index())
	fl, refused := f.flows.start(r, c, c.RemoteAddr(), c.LocalAddr(), guest)
	if refused != "" {
		r.refuse(refused)
		c.Abort()
		return
	}
	go f.serveTCP(fl, vm) // waited for by its row, which counts its flow
}

// reserved reports whether c has one of the descriptors that are not for flows.
func (f *Forwarder) reserved(c *listener.Conn) (reserved bool) {
	most := f.flows.limits.Descriptors
	if most == 0 {
		return false
	}
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { reserved = fd >= most })
	}
	return reserved && err == nil
}

// target returns where the row's port of that index leads.
func (r *row) target(vm *VM, index uint16) netip.AddrPort {
	addr := r.spec.Target.Addr.Addr()
	if !addr.IsValid() {
		addr = vm.node()
	}
	return netip.AddrPortFrom(addr, r.spec.Target.Addr.Port()+index)
}

// serveTCP carries one client's flow from the dial to its end.
func (f *Forwarder) serveTCP(fl *flow, vm *VM) {
	defer f.flows.end(fl)
	c := fl.conn
	fl.own(c.Abort)
	guest, err := f.dial(fl, vm)
	if err != nil {
		fl.row.refuse(refusal(err))
		c.Abort() // a reset: the client must not take it for an end (C-15)
		return
	}
	fl.ownOnly(c.Abort, guest.Abort)
	fl.setSource(guest.LocalAddr)
	fl.half.Store(int32(relay.HalfNone))
	end := relay.TCP(c, guest, relay.Options{
		HalfClose: f.opts.Timeouts.HalfClose,
		ToGuest:   &fl.toGuest,
		ToHost:    &fl.toHost,
		Halved:    func(h relay.Half) { fl.half.Store(int32(h)) },
	})
	f.flows.relayed(fl, end)
}

// errLeft says that the client left before the guest answered.
var errLeft = errors.New("client left")

// errDials says that too many guests have not answered yet.
var errDials = errors.New("too many dials under way")

// dial connects to the guest, unless the client leaves or the flow is aborted
// meanwhile.
func (f *Forwarder) dial(fl *flow, vm *VM) (relay.GuestConn, error) {
	if f.flows.dials.Add(1) > int64(f.flows.limits.Dials) {
		f.flows.dials.Add(-1)
		return nil, errDials
	}
	defer f.flows.dials.Add(-1)
	ctx, leave := context.WithCancelCause(f.ctx)
	defer leave(nil)
	fl.own(func() { leave(net.ErrClosed) })

	// The usual guest answers before any of this runs. WaitGone reads the
	// client's socket, so it has to be over before the relay does.
	limit := f.opts.Timeouts.Connect
	watched := make(chan struct{})
	watch := time.AfterFunc(min(leaveWatch, limit), func() {
		defer close(watched)
		limited, cancel := context.WithTimeout(ctx, limit-min(leaveWatch, limit))
		defer cancel()
		if fl.conn.WaitGone(limited) == nil {
			leave(errLeft)
			return
		}
		<-limited.Done() // also when the client's socket was closed on our side
		leave(syscall.ETIMEDOUT)
	})
	guest, err := vm.Guest.DialTCP(ctx, fl.guest)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if !watch.Stop() {
		leave(nil)
		<-watched
	}
	return guest, err
}

// refusal puts a failed dial in one word.
func refusal(err error) string {
	switch {
	case errors.Is(err, errLeft):
		return refusedLeft
	case errors.Is(err, errDials):
		return refusedLimit
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return refusedByGuest
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return refusedUnreachable
	case errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, context.DeadlineExceeded):
		return refusedTimeout
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return refusedNoPort
	case errors.Is(err, net.ErrClosed), errors.Is(err, context.Canceled):
		return refusedNoVM
	}
	return refusedOther
}

// AcceptError implements listener.Handler.
func (f *Forwarder) AcceptError(s *listener.Socket, err error) {
	reason := refusedNoFD
	if errors.Is(err, syscall.ECONNABORTED) {
		reason = refusedLeft
	}
	s.Token().(*row).refuse(reason)
}
