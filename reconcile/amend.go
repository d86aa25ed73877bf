package reconcile

import (
	"slices"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
)

// What a person publishes is one port beside thousands, and waits for it. So Static
// does not state all that it wants every time, as sources do, but what changes,
// and that is all that is compared and told. What was told of the rest holds: no
// other snapshot is touched, and the loop's own comparisons go on over everything.

// amend takes a snapshot whose Wants are what changes in its source's last one. Each
// comes in the place of its owner's, or after all others, and one that asks for
// nothing takes its owner out. They have neither notes nor names. It does what
// converge would do.
func (l *Loop) amend(s Snapshot) {
	began := time.Now()
	l.stats.source(s.VM, s.Source, func(c *SourceStats) { c.Snapshots, c.Last = c.Snapshots+1, time.Now() })
	i := l.last(s)
	if i < 0 {
		i = len(l.snaps)
		l.snaps = append(l.snaps, Snapshot{Source: s.Source, VM: s.VM, Generation: s.Generation})
	}
	kept := &l.snaps[i]
	kept.grow(len(s.Wants))
	// An owner that another source wants as well is a clash, and those are looked at
	// all together.
	alone := len(l.clashed) == 0 && !l.held[sourceKey{s.VM, s.Source}]
	for _, w := range s.Wants {
		_, own := kept.at[w.Owner]
		alone = alone && (own || !l.names.knows(w.Owner))
		kept.put(w)
	}
	if !alone {
		l.converge(nil)
		return
	}
	wants, gone := kept.of(s.Wants)
	l.names.amend(wants, gone)
	gone = slices.DeleteFunc(gone, func(o listener.Owner) bool { _, is := l.told[o]; return !is })
	l.tell(began, gone, changed(l.told, wants, nil))
}

// put puts w among the wants. One that asks for nothing leaves an empty Want in its
// place, which is nobody's.
func (s *Snapshot) put(w Want) {
	i, is := s.at[w.Owner]
	switch {
	case len(w.Specs) == 0 && is:
		s.Wants[i] = Want{}
		delete(s.at, w.Owner)
	case len(w.Specs) == 0:
	case is:
		s.Wants[i] = w
	default:
		s.at[w.Owner] = len(s.Wants)
		s.Wants = append(s.Wants, w)
	}
}

// grow makes room for n more wants, in a list of the loop's own, and takes the empty
// ones out where they are more than the others.
func (s *Snapshot) grow(n int) {
	if s.at != nil && len(s.Wants) <= 2*len(s.at) {
		s.Wants = slices.Grow(s.Wants, n)
		return
	}
	if s.at == nil {
		n += len(s.Wants)
	} else {
		n += len(s.at)
	}
	wants, at := make([]Want, 0, n), make(map[listener.Owner]int, n)
	for _, w := range s.Wants {
		if (w.Owner == listener.Owner{}) {
			continue
		}
		if _, twice := at[w.Owner]; !twice {
			at[w.Owner] = len(wants)
		}
		wants = append(wants, w)
	}
	s.Wants, s.at = wants, at
}

// of returns the wants of the owners of changes, in the order of asking, and those
// owners that have none, sorted.
func (s *Snapshot) of(changes []Want) (wants []Want, gone []listener.Owner) {
	places := make([]int, 0, len(changes))
	for _, w := range changes {
		if i, is := s.at[w.Owner]; is {
			places = append(places, i)
		} else {
			gone = append(gone, w.Owner)
		}
	}
	slices.Sort(places)
	places = slices.Compact(places)
	wants = make([]Want, len(places))
	for i, place := range places {
		wants[i] = s.Wants[place]
	}
	slices.SortFunc(gone, compareOwners)
	return wants, slices.Compact(gone)
}
