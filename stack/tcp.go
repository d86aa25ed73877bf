package stack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

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
	f.serveTCP(fl, vm)
}

// reserved reports whether c has one of the descriptors that are not for flows.
func (f *Forwarder) reserved(c *listener.Conn) (reserved bool) {
	most := f.flows.limits.Descriptors
	if most == 0 {
		return false
	}
	err := c.Control(func(fd uintptr) { reserved = fd >= most })
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

// serveTCP dials the guest for one client's flow and leaves it to the relay. It
// does not wait.
func (f *Forwarder) serveTCP(fl *flow, vm *VM) {
	c := fl.conn
	fl.own(c.Abort)
	f.startDial(fl, vm, func(guest relay.GuestConn, err error) {
		if err != nil {
			fl.row.refuse(refusal(err))
			c.Abort() // a reset: the client must not take it for an end (C-15)
			f.flows.end(fl)
			return
		}
		fl.ownOnly(c.Abort, guest.Abort)
		fl.setSource(guest.LocalAddr)
		fl.half.Store(int32(relay.HalfNone))
		relay.Start(client{c}, guest, relay.Options{
			HalfClose: f.opts.Timeouts.HalfClose,
			ToGuest:   &fl.toGuest,
			ToHost:    &fl.toHost,
			Halved:    func(h relay.Half) { fl.half.Store(int32(h)) },
		}, func(end relay.End) {
			f.flows.relayed(fl, end)
			f.flows.end(fl)
		})
	})
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
