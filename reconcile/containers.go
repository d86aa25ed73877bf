package reconcile

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/stack/listener"
)

// Theory of operation of Containers.
//
// It knows one thing of the engine: its last complete listing. All that
// it wants is made of that anew each time, so that nothing depends on which
// events came, or in which order (C-31, C-33).
//
//	          subscribed, event ──► stale ──┐
//	follow ──►                              ├─► list ──► listed ──► Snapshot
//	          30 s, or 2 s after a failure ─┘              ▲  │
//	                                                       │  ▼
//	                                               verdicts of probes (C-35)
//
// One goroutine keeps the engine's events subscribed and marks the listing stale
// once the subscription stands and with every event; another, Run's own, lists
// whenever it is stale. A listing begins after the mark it answers was taken
// away, so an event that comes while it is under way is followed by another
// listing, and one that came before the subscription stood is in the first. A
// mark is one however many events made it, and listings keep a distance: a burst
// is a few listings.
//
// A stream that ends is subscribed again, which marks the listing stale. An
// engine that cuts idle streams costs a listing each time, and nothing else: equal
// listings make equal wants. One that cannot be subscribed again is asked for a
// listing, too, to see whether it is there.

const (
	// containersEvery is the rhythm of comparisons, whatever the events said.
	containersEvery = 30 * time.Second
	// containersRetry is the rhythm while the last listing failed, and before the
	// first one (C-30).
	containersRetry = 2 * time.Second
	// listingLimit ends a listing. An engine that takes half a minute is slow, one
	// that takes twice as long is as good as dead.
	listingLimit = time.Minute
	// Between the end of a listing and the next there is as much time as it took,
	// so that an engine is busy with us for half of its time at most. Less than
	// the least is no use, as an engine takes longer than that to start a
	// container; and more than the most would be noticed.
	listingGapMin = 100 * time.Millisecond
	listingGapMax = 500 * time.Millisecond
	// A stream that ended is opened again within 800 ms, so that what changed
	// meanwhile is in force within a second of the engine's return (FB-079).
	watchBackoffMin = 100 * time.Millisecond
	watchBackoffMax = 800 * time.Millisecond
)

// containersName is the name of the source.
const containersName = "containers"

// containerEngine is what Containers asks.
type containerEngine interface {
	// Containers lists the running containers, completely or not at all. Its
	// errors are sentences for people.
	Containers(ctx context.Context) ([]docker.Container, error)
	// Watch calls subscribed once the engine sends events, and changed with each
	// of them, until the stream ends.
	Watch(ctx context.Context, subscribed func(), changed func(docker.Event)) error
}

var _ containerEngine = (*docker.Client)(nil)

// ContainersOptions are what NewContainers takes. All but Addresses must be set.
type ContainersOptions struct {
	VM         string
	Generation uint64
	Engine     containerEngine
	Policy     listener.Policy
	// Node is the VM's node address.
	Node netip.Addr
	// HostAddr says whether the host has an address.
	HostAddr func(netip.Addr) bool
	// Addresses gives each container an address of its own (`address: loopback`);
	// nil when names lead to the host's loopback.
	Addresses *Addresses
	// Reach opens a TCP connection to an address behind the node, through the VM's
	// stack, and closes it at once. Its error is, by errors.Is, ECONNREFUSED where
	// somebody was there to refuse. It returns soon after ctx has ended, and is
	// called concurrently.
	Reach func(ctx context.Context, to netip.AddrPort) error
	Log   *slog.Logger
}

// Containers is the Source of one life of a VM that publishes what the guest's
// container engine publishes, and names the containers (C-30 to C-37).
//
// Its wants have owners of kind docker, in the order their containers were
// started. The names of containers and what else is shown come from the guest:
// package docker has checked them.
type Containers struct {
	ContainersOptions
	status containersStatus
}

// NewContainers returns the source. It asks the engine nothing before Run.
func NewContainers(o ContainersOptions) *Containers {
	o.Log = o.Log.With("vm", o.VM, "source", containersName)
	return &Containers{ContainersOptions: o, status: containersStatus{log: o.Log}}
}

// Name implements Source.
func (c *Containers) Name() string { return containersName }

// Run implements Source. An engine that fails does not end it: it asks again by
// itself.
func (c *Containers) Run(ctx context.Context, out chan<- Snapshot) error {
	ctx, cancel := context.WithCancel(ctx)
	r := &containersRun{
		Containers: c, out: out, stale: make(chan struct{}, 1),
		reach: newReach(c.Reach), own: make(map[string]netip.Addr),
	}
	var watching sync.WaitGroup
	watching.Go(func() { r.follow(ctx) })
	defer r.releaseAll()
	defer r.reach.wait()
	defer watching.Wait()
	defer cancel()
	return r.run(ctx)
}

