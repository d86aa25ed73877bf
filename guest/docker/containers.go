package docker

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/client"
)

const (
	// inspectWithin bounds one inspection. The engine answers from memory, unless
	// it hangs on that container.
	inspectWithin = 2 * time.Second
	// inspectAgain is when a container that could not be inspected is tried again
	// though it looks the same.
	inspectAgain = time.Minute
	// overFor is how long the event of a container's end counts for more than
	// listings that still have it: the engine tells of the end first, and then takes
	// away what publishes each of its ports, which is 8 s for a hundred of them.
	overFor = 30 * time.Second
)

// Containers returns all running containers, the oldest start first, those of
// the same moment by ID. The list is complete, or there is an error. ctx bounds
// the call, which has no time limit of its own. The slices in it are kept for the
// next listing: the caller does not change them.
func (c *Client) Containers(ctx context.Context) ([]Container, error) {
	s, under, done, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	// Without All only running containers are listed, paused ones among them.
	listed, err := s.api.ContainerList((&call{max: listing}).of(under), client.ContainerListOptions{})
	if err != nil {
		return nil, c.fault(ctx, s, err)
	}
	if listed.Items == nil { // null: no evidence that nothing runs
		return nil, c.fault(ctx, s, &failure{"sent no list of containers"})
	}
	running := make(map[string]*container.Summary, len(listed.Items))
	for i := range listed.Items {
		l := &listed.Items[i]
		if !isID(l.ID) {
			return nil, c.fault(ctx, s, &failure{fmt.Sprintf("sent a container whose ID is none: %s", clean(l.ID, maxText))})
		}
		if l.State == container.StateRunning || l.State == container.StatePaused {
			running[l.ID] = l
		}
	}
	looked, err := c.look(under, s, running)
	if err != nil {
		return nil, c.fault(ctx, s, err)
	}
	all := slices.Collect(maps.Values(looked))
	slices.SortFunc(all, func(a, b Container) int {
		return cmp.Or(a.Started.Compare(b.Started), strings.Compare(a.ID, b.ID))
	})
	return all, nil
}

// A cache remembers what became of each container that was running at the last
// listing.
type cache struct {
	mu   sync.Mutex
	seen map[string]sight
}

// A sight is a container as it was when it looked the way that looks is the hash
// of.
type sight struct {
	looks uint64
	Container
	until time.Time // it is to be inspected again from then on; zero: not while it looks the same
	over  time.Time // when its end was heard of; zero before
}

func (c *cache) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen = nil
}

// heard takes in an event of a moment by the engine's clock. After its end a
// container is over, unless that was the end of an earlier run; after any other
// event one that runs is inspected again.
func (c *cache) heard(e Event, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.seen[e.ID]
	switch {
	case !ok:
	case e.Action == string(events.ActionDie) && v.until.IsZero() && !at.Before(v.Started):
		v.over = time.Now()
		c.seen[e.ID] = v
	case v.over.IsZero() || e.Action == string(events.ActionStart) || e.Action == string(events.ActionRestart):
		delete(c.seen, e.ID)
	}
}

// known returns what is remembered of a container that looks like that, and
// whether it is over.
func (c *cache) known(id string, looks uint64) (one Container, over, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.seen[id]
	switch {
	case !ok, v.looks != looks, !v.until.IsZero() && time.Now().After(v.until):
		return Container{}, false, false
	case !v.over.IsZero():
		return Container{}, true, time.Since(v.over) < overFor
	}
	return v.Container, false, true
}

// look makes Containers of what was listed, and inspects what is not known.
func (c *Client) look(ctx context.Context, s *session, listed map[string]*container.Summary) (map[string]Container, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	v := &visit{session: s, cancel: cancel, looked: make(map[string]Container, len(listed)), sights: make(map[string]sight)}
	var unknown []job
	for id, l := range listed {
		looks, lasting := appearance(l)
		one, over, ok := c.seen.known(id, looks)
		switch {
		case !ok || !lasting:
			unknown = append(unknown, job{l, looks})
		case !over:
			v.saw(sight{Container: one}, false)
		}
	}
	jobs := make(chan job)
	var wg sync.WaitGroup
	for range min(inspectors, len(unknown)) {
		wg.Go(func() { v.inspectAll(ctx, jobs) })
	}
	for _, j := range unknown {
		select {
		case jobs <- j:
		case <-ctx.Done():
		}
	}
	close(jobs)
	wg.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	c.seen.keep(listed, v.sights)
	return v.looked, nil
}

