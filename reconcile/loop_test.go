package reconcile

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// inLoop runs f with a running loop in a bubble of its own. synctest fails the
// test when a goroutine is left behind.
func inLoop(t *testing.T, f func(t *testing.T, l *Loop, p *publisher, log *logBuffer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := newPublisher()
		logger, log := newLog()
		l := NewLoop(p, logger)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx) }()
		f(t, l, p, log)
		cancel()
		require.NoError(t, <-ended)
	})
}

func TestLoopPublishesDifferencesOnly(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, _ *logBuffer) {
		src := newSource("containers")
		l.AddSource("", 0, src)
		say := func(wants ...Want) []string {
			src.send <- Snapshot{Source: "containers", Wants: wants}
			synctest.Wait()
			return p.takeCalls()
		}
		a, b := want(t, "a", "80:80"), want(t, "b", "81:80", "81:80/udp")
		assert.Equal(t, []string{"publish b", "publish a"}, say(b, a), "in the order of asking")
		assert.Empty(t, say(b, a), "unchanged")
		assert.Empty(t, say(a, b), "another order is no change")
		assert.Equal(t, []string{"publish a"}, say(want(t, "a", "80:80", "90:80"), b))
		// a leaves its port to c: who leaves goes first.
		assert.Equal(t, []string{"withdraw a", "publish c"}, say(want(t, "c", "80:80"), b))
		assert.Equal(t, []string{"b 81:80/tcp", "b 81:80/udp", "c 80:80/tcp"}, p.has())
		assert.Equal(t, []string{"withdraw b", "withdraw c"}, say())
		assert.Empty(t, p.has())
	})
}

func TestFB070RandomWalkEndsAtTheDesiredState(t *testing.T) {
	const seed = 70
	random := rand.New(rand.NewPCG(seed, seed))
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, _ *logBuffer) {
		sources := make([]*source, 3)
		wanted := make([][]Want, len(sources))
		for i := range sources {
			sources[i] = newSource(fmt.Sprint("source", i))
			l.AddSource("", 0, sources[i])
		}
		for range 500 {
			i := random.IntN(len(sources))
			src := sources[i]
			switch random.IntN(10) {
			case 0: // it breaks, and comes back without news
				src.fail <- errBoom
				time.Sleep(2 * sourceBackoffMax)
			case 1: // the Publisher forgets something
				p.mu.Lock()
				for o := range p.rows {
					delete(p.rows, o)
					break
				}
				p.mu.Unlock()
			case 2: // and keeps something that nobody wants
				p.mu.Lock()
				p.rows[dockerOwner("nobody")] = want(t, "nobody", "9:9").Specs
				p.mu.Unlock()
			default: // a listing; what happened between two is lost
				wanted[i] = nil
				for range random.IntN(6) {
					id := fmt.Sprint(i, "-", random.IntN(8))
					if !slices.ContainsFunc(wanted[i], func(w Want) bool { return w.Owner.ID == id }) {
						wanted[i] = append(wanted[i], want(t, id, fmt.Sprintf("%d:80", 1000+random.IntN(5))))
					}
				}
				src.send <- Snapshot{Source: src.name, Wants: wanted[i]}
			}
			if random.IntN(4) == 0 {
				time.Sleep(resyncEvery + time.Second)
				synctest.Wait()
				rows := []string{}
				for _, ws := range wanted {
					for _, w := range ws {
						rows = append(rows, w.Owner.ID+" "+w.Specs[0].String())
					}
				}
				slices.Sort(rows)
				require.Equal(t, rows, p.has())
			}
		}
	})
}

func TestFB073ResyncIsQuiet(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, log *logBuffer) {
		err := l.Apply(t.Context(), Snapshot{Source: "s", Wants: []Want{want(t, "svc", "80:80", "30080:80")}})
		require.NoError(t, err)
		require.Equal(t, 2, log.lines("state=forwarded"))
		before := log.lines()
		p.takeCalls()
		time.Sleep(20*resyncEvery + time.Second)
		synctest.Wait()
		calls := p.takeCalls()
		assert.Len(t, calls, 20, "stated again each time")
		assert.Equal(t, []string{"publish svc"}, slices.Compact(calls), "and never withdrawn")
		assert.Equal(t, before, log.lines(), "nothing is said about what did not change")
	})
}

func TestLoopLogsEachChangeOfStateOnce(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, log *logBuffer) {
		p.state[dockerOwner("a")] = listener.Failed
		err := l.Apply(t.Context(), Snapshot{Source: "s", Wants: []Want{want(t, "a", "80:80")}})
		require.NoError(t, err)
		time.Sleep(5 * resyncEvery)
		assert.Equal(t, 1, log.lines("level=DEBUG", "state=failed", "detail=because", `owner="docker a"`, "spec=80:80/tcp"))
		p.mu.Lock()
		delete(p.state, dockerOwner("a"))
		p.mu.Unlock()
		time.Sleep(5 * resyncEvery)
		assert.Equal(t, 1, log.lines("level=DEBUG", "state=forwarded"))
		assert.Equal(t, 1, log.lines("state=failed"))
	})
}

