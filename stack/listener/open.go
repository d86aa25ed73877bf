package listener

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"syscall"
)

// # Theory of operation
//
// A Spec means a number of places: its ports, on each address that the Policy
// gives it. Every place is open, with its socket, or missing, with the reason.
// Retry tries what is missing; Close makes all of it missing. The outcome
// follows from the two lists and nothing else:
//
//	nothing missing                                    forwarded
//	only a family that the host has not got, of two    forwarded, with a note
//	else                                               failed, naming the first
//
// Two kinds of publish are all or nothing. Port 0 is one number in both
// families, so one of them alone is worth nothing. And a range that takes the
// daemon's last descriptor would take the clients of every other publish with
// it, so it gives all of them back.

// pickAttempts bounds how often the kernel is asked for a number that is free
// in both families. If half of the ephemeral ports were in use in one of them,
// all tries, each for another number, would fail once in 2^16 times.
const pickAttempts = 16

// An Opened has the sockets of one publish. It is not safe for concurrent use;
// its sockets are.
type Opened struct {
	group   *Group
	spec    Spec
	addrs   []netip.Addr
	token   any
	open    []*Socket
	missing []missing
	picked  uint16 // of host port 0: the number there was last

	// The outcome, less what can be told from the above.
	state  State
	detail string
	err    error
}

// A missing place is one without a socket.
type missing struct {
	addr  netip.Addr
	index uint16
	err   error // why; nil before the first try
}

// Open binds all that s means under p: both families, a whole range. Where one
// place cannot be bound the others are and carry traffic (C-5). Every socket
// has token, and its Index in the range.
//
// Open never returns nil and has no error: Outcome tells what became of s. A
// Spec that is not valid, or never possible on this system (C-8), is Skipped.
// The caller closes the Opened before it closes g.
func Open(g *Group, s Spec, p Policy, token any) *Opened {
	o := &Opened{group: g, spec: s, addrs: p.Addrs(s.Host.Addr()), token: token}
	if err := s.Validate(); err != nil {
		o.settle(Skipped, err.Error(), err)
		return o
	}
	if detail := lowPortSkipped(runtime.GOOS, os.Geteuid(), netip.AddrPortFrom(o.addrs[0], s.Host.Port())); detail != "" {
		o.settle(Skipped, detail, ErrDenied)
		return o
	}
	o.missAll()
	o.retry()
	return o
}

// Outcome is what became of the Spec at the last try. RetryAt and Since are the
// caller's to set. A Forwarded one has a Detail when the host lacks a family
// (FB-059).
func (o *Opened) Outcome() Outcome {
	return Outcome{Spec: o.spec, State: o.state, Detail: o.detail, Err: o.err, Bound: o.Bound()}
}

// Bound is where sockets are open, as in an Outcome. The slice is the caller's.
func (o *Opened) Bound() []netip.AddrPort {
	if len(o.open) == 0 {
		return nil
	}
	bound := make([]netip.AddrPort, 0, len(o.addrs))
	for _, s := range o.open {
		if s.index == 0 {
			bound = append(bound, s.addr)
		}
	}
	slices.SortFunc(bound, netip.AddrPort.Compare) // IPv4 first
	return bound
}

// Sockets returns the open sockets. The slice is the caller's.
func (o *Opened) Sockets() []*Socket { return slices.Clone(o.open) }

// Retry tries to bind what is not bound, and leaves alone what is: after a
// failure, and after Close. A publish with host port 0 gets the number it had
// before if that is free (C-27). It returns the new Outcome.
func (o *Opened) Retry() Outcome {
	if len(o.missing) > 0 {
		o.retry()
	}
	return o.Outcome()
}

// retry tries to bind the missing places; there are some.
func (o *Opened) retry() {
	if o.spec.Host.Port() == 0 {
		o.pick()
	} else {
		o.bindMissing()
	}
	o.judge()
}

// Close closes all sockets; their ports are free when it returns (C-4). Retry
// opens them again. Closing twice is no error.
func (o *Opened) Close() {
	for _, s := range o.open {
		_ = s.Close() // close(2) of a socket reports nothing that could be acted upon
	}
	o.open = nil
	if o.state != Skipped {
		o.missAll()
	}
}

// missAll makes every place missing, the first port's first.
func (o *Opened) missAll() {
	o.missing = make([]missing, 0, int(o.spec.Ports)*len(o.addrs))
	for i := range o.spec.Ports {
		for _, a := range o.addrs {
			o.missing = append(o.missing, missing{addr: a, index: i})
		}
	}
}

