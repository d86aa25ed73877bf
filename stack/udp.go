package stack

import (
	"errors"
	"net/netip"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

const (
	// maxDatagram is the longest UDP payload: 65535 - 20 - 8 (IPv4).
	maxDatagram = 65507
	// datagramsPerWake bounds what one socket may take of the group's goroutine
	// before the others have their turn.
	datagramsPerWake = 64
)

// Readable implements listener.Handler: it hands on what clients have sent.
func (f *Forwarder) Readable(s *listener.Socket) {
	for range datagramsPerWake {
		n, client, local, trunc, err := s.ReadFrom(f.datagram)
		if err != nil {
			return // nothing more, closed, or one datagram lost; the group comes back
		}
		r := s.Token().(*row)
		if trunc {
			r.refuse(droppedDatagram)
			continue
		}
		err = f.sessions.Deliver(relay.UDPKey{Socket: s, Client: client, Local: local}, f.datagram[:n])
		if err != nil {
			r.refuse(datagramRefusal(err))
		}
	}
}

func datagramRefusal(err error) string {
	var refused refusedError
	if errors.As(err, &refused) {
		return string(refused)
	}
	if reason := refusal(err); reason != refusedOther {
		return reason
	}
	return droppedDatagram
}

// A refusedError is a flow that could not be opened, by its reason.
type refusedError string

func (e refusedError) Error() string { return "flow refused: " + string(e) }

// udpHandler is the Forwarder's side of relay.Sessions.
type udpHandler struct{ f *Forwarder }

// Open implements relay.UDPHandler.
func (h udpHandler) Open(k relay.UDPKey) (relay.UDPFlow, error) {
	s := k.Socket.(*listener.Socket)
	r := s.Token().(*row)
	vm := r.vm.Load()
	if vm == nil {
		return nil, refusedError(refusedNoVM)
	}
	if !r.allows(k.Client.Addr()) {
		return nil, refusedError(refusedRange)
	}
	guest := r.target(vm, s.Index())
	host := netip.AddrPortFrom(k.Local, s.Addr().Port())
	fl, refused := h.f.flows.start(r, nil, k.Client, host, guest)
	if refused != "" {
		return nil, refusedError(refused)
	}
	conn, err := vm.Guest.DialUDP(guest)
	if err != nil {
		h.f.flows.end(fl)
		return nil, err
	}
	fl.setSource(conn.LocalAddr)
	u := &udpFlow{GuestPacketConn: conn, f: h.f, flow: fl}
	fl.own(func() { _ = conn.Close() })
	return u, nil
}

// Reply implements relay.UDPHandler.
func (h udpHandler) Reply(k relay.UDPKey, segs [][]byte) error {
	s := k.Socket.(*listener.Socket)
	err := s.WriteTo(segs, k.Client, k.Local)
	if err != nil {
		s.Token().(*row).refuse(droppedDatagram)
	}
	return err
}

// Refused implements relay.UDPHandler (C-23).
func (h udpHandler) Refused(k relay.UDPKey) {
	s := k.Socket.(*listener.Socket)
	s.Token().(*row).refuse(refusedByGuest)
	h.f.icmp.portUnreachable(k.Client, netip.AddrPortFrom(k.Local, s.Addr().Port()))
}

// A udpFlow is a flow's life in the ledger beside its endpoint.
type udpFlow struct {
	relay.GuestPacketConn
	f    *Forwarder
	flow *flow
}

// Passed implements relay.UDPFlow.
func (u *udpFlow) Passed(toGuest bool, n int) {
	if toGuest {
		u.flow.toGuest.Add(n)
		return
	}
	u.flow.toHost.Add(n)
}

// Ended implements relay.UDPFlow.
func (u *udpFlow) Ended(evicted bool) {
	if evicted {
		u.flow.row.refuse(refusedEvicted)
	}
	u.f.flows.end(u.flow)
}