// keep drops what is not running any more and takes in what was seen.
func (c *cache) keep(running map[string]*container.Summary, sights map[string]sight) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range c.seen {
		if running[id] == nil {
			delete(c.seen, id)
		}
	}
	if c.seen == nil {
		c.seen = make(map[string]sight)
	}
	maps.Copy(c.seen, sights)
}

type job struct {
	*container.Summary
	looks uint64
}

// A visit is the inspections of one listing.
type visit struct {
	session *session
	cancel  context.CancelCauseFunc // ends them all

	mu      sync.Mutex
	looked  map[string]Container
	entries int // of all of looked
	sights  map[string]sight
	hung    int
}

// inspectAll inspects until there is nothing more to do. It is one of several
// goroutines.
func (v *visit) inspectAll(ctx context.Context, jobs <-chan job) {
	for j := range jobs {
		if err := v.inspect(ctx, j); err != nil {
			v.cancel(err)
			return
		}
	}
}

// inspect looks at one container. Its error is one of the engine's, not of the
// container's.
func (v *visit) inspect(ctx context.Context, j job) error {
	v.mu.Lock()
	hanging := v.hung >= inspectors
	v.mu.Unlock()
	if hanging { // it is not the container: take the listing's word this time
		v.saw(sight{Container: fromListing(j.Summary)}, false)
		return nil
	}
	within, cancel := context.WithTimeout(ctx, inspectWithin)
	defer cancel()
	detail, err := inspect(within, v.session.api, j.ID)
	var f *failure
	switch {
	case err == nil && detail.State.Running:
		v.saw(sight{looks: j.looks, Container: detail.container()}, true)
	case err == nil, cerrdefs.IsNotFound(err): // it ended meanwhile
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &f): // no answer
		return err
	default: // an answer that is an error or makes no sense, or none in time
		if within.Err() != nil {
			v.mu.Lock()
			v.hung++
			v.mu.Unlock()
		}
		v.saw(sight{looks: j.looks, Container: fromListing(j.Summary), until: time.Now().Add(inspectAgain)}, true)
	}
	return nil
}

// saw takes in a container, unless all together have become too many.
func (v *visit) saw(s sight, remember bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.entries += len(s.Bindings) + len(s.Unusable) + len(s.Addrs); v.entries > maxEntries {
		v.cancel(&failure{fmt.Sprintf("shows more than %d ports and addresses, which culvert does not take", maxEntries)})
		return
	}
	v.looked[s.ID] = s.Container
	if remember {
		v.sights[s.ID] = s
	}
}

// inspect asks for one container. What the library makes of the answer is not
// used: it gives up on all of it when one entry is none, and we take the others.
func inspect(ctx context.Context, api *client.Client, id string) (*detail, error) {
	var raw bytes.Buffer
	_, err := api.ContainerInspect((&call{max: inspection, raw: &raw}).of(ctx), id, client.ContainerInspectOptions{})
	var d detail
	if raw.Len() == 0 || json.NewDecoder(&raw).Decode(&d) != nil {
		return nil, cmp.Or(err, errors.New("empty answer"))
	}
	if d.ID != id {
		return nil, fmt.Errorf("container %s was inspected and another is shown", id)
	}
	return &d, nil
}

var seed = maphash.MakeSeed()

// appearance hashes what a listing shows of a container and a Container says.
// The engine makes an endpoint's ID anew at each start and each connection, so a
// container with endpoints that looks the same has not been started again.
// Without any it may have been, and the look is not lasting in the first minute,
// while the status counts seconds ("Up 12 seconds").
func appearance(l *container.Summary) (looks uint64, lasting bool) {
	lasting = !strings.Contains(l.Status, "econd")
	parts := slices.Clone(l.Names)
	for _, p := range l.Ports { // the engine walks a map: any order
		parts = append(parts, fmt.Sprint("port ", p.IP, p.PublicPort, p.PrivatePort, p.Type))
	}
	if l.NetworkSettings != nil {
		for name, n := range l.NetworkSettings.Networks {
			if n != nil {
				parts = append(parts, fmt.Sprintf("net %q %q %v %v", name, n.EndpointID, n.IPAddress, n.GlobalIPv6Address))
				lasting = lasting || n.EndpointID != ""
			}
		}
	}
	slices.Sort(parts)
	var h maphash.Hash
	h.SetSeed(seed)
	for _, p := range append(parts, l.HostConfig.NetworkMode, l.Labels[projectLabel], l.Labels[serviceLabel]) {
		_, _ = h.WriteString(p)
		_ = h.WriteByte(0)
	}
	return h.Sum64(), lasting
}
