package reconcile

import (
	"cmp"
	"slices"

	"github.com/culvertnet/culvert/stack/listener"
)

// A clash is an owner that is wanted twice. Kinds of owners belong to one
// source each, so a clash is a mistake of a source, not of a user: it is said
// once and has no effect.
type clash struct {
	owner       listener.Owner
	has, wanted string // the sources: whose want holds, whose does not
}

// desired joins what the sources want, in the order of snaps and, within one,
// in the order of asking. An owner counts once: the first want of it holds, and
// a later one comes into force when the first is gone. Owners that ask for
// nothing at all are left out.
func desired(snaps []Snapshot) (wants []Want, clashes []clash) {
	from := make(map[listener.Owner]string)
	for _, s := range snaps {
		for _, w := range s.Wants {
			if len(w.Specs) == 0 && len(w.Notes) == 0 && len(w.Names) == 0 {
				continue
			}
			if has, twice := from[w.Owner]; twice {
				clashes = append(clashes, clash{w.Owner, has, s.Source})
				continue
			}
			from[w.Owner] = s.Source
			wants = append(wants, w)
		}
	}
	return wants, clashes
}

// diff says what takes the Publisher from what it was told to wants: the owners
// to withdraw, sorted, and the wants to publish, in their order: those that
// changed and those in ask, in the memory of wants.
func diff(told map[listener.Owner]told, wants []Want, ask []listener.Owner) (gone []listener.Owner, publish []Want) {
	wanted := make(map[listener.Owner]bool, len(wants))
	for _, w := range wants {
		wanted[w.Owner] = true
	}
	for o := range told {
		if !wanted[o] {
			gone = append(gone, o)
		}
	}
	slices.SortFunc(gone, func(a, b listener.Owner) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID))
	})
	return gone, changed(told, wants, ask)
}

// changed returns those of wants that the Publisher was not told, and those of
// owners in ask, in the memory of wants.
func changed(told map[listener.Owner]told, wants []Want, ask []listener.Owner) []Want {
	asked := make(map[listener.Owner]bool, len(ask))
	for _, o := range ask {
		asked[o] = true
	}
	return slices.DeleteFunc(wants, func(w Want) bool {
		return !asked[w.Owner] && slices.Equal(told[w.Owner].specs, w.Specs)
	})
}
