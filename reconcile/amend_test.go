package reconcile

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A loop that is told what changes and one that is told all of it each time do the
// same in the same order, also where another source wants the same owners, or is
// held.
func TestAmendDoesWhatWholeSnapshotsDo(t *testing.T) {
	const source = "s"
	r := rand.New(rand.NewPCG(3, 4))
	logger, _ := newLog()
	pubs := []*publisher{newPublisher(), newPublisher()}
	amended, whole := NewLoop(pubs[0], logger), NewLoop(pubs[1], logger)
	var list []Want // in the order of asking
	ofOwner := func(o listener.Owner) func(Want) bool { return func(w Want) bool { return w.Owner == o } }
	some := func(kinds string) Want {
		w := want(t, fmt.Sprint(string(kinds[r.IntN(len(kinds))]), r.IntN(12)))
		if port := r.IntN(8); port > 0 {
			w.Specs = want(t, "", fmt.Sprintf("%d:80", port)).Specs
		}
		return w
	}
	alone := 0 // changes that were told without a look at everything
	for range 3000 {
		switch r.IntN(10) {
		case 0: // another source, some of whose owners may be the first's as well
			other := Snapshot{Source: "other"}
			for range r.IntN(4) {
				other.Wants = append(other.Wants, some("bbbbba"))
			}
			for _, l := range []*Loop{amended, whole} {
				err := l.Apply(t.Context(), other)
				require.NoError(t, err)
			}
		case 1:
			hold := r.IntN(4) == 0
			amended.Hold("", source, hold)
			whole.Hold("", source, hold)
		case 2: // all at once, also to one that was told changes
			for _, l := range []*Loop{amended, whole} {
				err := l.Apply(t.Context(), Snapshot{Source: source, Wants: slices.Clone(list)})
				require.NoError(t, err)
			}
		default:
			var change []Want
			for range r.IntN(6) {
				w := some("a")
				change = append(change, w)
				switch at := slices.IndexFunc(list, ofOwner(w.Owner)); {
				case len(w.Specs) == 0:
					list = slices.DeleteFunc(list, ofOwner(w.Owner))
				case at < 0:
					list = append(list, w)
				default:
					list[at] = w
				}
			}
			if len(amended.clashed) == 0 && len(amended.held) == 0 {
				alone++
			}
			err := amended.Apply(t.Context(), Snapshot{Source: source, Wants: change, changes: true})
			require.NoError(t, err)
			err = whole.Apply(t.Context(), Snapshot{Source: source, Wants: slices.Clone(list)})
			require.NoError(t, err)
		}
		require.Equal(t, pubs[1].takeCalls(), pubs[0].takeCalls())
		require.Equal(t, pubs[1].has(), pubs[0].has())
		require.Equal(t, whole.told, amended.told)
		require.Equal(t, whole.clashed, amended.clashed)
		ids := amended.names.table.Load().ids
		require.ElementsMatch(t, slices.Collect(maps.Keys(whole.names.table.Load().ids)), slices.Collect(maps.Keys(ids)))
		for id, owners := range whole.names.table.Load().ids {
			require.ElementsMatch(t, owners, ids[id])
		}
	}
	assert.Greater(t, alone, 500)
}

// One that comes beside many is all that is told, and what has left takes no room
// for long.
func TestAmendKeepsNoMoreThanThereIs(t *testing.T) {
	const many = 100
	p := newPublisher()
	logger, _ := newLog()
	s := NewStatic(NewLoop(p, logger))
	specs := singlePorts(t, many)
	_, err := s.Add(t.Context(), specs...)
	require.NoError(t, err)
	p.takeCalls()
	one := mustSpec(t, "default", "1:80")
	for range 10 * many {
		_, err = s.Add(t.Context(), one)
		require.NoError(t, err)
		_, err = s.Remove(t.Context(), one)
		require.NoError(t, err)
		require.Equal(t, []string{"publish 1:80/tcp", "withdraw 1:80/tcp"}, p.takeCalls())
		require.LessOrEqual(t, len(s.loop.snaps[0].Wants), 2*many+1)
	}
}