func TestLoopPrunesOwnersNobodyWants(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, _ *logBuffer) {
		p.Publish(t.Context(), dockerOwner("left over"), want(t, "", "80:80").Specs)
		err := l.Apply(t.Context(), Snapshot{Source: "s", Wants: []Want{want(t, "a", "81:80")}})
		require.NoError(t, err)
		time.Sleep(resyncEvery + time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"a 81:80/tcp"}, p.has())
	})
}

func TestLoopSaysAClashOnceAndLetsTheOtherFollow(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, log *logBuffer) {
		apply := func(source string, wants ...Want) {
			err := l.Apply(t.Context(), Snapshot{Source: source, Wants: wants})
			require.NoError(t, err)
		}
		apply("one", want(t, "a", "80:80"))
		apply("two", want(t, "a", "81:80"))
		apply("two", want(t, "a", "81:80"), want(t, "b", "82:80"))
		assert.Equal(t, 1, log.lines("wanted twice", "source=one", "ignored=two"))
		assert.Equal(t, []string{"a 80:80/tcp", "b 82:80/tcp"}, p.has())
		apply("one")
		assert.Equal(t, []string{"a 81:80/tcp", "b 82:80/tcp"}, p.has())
	})
}

func TestFB169SourceThatFailsIsRunAgainAndItsRowsStay(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, log *logBuffer) {
		src := newSource("containers")
		l.AddSource("", 0, src)
		src.send <- Snapshot{Source: "containers", Wants: []Want{want(t, "a", "80:80")}}
		<-src.runs
		began := time.Now()
		for range 8 { // 250 ms, 500 ms … 16 s, 30 s, each shortened by up to half
			src.fail <- errBoom
			<-src.runs
		}
		took := time.Since(began)
		assert.LessOrEqual(t, took, 62*time.Second)
		assert.Greater(t, took, 30*time.Second)
		assert.Equal(t, 1, log.lines("source failed", "boom"), "once, though it failed eight times")
		assert.Equal(t, []string{"a 80:80/tcp"}, p.has())
		assert.NotContains(t, p.takeCalls(), "withdraw a")

		src.fail <- nil // an end without a reason is a failure too
		<-src.runs
		assert.Equal(t, 1, log.lines("source failed", "source ended"))

		// After a good while the delays begin anew.
		time.Sleep(sourceBackoffMax + time.Second)
		began = time.Now()
		src.fail <- errBoom
		<-src.runs
		assert.LessOrEqual(t, time.Since(began), sourceBackoffMin)
	})
}

func TestLoopIgnoresSnapshotsOfAnotherLife(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, _ *logBuffer) {
		late, src := newSource("containers"), newSource("containers")
		snap := func(generation uint64, wants ...Want) Snapshot {
			return Snapshot{Source: "containers", VM: "default", Generation: generation, Wants: wants}
		}
		other := Snapshot{Source: "config", Wants: []Want{want(t, "config", "90:80")}}
		err := l.Apply(t.Context(), other)
		require.NoError(t, err)

		l.AddSource("default", 1, late)
		late.send <- snap(1, want(t, "a", "80:80"))
		synctest.Wait()
		assert.Equal(t, []string{"a 80:80/tcp", "config 90:80/tcp"}, p.has())

		// The VM goes: what its source wanted goes before DropVM returns (C-26),
		// the rest stays, and an answer that was under way does nothing (C-27).
		l.DropVM("default")
		assert.Equal(t, []string{"config 90:80/tcp"}, p.has())
		l.in <- snap(1, want(t, "a", "80:80"))
		synctest.Wait()
		assert.Equal(t, []string{"config 90:80/tcp"}, p.has())
		err = l.Apply(t.Context(), snap(1, want(t, "a", "80:80")))
		require.ErrorIs(t, err, ErrStale)

		// Nor in the next life.
		l.AddSource("default", 2, src)
		l.in <- snap(1, want(t, "a", "80:80"))
		src.send <- snap(2, want(t, "b", "81:80"))
		l.in <- snap(1)
		synctest.Wait()
		assert.Equal(t, []string{"b 81:80/tcp", "config 90:80/tcp"}, p.has())

		// The API of a VM's source: whole before it returns.
		err = l.Apply(t.Context(), snap(2))
		require.NoError(t, err)
		assert.Equal(t, []string{"config 90:80/tcp"}, p.has())
	})
}

func TestLoopSourcesOfVMsAreApart(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, _ *logBuffer) {
		for i, vm := range []string{"one", "two"} {
			src := newSource("containers")
			l.AddSource(vm, 1, src)
			src.send <- Snapshot{Source: "containers", VM: vm, Generation: 1, Wants: []Want{want(t, vm, fmt.Sprintf("%d:80", 80+i))}}
		}
		synctest.Wait()
		assert.Equal(t, []string{"one 80:80/tcp", "two 81:80/tcp"}, p.has())
		l.DropVM("one")
		assert.Equal(t, []string{"two 81:80/tcp"}, p.has())
	})
}

func TestApplyIsWholeOrNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPublisher()
		logger, _ := newLog()
		l := NewLoop(p, logger)
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		snap := Snapshot{Source: "s", Wants: []Want{want(t, "a", "80:80"), want(t, "b", "81:80")}}
		err := l.Apply(cancelled, snap)
		require.ErrorIs(t, err, context.Canceled)
		assert.Empty(t, p.takeCalls())

		// A client that goes away in the middle changes nothing.
		p.gate = make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			err := l.Apply(ctx, snap)
			done <- err
		}()
		p.gate <- struct{}{}
		synctest.Wait()
		cancel()
		p.gate <- struct{}{}
		require.NoError(t, <-done)
		p.gate = nil
		assert.Equal(t, []string{"a 80:80/tcp", "b 81:80/tcp"}, p.has())

		// It works before Run, and not after it.
		src := newSource("containers")
		l.AddSource("default", 1, src)
		err = l.Apply(t.Context(), Snapshot{Source: "containers", VM: "default", Generation: 1, Wants: []Want{want(t, "c", "82:80")}})
		require.NoError(t, err)
		ended, end := context.WithCancel(t.Context())
		end()
		require.NoError(t, l.Run(ended))
		err = l.Apply(t.Context(), Snapshot{Source: "s"})
		require.ErrorIs(t, err, os.ErrClosed)
		l.AddSource("", 0, newSource("late"))
		l.DropVM("default")
		assert.Equal(t, []string{"a 80:80/tcp", "b 81:80/tcp", "c 82:80/tcp"}, p.has(), "what is open is closed by the Publisher's shutdown")
	})
}

func TestLoopEndsWithSourcesInEachState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPublisher()
		logger, _ := newLog()
		l := NewLoop(p, logger)
		ctx, cancel := context.WithCancel(t.Context())
		waiting, failing, sending := newSource("waiting"), newSource("failing"), newSource("sending")
		for _, s := range []*source{waiting, failing, sending} {
			l.AddSource("", 0, s) // before Run: it waits to send
		}
		sending.send <- Snapshot{Source: "sending", Wants: []Want{want(t, "a", "80:80")}}
		failing.fail <- errBoom
		synctest.Wait()
		assert.Empty(t, p.has())
		ended := make(chan error)
		go func() { ended <- l.Run(ctx) }()
		synctest.Wait()
		assert.Equal(t, []string{"a 80:80/tcp"}, p.has())

		// One is in the middle of being published, and one waits behind it.
		p.gate = make(chan struct{})
		sending.send <- Snapshot{Source: "sending", Wants: []Want{want(t, "a", "81:80")}}
		synctest.Wait()
		waiting.send <- Snapshot{Source: "waiting", Wants: []Want{want(t, "b", "82:80")}}
		synctest.Wait()
		cancel()
		close(p.gate)
		require.NoError(t, <-ended)
		assert.Contains(t, p.has(), "a 81:80/tcp")
	})
}

func TestNotesAreKeptLoggedOnceAndTold(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, pub *publisher, _ *logBuffer) {
		changed := l.Changed()
		note := Note{Protocol: "sctp", Host: "127.0.0.1:3868", State: listener.Skipped, Detail: "protocol sctp is not carried"}
		snap := Snapshot{Source: "s", Wants: []Want{{Owner: dockerOwner("a"), Notes: []Note{note, note}}}}
		apply := func() {
			err := l.Apply(t.Context(), snap)
			require.NoError(t, err)
		}
		apply()
		<-changed
		began := time.Now()
		require.Len(t, l.Notes(), 1)
		assert.Equal(t, NoteView{Owner: dockerOwner("a"), Note: note, Since: began}, l.Notes()[0])
		assert.Empty(t, pub.Owners(), "a note is not published")

		time.Sleep(time.Minute)
		changed = l.Changed()
		apply()
		assert.Equal(t, began, l.Notes()[0].Since)
		select {
		case <-changed:
			assert.Fail(t, "nothing changed")
		default:
		}

		snap.Wants = nil
		apply()
		<-changed
		assert.Empty(t, l.Notes())
	})
}

// C-43: nothing of a source that is held counts, also what races with Hold.
func TestHoldClosesAndLetsBack(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, pub *publisher, _ *logBuffer) {
		src := newSource("services")
		l.AddSource("vm", 1, src)
		snap := Snapshot{Source: "services", VM: "vm", Generation: 1, Wants: []Want{want(t, "a", "80:80")}}
		src.send <- snap
		synctest.Wait()
		require.Len(t, pub.Owners(), 1)

		l.Hold("vm", "services", true)
		assert.Empty(t, pub.Owners())
		assert.True(t, l.Held("vm", "services"))
		snap.Wants = []Want{want(t, "a", "80:80"), want(t, "b", "81:80")}
		src.send <- snap
		synctest.Wait()
		assert.Empty(t, pub.Owners())

		l.Hold("vm", "services", false)
		assert.Len(t, pub.Owners(), 2)
	})
}