// bindMissing binds the missing places of a Spec with numbers.
func (o *Opened) bindMissing() {
	o.open = slices.Grow(o.open, len(o.missing))
	still := o.missing[:0]
	for _, m := range o.missing {
		s, err := o.bind(m, o.spec.Host.Port()+m.index)
		if err == nil {
			err = o.serve(s)
		}
		if outOfDescriptors(err) {
			o.Close()
			o.missing[0].err = err
			return
		}
		if err != nil {
			m.err = err
			still = append(still, m)
		}
	}
	if o.missing = still; len(still) == 0 {
		o.missing = nil // a range's worth of memory
	}
}

// pick binds one number that is free on every address. The sockets go into
// service when all are there. Those of a number that failed stay bound to the
// end, so that the kernel does not offer it again: it prefers the odd ones of
// the lower half to a fault (inet_csk_find_open_port).
func (o *Opened) pick() {
	var rejected []*Socket
	defer func() { closeAll(rejected) }()
	for try := range pickAttempts {
		port := uint16(0)
		if try == 0 {
			port = o.picked
		}
		o.missing = nil
		var bound []*Socket
		taken := false
		for _, a := range o.addrs {
			m := missing{addr: a}
			s, err := o.bind(m, port)
			if err == nil {
				port = s.Addr().Port()
				bound = append(bound, s)
				continue
			}
			m.err = err
			o.missing = append(o.missing, m)
			taken = taken || port != 0 && errors.Is(err, syscall.EADDRINUSE)
		}
		if _, fatal := o.worst(len(bound) > 0); fatal {
			rejected = append(rejected, bound...)
			if taken {
				continue
			}
			return
		}
		for _, s := range bound {
			if err := o.serve(s); err != nil {
				closeAll(bound)
				o.Close()
				o.missing[0].err = err
				return
			}
		}
		o.picked = port
		return
	}
}

func (o *Opened) bind(m missing, port uint16) (*Socket, error) {
	return o.group.bind(o.spec.Proto, netip.AddrPortFrom(m.addr, port), o.token, m.index)
}

// serve puts a bound socket into service; on error it is closed.
func (o *Opened) serve(s *Socket) error {
	if err := o.group.add(s); err != nil {
		return err
	}
	o.open = append(o.open, s)
	return nil
}

func closeAll(sockets []*Socket) {
	for _, s := range sockets {
		_ = s.Close()
	}
}

func outOfDescriptors(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// worst returns the missing place to name, and whether it makes the row Failed.
// others says that other places are open.
func (o *Opened) worst(others bool) (m missing, fatal bool) {
	for _, m := range o.missing {
		// Only a family that nobody asked for by name may be absent.
		if m.err != nil && (len(o.addrs) == 1 || !familyAbsent(m.addr, m.err)) {
			return m, true
		}
	}
	for _, m := range o.missing {
		if m.err != nil {
			return m, !others
		}
	}
	return missing{}, len(o.missing) > 0
}

// judge sets the outcome from what is open and what is missing.
func (o *Opened) judge() {
	m, fatal := o.worst(len(o.open) > 0)
	switch {
	case len(o.missing) == 0:
		o.settle(Forwarded, "", nil)
	case !fatal:
		o.settle(Forwarded, fmt.Sprintf("%s skipped: the host has no %s", m.addr, family(m.addr)), nil)
	case o.spec.Host.Port() == 0 && errors.Is(m.err, syscall.EADDRINUSE):
		o.settle(Failed, fmt.Sprintf("no host port was found that is free on %s", addrList(o.addrs)),
			fmt.Errorf("%w: %w", ErrInUse, m.err))
	default:
		port := o.spec.Host.Port() + m.index
		state, detail, cause := Explain(o.spec.Proto, netip.AddrPortFrom(m.addr, port), m.err)
		if n := len(o.missing) - 1; n > 0 {
			detail += fmt.Sprintf("; %d more of %d sockets could not be bound", n, len(o.missing)+len(o.open))
		}
		o.settle(state, detail, cause)
	}
}

// addrList is "127.0.0.1 and ::1", or the one there is.
func addrList(addrs []netip.Addr) string {
	s := addrs[0].String()
	for _, a := range addrs[1:] {
		s += " and " + a.String()
	}
	return s
}

func (o *Opened) settle(state State, detail string, err error) {
	o.state, o.detail, o.err = state, detail, err
}
