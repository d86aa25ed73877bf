package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/culvertnet/culvert/stack/listener"
)

// staticName is the name Static applies its snapshots under; no source has it.
const staticName = "static"

// errNoVM says that a spec cannot be published: it leads nowhere.
var errNoVM = errors.New("publish names no VM")

// Static holds what people ask for: the publishes of the config file (owner
// kind "config") and those of the CLI and the API (owner kind "cli"). Its calls
// return when the listeners are open or closed, so it is not run by the loop
// but applies its snapshots itself.
//
// Each publish has an owner of its own, so that one can be taken back without
// touching the others. The owner's id is the publish's text in its canonical
// form, "8080:80/tcp". Texts do not name a VM: where one of the same kind
// belongs to another VM already, the later one's id is "vm/8080:80/tcp". An id
// stays as it is for as long as its publish is wanted.
//
// All methods are safe for concurrent use; each takes effect as a whole. Their
// errors are those of Loop.Apply, and one for a publish that names no VM; then
// nothing was changed.
type Static struct {
	loop *Loop

	// mu is held while a change is applied: the loop must hear of snapshots in
	// the order they were made.
	mu    sync.Mutex
	wants []publish // in the order of asking
}

// A publish is one that is wanted.
type publish struct {
	publishKey
	id   string // of its owner
	spec listener.Spec
}

// A publishKey makes a publish what it is: asked for again with the same key but
// another listener.Source, it replaces the former.
type publishKey struct{ kind, vm, text string }

func keyOf(kind string, s listener.Spec) publishKey {
	return publishKey{kind, s.Target.VM, s.String()}
}

func (p publish) owner() listener.Owner { return listener.Owner{Kind: p.kind, ID: p.id} }

// Published is what became of one publish.
type Published struct {
	Owner   listener.Owner
	Outcome listener.Outcome
}

// NewStatic returns a Static that wants nothing yet.
func NewStatic(loop *Loop) *Static { return &Static{loop: loop} }

// SetConfig makes the publishes of the config file exactly specs, each naming
// its VM. Those that were there are not touched (C-2), one that is repeated
// counts once. It returns what became of each, in the order of specs.
func (s *Static) SetConfig(ctx context.Context, specs ...listener.Spec) ([]Published, error) {
	wanted := make(map[publishKey]bool, len(specs))
	for _, spec := range specs {
		wanted[keyOf(listener.KindConfig, spec)] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	wants := slices.DeleteFunc(slices.Clone(s.wants), func(p publish) bool {
		return p.kind == listener.KindConfig && !wanted[p.publishKey]
	})
	return s.add(ctx, wants, listener.KindConfig, specs)
}

// Add adds publishes of the CLI, each naming its VM. Adding one that is there
// changes nothing. It returns what became of each, in the order of specs.
func (s *Static) Add(ctx context.Context, specs ...listener.Spec) ([]Published, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.add(ctx, slices.Clone(s.wants), listener.KindCLI, specs)
}

// add applies wants and specs together. It may change wants.
func (s *Static) add(ctx context.Context, wants []publish, kind string, specs []listener.Spec) ([]Published, error) {
	owners := make([]listener.Owner, len(specs))
	for i, spec := range specs {
		if spec.Target.VM == "" {
			return nil, fmt.Errorf("add publish %s: %w", spec.String(), errNoVM)
		}
		key := keyOf(kind, spec)
		at := slices.IndexFunc(wants, func(p publish) bool { return p.publishKey == key })
		if at < 0 {
			at = len(wants)
			wants = append(wants, publish{key, newID(wants, key), spec})
		}
		wants[at].spec = spec
		owners[i] = wants[at].owner()
	}
	outcomes, err := s.apply(ctx, wants, owners...)
	if err != nil {
		return nil, err
	}
	all := make([]Published, len(specs))
	for i, o := range owners {
		all[i].Owner = o
		if outs := outcomes[o]; len(outs) > 0 {
			all[i].Outcome = outs[0] // an owner of ours has one spec
		}
	}
	return all, nil
}

// newID returns the id of the owner of a publish that joins wants.
func newID(wants []publish, key publishKey) string {
	for _, p := range wants {
		if p.kind == key.kind && p.id == key.text {
			return key.vm + "/" + key.text
		}
	}
	return key.text
}

// Remove takes back publishes of the CLI. When it returns their ports are free
// (C-4). Those it does not know, which is no error, are returned: Owner tells
// whether the config file has them.
func (s *Static) Remove(ctx context.Context, specs ...listener.Spec) (unknown []listener.Spec, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wants := slices.Clone(s.wants)
	for _, spec := range specs {
		key := keyOf(listener.KindCLI, spec)
		at := slices.IndexFunc(wants, func(p publish) bool { return p.publishKey == key })
		if at < 0 {
			unknown = append(unknown, spec)
			continue
		}
		wants = slices.Delete(wants, at, at+1)
	}
	if _, err := s.apply(ctx, wants); err != nil {
		return nil, err
	}
	return unknown, nil
}

// Owner returns the owner of a publish of kind (listener.KindConfig or KindCLI)
// and whether there is one.
func (s *Static) Owner(kind string, spec listener.Spec) (listener.Owner, bool) {
	key := keyOf(kind, spec)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.wants {
		if p.publishKey == key {
			return p.owner(), true
		}
	}
	return listener.Owner{}, false
}

// apply makes wants what is wanted, unless the loop takes it no more.
func (s *Static) apply(ctx context.Context, wants []publish, ask ...listener.Owner) (map[listener.Owner][]listener.Outcome, error) {
	snap := Snapshot{Source: staticName}
	for _, p := range wants {
		snap.Wants = append(snap.Wants, Want{Owner: p.owner(), Specs: []listener.Spec{p.spec}})
	}
	outcomes, err := s.loop.Apply(ctx, snap, ask...)
	if err != nil {
		return nil, err
	}
	s.wants = wants
	return outcomes, nil
}
