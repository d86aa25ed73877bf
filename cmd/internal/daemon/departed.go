package daemon

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

// # Theory of operation
//
// A container that stops takes its rows with it, and then nothing in the ledger
// says whose a host port was. So what a source wants no longer is kept for a
// while, for doctor alone: it is compared with what the source wanted before, on
// its way to the loop, which keeps both statements anyway.

const (
	// departedFor is how long it is known who had a host port: a person who finds it
	// closed asks within minutes.
	departedFor = 10 * time.Minute
	// maxDeparted bounds it: 256 of some 300 bytes.
	maxDeparted = 256
)

// A departure is a publish whose owner asks for it no more.
type departure struct {
	owner listener.Owner
	name  string // what people call the owner; empty for nothing
	spec  listener.Spec
	at    time.Time
}

// departures are the last publishes of containers and Services that have left. It
// is safe for concurrent use.
type departures struct {
	mu   sync.Mutex
	last []departure // oldest first
}

// compare keeps what of before is not in now.
func (d *departures) compare(before, now []reconcile.Want) {
	wanted := make(map[listener.Owner][]listener.Spec, len(now))
	for _, w := range now {
		wanted[w.Owner] = w.Specs
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range before {
		for _, s := range w.Specs {
			if slices.Contains(wanted[w.Owner], s) {
				continue
			}
			one := departure{owner: w.Owner, spec: s, at: time.Now()}
			for _, n := range w.Names { // the bare one is shorter than that with a Compose project
				if one.name == "" || len(n.Name) < len(one.name) {
					one.name = n.Name
				}
			}
			d.last = append(d.last, one)
		}
	}
	if more := len(d.last) - maxDeparted; more > 0 {
		d.last = slices.Delete(d.last, 0, more)
	}
}

// who returns who had a host port last, if that was not long ago.
func (d *departures) who(p hostPort) (departure, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, one := range slices.Backward(d.last) {
		if time.Since(one.at) < departedFor && one.had(p) {
			return one, true
		}
	}
	return departure{}, false
}

func (d *departure) had(p hostPort) bool {
	s := d.spec
	first, addr := s.Host.Port(), s.Host.Addr()
	return (p.proto == "" || p.proto == s.Proto.String()) && first <= p.port && p.port-first < s.Ports &&
		(!p.addr.IsValid() || !addr.IsValid() || addr.IsUnspecified() || addr.Unmap() == p.addr)
}

// A watchedSource keeps in departed what its source wants no longer.
type watchedSource struct {
	reconcile.Source
	departed *departures
	before   []reconcile.Want // of the last snapshot, of earlier runs too
}

// Run implements reconcile.Source.
func (s *watchedSource) Run(ctx context.Context, out chan<- reconcile.Snapshot) error {
	in := make(chan reconcile.Snapshot)
	var passing sync.WaitGroup
	passing.Go(func() {
		for snap := range in {
			select {
			case out <- snap:
				s.departed.compare(s.before, snap.Wants)
				s.before = snap.Wants
			case <-ctx.Done(): // the rest goes nowhere
			}
		}
	})
	err := s.Source.Run(ctx, in)
	close(in)
	passing.Wait()
	return err
}