// containersRun is what Containers knows during one Run. It belongs to Run's
// goroutine, but for stale.
type containersRun struct {
	*Containers
	out   chan<- Snapshot
	stale chan struct{} // holds one while the listing may be out of date

	listed []docker.Container // the last complete listing
	good   bool               // there was one
	reach  *reach
	own    map[string]netip.Addr // of the containers that hold an address
}

// follow keeps the engine's events subscribed.
func (r *containersRun) follow(ctx context.Context) {
	retry := backoff{min: watchBackoffMin, max: watchBackoffMax}
	for {
		began := time.Now()
		err := r.Engine.Watch(ctx, func() {
			r.status.subscribed()
			r.mark()
		}, func(docker.Event) { r.mark() })
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > watchBackoffMax {
			retry.reset()
		}
		if r.status.unsubscribed(err) == 2 {
			r.mark() // it ended and does not open: is the engine there at all?
		}
		if !sleep(ctx, retry.delay()) {
			return
		}
	}
}

// mark makes the listing one that is out of date.
func (r *containersRun) mark() {
	select {
	case r.stale <- struct{}{}:
	default:
	}
}

// run lists whenever it is time to, until ctx ends.
func (r *containersRun) run(ctx context.Context) error {
	compare := time.NewTimer(containersRetry)
	defer compare.Stop()
	gap := time.NewTimer(0)
	defer gap.Stop()
	var stale <-chan struct{} // nil while the gap lasts
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-gap.C:
			stale = r.stale
			continue
		case found := <-r.reach.found:
			r.reach.take(found)
			r.send(ctx)
			continue
		case <-stale:
		case <-compare.C:
		}
		// What was marked up to now is in this listing.
		select {
		case <-r.stale:
		default:
		}
		began := time.Now()
		ok := r.list(ctx)
		took := time.Since(began)
		stale = nil
		gap.Reset(min(max(took, listingGapMin), listingGapMax))
		if ok {
			compare.Reset(containersEvery)
			r.send(ctx)
		} else {
			compare.Reset(containersRetry)
		}
	}
}

// list asks the engine for its containers. When it fails nothing has changed
// (C-31).
func (r *containersRun) list(ctx context.Context) bool {
	limited, cancel := context.WithTimeout(ctx, listingLimit)
	defer cancel()
	r.status.asking()
	containers, err := r.Engine.Containers(limited)
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		r.status.failed(err)
		return false
	}
	r.status.listed(len(containers))
	containers = slices.Clone(containers)
	slices.SortFunc(containers, func(a, b docker.Container) int {
		return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.ID, b.ID))
	})
	r.listed, r.good = containers, true
	return true
}

// send states what the last listing asks for, as far as is known which addresses
// answer, and has found out what is not known.
func (r *containersRun) send(ctx context.Context) {
	if !r.good {
		return
	}
	r.acquire()
	snap := Snapshot{Source: containersName, VM: r.VM, Generation: r.Generation, Wants: make([]Want, 0, len(r.listed))}
	r.reach.begin()
	for i := range r.listed {
		snap.Wants = append(snap.Wants, r.want(&r.listed[i]))
	}
	r.reach.probe(ctx)
	select {
	case r.out <- snap:
	case <-ctx.Done():
	}
}

// owner returns the owner of a container's wants.
func (c *Containers) owner(id string) listener.Owner {
	return listener.Owner{Kind: listener.KindDocker, ID: id, VM: c.VM}
}

// acquire gives the listed containers addresses of their own, and takes back
// those of containers that are gone.
func (r *containersRun) acquire() {
	if r.Addresses == nil {
		return
	}
	listed := make(map[string]bool, len(r.listed))
	for i := range r.listed {
		listed[r.listed[i].ID] = true
	}
	for id := range r.own {
		if !listed[id] {
			r.Addresses.Release(r.owner(id))
			delete(r.own, id)
		}
	}
	for i := range r.listed {
		id := r.listed[i].ID
		if _, has := r.own[id]; has {
			continue
		}
		if addr, ok := r.Addresses.Acquire(r.owner(id)); ok {
			r.own[id] = addr
		}
	}
}

// releaseAll takes back all addresses.
func (r *containersRun) releaseAll() {
	for id := range r.own {
		r.Addresses.Release(r.owner(id))
	}
}
