package reconcile

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/guest/docker"
)

const (
	// reachLimit ends one probe: TCP sends its first packet again after a second,
	// so what has not answered by then was lost or is not let through.
	reachLimit = time.Second
	// reachAtOnce bounds the probes under way, roundLimit a whole round, which is
	// less than the 30 s between two: 16 × 15 = 240 addresses that do not answer.
	// Those that had no turn keep what was known of them.
	reachAtOnce = 16
	roundLimit  = 15 * time.Second
	// reachMisses is how many rounds in a row an address that answered may miss
	// before its listener is closed and its flows reset. Rounds follow complete
	// listings only, so a VM that is paused or stalled misses none.
	reachMisses = 2
)

// A reachState says whether an address behind the node answers.
type reachState uint8

const (
	unknown reachState = iota
	answers
	silent
)

// reach knows which addresses of containers answer, for ports that the engine
// publishes on the guest's loopback (C-35). It belongs to Run's goroutine, which
// brackets a look at all containers with begin and probe, and hands what comes
// out of found to take.
//
// An address is chosen because it answers, not by its place in the list, and
// stays chosen for as long as it does (FB-086). A refusal is an answer: the
// container may not listen yet. A datagram may be answered by nothing, so UDP
// ports are asked by TCP, too; one that nobody answers for leads to the first
// address, for silence says nothing of it.
type reach struct {
	dial  func(context.Context, netip.AddrPort) error
	found chan map[netip.AddrPort]bool
	round sync.WaitGroup

	known   map[netip.AddrPort]known
	wanted  map[netip.AddrPort]bool // asked for since begin
	chosen  map[pin]netip.Addr      // since begin
	before  map[pin]netip.Addr      // chosen before that
	probing bool                    // a round is under way
	began   time.Time               // when the last round of all began
}

type known struct {
	state  reachState
	misses int // rounds in a row, while it answers
}

// A pin is one port of a container.
type pin struct {
	id, proto string
	port      uint16
}

func newReach(dial func(context.Context, netip.AddrPort) error) *reach {
	return &reach{dial: dial, found: make(chan map[netip.AddrPort]bool), known: make(map[netip.AddrPort]known)}
}

// begin begins a look at all containers.
func (r *reach) begin() {
	r.before, r.chosen = r.chosen, make(map[pin]netip.Addr)
	r.wanted = make(map[netip.AddrPort]bool)
}

// choose says where the binding of a container is reached, the zero address where
// there is nothing to try, and whether it is.
func (r *reach) choose(ct *docker.Container, e docker.Binding) (to netip.AddrPort, state reachState) {
	addrs := slices.DeleteFunc(slices.Clone(ct.Addrs), func(a netip.Addr) bool {
		return !a.IsGlobalUnicast() || a.Zone() != "" // link-local addresses are no way through a router
	})
	if len(addrs) == 0 {
		return netip.AddrPort{}, silent
	}
	p := pin{ct.ID, e.Proto, e.Port}
	state = silent
	var at netip.Addr
	for _, a := range addrs {
		candidate := netip.AddrPortFrom(a, e.Port)
		r.wanted[candidate] = true
		switch k := r.known[candidate]; {
		case k.state == answers && (state != answers || a == r.before[p]):
			at, state = a, answers
		case k.state == unknown && state == silent:
			state = unknown
		}
	}
	switch {
	case state == answers:
		r.chosen[p] = at
	case e.Proto == "udp" && state == silent:
		at, state = addrs[0], answers
	default:
		at = addrs[0]
	}
	return netip.AddrPortFrom(at, e.Port), state
}

// probe ends the look. It begins a round of probes when one is due: of every
// address each 30 s, of those that nothing is known of at once.
func (r *reach) probe(ctx context.Context) {
	for a := range r.known {
		if !r.wanted[a] {
			delete(r.known, a)
		}
	}
	if r.probing {
		return
	}
	all := time.Since(r.began) >= containersEvery
	var ask []netip.AddrPort
	for a := range r.wanted {
		if all || r.known[a].state == unknown {
			ask = append(ask, a)
		}
	}
	if len(ask) == 0 {
		return
	}
	if all {
		r.began = time.Now()
	}
	r.probing = true
	r.round.Go(func() {
		found := r.ask(ctx, ask)
		select {
		case r.found <- found:
		case <-ctx.Done():
		}
	})
}

// ask probes addresses and returns whether they answer, those that had their
// turn.
func (r *reach) ask(ctx context.Context, addrs []netip.AddrPort) map[netip.AddrPort]bool {
	ctx, cancel := context.WithTimeout(ctx, roundLimit)
	defer cancel()
	next := make(chan netip.AddrPort)
	var mu sync.Mutex
	found := make(map[netip.AddrPort]bool, len(addrs))
	var askers sync.WaitGroup
	for range min(reachAtOnce, len(addrs)) {
		askers.Go(func() {
			for a := range next {
				limited, cancel := context.WithTimeout(ctx, reachLimit)
				err := r.dial(limited, a)
				cancel()
				if err != nil && ctx.Err() != nil {
					continue
				}
				mu.Lock()
				found[a] = err == nil || errors.Is(err, syscall.ECONNREFUSED)
				mu.Unlock()
			}
		})
	}
	for _, a := range addrs {
		select {
		case next <- a:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(next)
	askers.Wait()
	return found
}

// take takes what a round has found.
func (r *reach) take(found map[netip.AddrPort]bool) {
	r.probing = false
	for a, ok := range found {
		k := r.known[a]
		switch {
		case ok:
			k = known{state: answers}
		case k.state == answers && k.misses+1 < reachMisses:
			k.misses++
		default:
			k = known{state: silent}
		}
		r.known[a] = k
	}
}

// nextRound is when what does not answer is asked again; zero while nothing was
// asked yet.
func (r *reach) nextRound() time.Time {
	if r.began.IsZero() {
		return time.Time{}
	}
	return r.began.Add(containersEvery)
}

// wait waits for the round under way, whose context has ended.
func (r *reach) wait() { r.round.Wait() }
