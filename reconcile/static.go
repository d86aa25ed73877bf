package reconcile

import (
	"context"
	"errors"
	"fmt"
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

	// mu is held while a change is applied: the loop must hear of changes in the
	// order they were made.
	mu    sync.Mutex
	byKey map[publishKey]*publish
	owned map[listener.Owner]*publish
}

// NewStatic returns a Static that wants nothing yet.
func NewStatic(loop *Loop) *Static {
	return &Static{loop: loop, byKey: make(map[publishKey]*publish), owned: make(map[listener.Owner]*publish)}
}

// SetConfig makes the publishes of the config file exactly specs, each naming
// its VM. Those that were there are not touched (C-2), one that is repeated
// counts once. It returns the owners of specs, in their order.
func (s *Static) SetConfig(ctx context.Context, specs ...listener.Spec) ([]listener.Owner, error) {
	wanted := make(map[publishKey]bool, len(specs))
	for _, spec := range specs {
		wanted[keyOf(listener.KindConfig, spec)] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.change()
	for _, p := range s.byKey {
		if p.kind == listener.KindConfig && !wanted[p.publishKey] {
			c.drop(p)
		}
	}
	return s.add(ctx, c, listener.KindConfig, specs)
}

// Add adds publishes of the CLI, each naming its VM. Adding one that is there
// changes nothing. It returns the owners of specs, in their order: the Publisher has
// their rows.
func (s *Static) Add(ctx context.Context, specs ...listener.Spec) ([]listener.Owner, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.add(ctx, s.change(), listener.KindCLI, specs)
}

// add applies c with specs put into it. mu is held.
func (s *Static) add(ctx context.Context, c *change, kind string, specs []listener.Spec) ([]listener.Owner, error) {
	owners := make([]listener.Owner, len(specs))
	for i, spec := range specs {
		if spec.Target.VM == "" {
			return nil, fmt.Errorf("add publish %s: %w", spec.String(), errNoVM)
		}
		owners[i] = c.put(kind, spec).owner()
	}
	if err := s.apply(ctx, c); err != nil {
		return nil, err
	}
	return owners, nil
}

// Remove takes back publishes of the CLI. When it returns their ports are free
// (C-4). Those it does not know, which is no error, are returned: Owner tells
// whether the config file has them.
func (s *Static) Remove(ctx context.Context, specs ...listener.Spec) (unknown []listener.Spec, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.change()
	for _, spec := range specs {
		if p := c.find(keyOf(listener.KindCLI, spec)); p != nil {
			c.drop(p)
		} else {
			unknown = append(unknown, spec)
		}
	}
	if err := s.apply(ctx, c); err != nil {
		return nil, err
	}
	return unknown, nil
}

// Owner returns the owner of a publish of kind (listener.KindConfig or KindCLI)
// and whether there is one.
func (s *Static) Owner(kind string, spec listener.Spec) (listener.Owner, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.byKey[keyOf(kind, spec)]; p != nil {
		return p.owner(), true
	}
	return listener.Owner{}, false
}

// apply makes what c says so, unless the loop takes it no more. mu is held.
func (s *Static) apply(ctx context.Context, c *change) error {
	if err := s.loop.Apply(ctx, Snapshot{Source: staticName, Wants: c.wants(), changes: true}); err != nil {
		return err
	}
	c.commit()
	return nil
}
