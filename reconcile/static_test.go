package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func inStatic(t *testing.T, f func(t *testing.T, s *Static, p *publisher)) {
	t.Helper()
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, _ *logBuffer) { f(t, NewStatic(l), p) })
}

func owners(all []listener.Owner) []string {
	var ids []string
	for _, o := range all {
		ids = append(ids, o.String())
	}
	return ids
}

func TestStaticAddAndRemove(t *testing.T) {
	inStatic(t, func(t *testing.T, s *Static, p *publisher) {
		web, dns := mustSpec(t, "default", "8080:80"), mustSpec(t, "default", "127.0.0.1:53:5353/udp")
		all, err := s.Add(t.Context(), dns, web)
		require.NoError(t, err)
		assert.Equal(t, []string{"cli 127.0.0.1:53:5353/udp", "cli 8080:80/tcp"}, owners(all))
		assert.Equal(t, []string{"publish 127.0.0.1:53:5353/udp", "publish 8080:80/tcp"}, p.takeCalls(), "done when Add returns")

		// Again: nothing is touched.
		all, err = s.Add(t.Context(), web, web)
		require.NoError(t, err)
		assert.Equal(t, []string{"cli 8080:80/tcp", "cli 8080:80/tcp"}, owners(all))
		assert.Empty(t, p.takeCalls())

		unknown, err := s.Remove(t.Context(), mustSpec(t, "default", "9:9"), web, mustSpec(t, "vm2", "127.0.0.1:53:5353/udp"))
		require.NoError(t, err)
		assert.Equal(t, []listener.Spec{mustSpec(t, "default", "9:9"), mustSpec(t, "vm2", "127.0.0.1:53:5353/udp")}, unknown)
		assert.Equal(t, []string{"withdraw 8080:80/tcp"}, p.takeCalls(), "done when Remove returns (C-4)")

		unknown, err = s.Remove(t.Context(), web)
		require.NoError(t, err)
		assert.Equal(t, []listener.Spec{web}, unknown)
		assert.Empty(t, p.takeCalls())
	})
}

func TestStaticSetConfigIsADifference(t *testing.T) {
	inStatic(t, func(t *testing.T, s *Static, p *publisher) {
		a, b, c := mustSpec(t, "default", "1:80"), mustSpec(t, "default", "2:80"), mustSpec(t, "default", "3:80")
		_, err := s.Add(t.Context(), c)
		require.NoError(t, err)
		all, err := s.SetConfig(t.Context(), a, b, a)
		require.NoError(t, err)
		assert.Equal(t, []string{"config 1:80/tcp", "config 2:80/tcp", "config 1:80/tcp"}, owners(all))
		assert.Equal(t, []string{"publish 3:80/tcp", "publish 1:80/tcp", "publish 2:80/tcp"}, p.takeCalls())

		_, err = s.SetConfig(t.Context(), c, b)
		require.NoError(t, err)
		calls := p.takeCalls()
		assert.Equal(t, "withdraw 1:80/tcp", calls[0])
		assert.Equal(t, []string{"2:80/tcp 2:80/tcp", "3:80/tcp 3:80/tcp", "3:80/tcp 3:80/tcp"}, p.has(), "config and cli are owners of their own")

		// unpublish takes back what publish asked for, not the file's.
		unknown, err := s.Remove(t.Context(), b, c)
		require.NoError(t, err)
		assert.Equal(t, []listener.Spec{b}, unknown)
		o, has := s.Owner(listener.KindConfig, b)
		assert.True(t, has)
		assert.Equal(t, listener.Owner{Kind: listener.KindConfig, ID: "2:80/tcp"}, o)
		_, has = s.Owner(listener.KindCLI, c)
		assert.False(t, has)

		_, err = s.SetConfig(t.Context())
		require.NoError(t, err)
		assert.Empty(t, p.has())
	})
}

func TestStaticOwnersOfSeveralVMsDoNotCollide(t *testing.T) {
	inStatic(t, func(t *testing.T, s *Static, p *publisher) {
		one, two, three := mustSpec(t, "one", "0:80"), mustSpec(t, "two", "0:80"), mustSpec(t, "three", "0:80")
		all, err := s.SetConfig(t.Context(), one, two, three)
		require.NoError(t, err)
		assert.Equal(t, []string{"config 0:80/tcp", "config two/0:80/tcp", "config three/0:80/tcp"}, owners(all))
		all, err = s.Add(t.Context(), two)
		require.NoError(t, err)
		assert.Equal(t, []string{"cli 0:80/tcp"}, owners(all), "each kind by itself")

		// The first leaves: the others keep their ids, so their listeners are not
		// touched (C-2); one that comes takes the free id.
		all, err = s.SetConfig(t.Context(), three, two, mustSpec(t, "four", "0:80"))
		require.NoError(t, err)
		assert.Equal(t, []string{"config three/0:80/tcp", "config two/0:80/tcp", "config 0:80/tcp"}, owners(all))

		unknown, err := s.Remove(t.Context(), two)
		require.NoError(t, err)
		assert.Empty(t, unknown)
	})
}

func TestStaticAnotherSourceReplacesThePublish(t *testing.T) {
	inStatic(t, func(t *testing.T, s *Static, p *publisher) {
		spec := mustSpec(t, "default", "8080:80")
		_, err := s.Add(t.Context(), spec)
		require.NoError(t, err)
		spec.Source = listener.SourceClient
		all, err := s.Add(t.Context(), spec)
		require.NoError(t, err)
		assert.Equal(t, listener.SourceClient, p.rows[all[0]][0].Source)
		assert.Len(t, p.has(), 1)
	})
}

func TestStaticErrorChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPublisher()
		logger, _ := newLog()
		l := NewLoop(p, logger)
		s := NewStatic(l)
		a, b := mustSpec(t, "default", "1:80"), mustSpec(t, "default", "2:80")
		_, err := s.Add(t.Context(), a)
		require.NoError(t, err)

		_, err = s.Add(t.Context(), b, mustSpec(t, "", "3:80"))
		require.ErrorContains(t, err, "add publish 3:80/tcp: publish names no VM")
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = s.SetConfig(cancelled, b)
		require.ErrorIs(t, err, context.Canceled)
		_, err = s.Remove(cancelled, a)
		require.ErrorIs(t, err, context.Canceled)
		_, has := s.Owner(listener.KindCLI, a)
		assert.True(t, has)
		_, has = s.Owner(listener.KindConfig, b)
		assert.False(t, has)
		assert.Equal(t, []string{"1:80/tcp 1:80/tcp"}, p.has())

		require.NoError(t, l.Run(cancelled))
		_, err = s.Add(t.Context(), b)
		require.ErrorIs(t, err, os.ErrClosed)
	})
}

// Two changes at a time must not undo each other.
func TestStaticConcurrentChangesAllCount(t *testing.T) {
	inStatic(t, func(t *testing.T, s *Static, p *publisher) {
		var clients sync.WaitGroup
		for i := range 50 {
			clients.Go(func() {
				spec := mustSpec(t, "default", fmt.Sprintf("%d:80", 1000+i))
				if _, err := s.Add(t.Context(), spec); err != nil {
					t.Error(err)
				}
				if i%2 == 0 {
					if _, err := s.Remove(t.Context(), spec); err != nil {
						t.Error(err)
					}
				}
			})
		}
		clients.Wait()
		assert.Len(t, p.has(), 25)
	})
}

// What Static does is what a plain list does that is changed in place, whatever
// is asked of it, and a call that fails is as if it had not been made.
func TestStaticIsAList(t *testing.T) {
	type entry struct {
		kind, id string
		spec     listener.Spec
	}
	r := rand.New(rand.NewPCG(1, 2))
	some := func() []listener.Spec {
		specs := make([]listener.Spec, r.IntN(6))
		for i := range specs {
			specs[i] = mustSpec(t, fmt.Sprint("vm", r.IntN(3)), fmt.Sprintf("%d:80", 1+r.IntN(5)))
			specs[i].Source = listener.Source(r.IntN(2))
		}
		return specs
	}
	var list []entry
	same := func(kind string, s listener.Spec) func(entry) bool {
		return func(e entry) bool {
			return e.kind == kind && e.spec.Target.VM == s.Target.VM && e.spec.String() == s.String()
		}
	}
	add := func(kind string, specs []listener.Spec) []listener.Owner {
		owners := []listener.Owner{}
		for _, s := range specs {
			at := slices.IndexFunc(list, same(kind, s))
			if at < 0 {
				id := s.String()
				if slices.ContainsFunc(list, func(e entry) bool { return e.kind == kind && e.id == id }) {
					id = s.Target.VM + "/" + id
				}
				at = len(list)
				list = append(list, entry{kind: kind, id: id})
			}
			list[at].spec = s
			owners = append(owners, listener.Owner{Kind: kind, ID: list[at].id})
		}
		return owners
	}
	loop := NewLoop(newPublisher(), slog.New(slog.DiscardHandler))
	s := NewStatic(loop)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2000 {
		specs := some()
		switch r.IntN(4) {
		case 0:
			all, err := s.Add(t.Context(), specs...)
			require.NoError(t, err)
			require.Equal(t, add(listener.KindCLI, specs), all)
		case 1:
			list = slices.DeleteFunc(list, func(e entry) bool {
				return e.kind == listener.KindConfig && !slices.ContainsFunc(specs, func(s listener.Spec) bool { return same(e.kind, s)(e) })
			})
			all, err := s.SetConfig(t.Context(), specs...)
			require.NoError(t, err)
			require.Equal(t, add(listener.KindConfig, specs), all)
		case 2:
			var want []listener.Spec
			for _, s := range specs {
				if at := slices.IndexFunc(list, same(listener.KindCLI, s)); at >= 0 {
					list = slices.Delete(list, at, at+1)
				} else {
					want = append(want, s)
				}
			}
			unknown, err := s.Remove(t.Context(), specs...)
			require.NoError(t, err)
			require.Equal(t, want, unknown)
		case 3:
			_, err := s.Add(cancelled, specs...)
			require.Error(t, err)
			_, err = s.SetConfig(cancelled, specs...)
			require.Error(t, err)
			_, err = s.Remove(cancelled, specs...)
			require.Error(t, err)
		}
		for _, kind := range []string{listener.KindConfig, listener.KindCLI} {
			for _, spec := range specs {
				o, has := s.Owner(kind, spec)
				at := slices.IndexFunc(list, same(kind, spec))
				require.Equal(t, at >= 0, has)
				require.True(t, !has || o == listener.Owner{Kind: kind, ID: list[at].id})
			}
		}
		if len(loop.snaps) > 0 {
			wants := slices.DeleteFunc(slices.Clone(loop.snaps[0].Wants), func(w Want) bool { return w.Owner == listener.Owner{} })
			require.Len(t, wants, len(list))
			for i, w := range wants {
				require.Equal(t, Want{Owner: listener.Owner{Kind: list[i].kind, ID: list[i].id}, Specs: []listener.Spec{list[i].spec}}, w)
			}
		}
	}
}
