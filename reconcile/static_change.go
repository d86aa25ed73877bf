package reconcile

import "github.com/culvertnet/culvert/stack/listener"

// A publish is one that is wanted. It is a value that several snapshots hold:
// nobody changes one that the loop has been told of.
type publish struct {
	publishKey
	id    string          // of its owner
	specs []listener.Spec // the one
}

// A publishKey makes a publish what it is: asked for again with the same key but
// another listener.Source, it replaces the former.
type publishKey struct{ kind, vm, text string }

func keyOf(kind string, s listener.Spec) publishKey {
	return publishKey{kind, s.Target.VM, s.String()}
}

func (p *publish) owner() listener.Owner { return listener.Owner{Kind: p.kind, ID: p.id} }

// A change is what one call makes of a Static's publishes. Until commit the
// Static is as it was; its mu is held from the first to the last. What a change
// says costs as much as there is in it, however much is wanted beside.
type change struct {
	of      *Static
	instead map[*publish]*publish   // of the Static's: what takes its place, nil for nothing
	fresh   []*publish              // what comes, in the order of asking
	byKey   map[publishKey]*publish // of fresh and instead
	owned   map[listener.Owner]bool // by fresh
}

func (s *Static) change() *change {
	return &change{
		of: s, instead: make(map[*publish]*publish),
		byKey: make(map[publishKey]*publish), owned: make(map[listener.Owner]bool),
	}
}

// find returns the publish of a key, as the change has it, nil if there is none.
func (c *change) find(key publishKey) *publish {
	if p := c.byKey[key]; p != nil {
		return p
	}
	p := c.of.byKey[key]
	if other, changed := c.instead[p]; changed {
		return other
	}
	return p
}

// drop takes out a publish of the Static's.
func (c *change) drop(p *publish) { c.instead[p] = nil }

// put adds a publish or, where there is one of its key, gives that one its spec.
func (c *change) put(kind string, spec listener.Spec) *publish {
	key := keyOf(kind, spec)
	p := c.find(key)
	switch {
	case p == nil:
		p = &publish{key, c.newID(key), []listener.Spec{spec}}
		c.fresh = append(c.fresh, p)
		c.owned[p.owner()] = true
	case p.specs[0] == spec:
		return p
	case c.byKey[key] == p: // the change's own
		p.specs[0] = spec
		return p
	default:
		was := p
		p = &publish{key, was.id, []listener.Spec{spec}}
		c.instead[was] = p
	}
	c.byKey[key] = p
	return p
}

// newID returns the id of the owner of a publish that comes.
func (c *change) newID(key publishKey) string {
	o := listener.Owner{Kind: key.kind, ID: key.text}
	holder := c.of.owned[o]
	other, changed := c.instead[holder]
	left := changed && other == nil
	if c.owned[o] || holder != nil && !left {
		return key.vm + "/" + key.text
	}
	return key.text
}

// wants returns what changes: who leaves, or asks for something else, before who
// comes, as the owner of one that leaves may be another's now.
func (c *change) wants() []Want {
	wants := make([]Want, 0, len(c.instead)+len(c.fresh))
	for p, other := range c.instead {
		w := Want{Owner: p.owner()}
		if other != nil {
			w.Specs = other.specs
		}
		wants = append(wants, w)
	}
	for _, p := range c.fresh {
		wants = append(wants, Want{Owner: p.owner(), Specs: p.specs})
	}
	return wants
}

// commit makes the change the Static's.
func (c *change) commit() {
	s := c.of
	for p, other := range c.instead {
		if other == nil { // first: its id may be another's now
			delete(s.byKey, p.publishKey)
			delete(s.owned, p.owner())
		}
	}
	for _, p := range c.byKey {
		s.byKey[p.publishKey] = p
		s.owned[p.owner()] = p
	}
}
