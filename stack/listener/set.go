package listener

import (
	"cmp"
	"slices"
)

// A Set is what an owner has of something for each of its specs, sorted by them.
// A set of one costs a pointer and one of ten thousand a dozen comparisons to
// look one up; a map of specs takes a kilobyte for the first.
type Set[R Stated] []R

// Stated is what a Set can hold: it tells the Spec that it is there for, which
// never changes.
type Stated interface {
	comparable
	Stated() *Spec
}

// Find returns what there is for spec, and whether there is any.
func (s Set[R]) Find(spec *Spec) (found R, ok bool) {
	i, ok := slices.BinarySearchFunc(s, spec, func(r R, spec *Spec) int { return compare(r.Stated(), spec) })
	if ok {
		found = s[i]
	}
	return found, ok
}

// State returns the set for exactly specs, of which equal ones are one: what s
// has for them, and what fresh makes for the others. came is what was made, in
// the order of specs, and gone what s has for no spec any more. s stays as it is.
func (s Set[R]) State(specs []Spec, fresh func(Spec) R) (now Set[R], came, gone []R) {
	now = make(Set[R], 0, len(specs))
	for i := range specs {
		r, ok := s.Find(&specs[i])
		if !ok {
			r = fresh(specs[i])
			came = append(came, r)
		}
		now = append(now, r)
	}
	slices.SortStableFunc(now, func(a, b R) int { return compare(a.Stated(), b.Stated()) })
	now = slices.CompactFunc(now, func(a, b R) bool { return *a.Stated() == *b.Stated() })
	if len(now) < len(specs) {
		came = slices.DeleteFunc(came, func(r R) bool {
			first, _ := now.Find(r.Stated())
			return first != r
		})
	}
	for _, r := range s {
		if _, ok := now.Find(r.Stated()); !ok {
			gone = append(gone, r)
		}
	}
	return now, came, gone
}

// compare orders specs, host ports first, as they tell the most of them apart.
// It is 0 for equal ones only.
func compare(a, b *Spec) int {
	if c := a.Host.Compare(b.Host); c != 0 {
		return c
	}
	return cmp.Or(
		cmp.Compare(a.Proto, b.Proto),
		cmp.Compare(a.Ports, b.Ports),
		cmp.Compare(a.Target.VM, b.Target.VM),
		a.Target.Addr.Compare(b.Target.Addr),
		cmp.Compare(a.Source, b.Source),
		cmp.Compare(a.Allow, b.Allow),
	)
}
