package stack

import (
	"errors"
	"net/netip"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// An inbox is what the group's goroutine reads datagrams into. The zero value
// takes its memory with the first.
type inbox struct {
	reader *listener.Reader
	// run are datagrams of one client's that follow each other: its flow takes
	// them together, and so does the guest.
	run  [][]byte
	from relay.UDPKey
}

// maxRun bounds a run: as many datagrams as the guest may be given as one.
const maxRun = 64

// Readable implements listener.Handler: it hands on what clients have sent.
func (f *Forwarder) Readable(s *listener.Socket) {
	in := &f.inbox
	if in.reader == nil {
		in.reader, in.run = listener.NewReader(), make([][]byte, 0, maxRun)
	}
	messages, err := in.reader.Read(s)
	if err != nil {
		return // nothing there, closed, or one datagram lost; the group comes back
	}
	for i := range messages {
		m := &messages[i]
		from := relay.UDPKey{Socket: s, Client: m.Client, Local: m.Local}
		if from != in.from {
			f.deliver(in)
			in.from = from
		}
		for more := true; more; {
			if len(in.run) == maxRun {
				f.deliver(in)
			}
			var datagram []byte
			datagram, more = m.Next()
			in.run = append(in.run, datagram)
		}
	}
	f.deliver(in)
	in.from = relay.UDPKey{} // holds no socket that has gone
}

// deliver passes in's run on to its flow.
func (f *Forwarder) deliver(in *inbox) {
	for run := in.run; len(run) > 0; {
		n, err := f.sessions.Deliver(in.from, run)
		if err == nil {
			break
		}
		in.from.Socket.(*listener.Socket).Token().(*row).refuse(datagramRefusal(err))
		run = run[n+1:]
	}
	in.run = in.run[:0]
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
func (h udpHandler) Reply(k relay.UDPKey, datagrams []relay.Datagram) (bytes int, err error) {
	s := k.Socket.(*listener.Socket)
	for len(datagrams) > 0 {
		var n int
		n, err = s.Send(datagrams, k.Client, k.Local)
		for _, d := range datagrams[:n] {
			bytes += len(d[0]) + len(d[1])
		}
		if err == nil {
			break
		}
		s.Token().(*row).refuse(droppedDatagram)
		datagrams = datagrams[n+1:]
	}
	return bytes, err
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
