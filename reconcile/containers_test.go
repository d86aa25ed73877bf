package reconcile

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestContainersRhythm: C-30, every 2 s until the first complete listing, then
// every 30 s; what changed without an event is found so (FB-088).
func TestContainersRhythm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(run("a", 0, tcp(80, 80)))
		e.deaf, e.fails = true, errors.New("engine at tcp://10.0.2.2:2375 does not answer")
		b := newContainersBed(t, e)
		assert.Empty(t, b.after(9*time.Second))
		require.Len(t, e.lists, 5, "one when the stream did not open for the second time, then every 2 s")
		for i, at := range e.lists[1:] {
			assert.Equal(t, containersRetry, at.Sub(e.lists[i]))
		}
		st := b.src.Status()
		assert.False(t, st.Reachable)
		assert.Equal(t, 5, st.Failures)
		assert.Equal(t, "engine at tcp://10.0.2.2:2375 does not answer", st.Detail)

		e.set(func() { e.fails = nil })
		assert.Equal(t, e.has(), b.after(2*time.Second))
		require.Equal(t, 6, e.listings())
		assert.Equal(t, ContainersStatus{Reachable: true, Listed: e.lists[5], Containers: 1,
			Detail: "changes of containers are seen within 30s only: engine at tcp://10.0.2.2:2375 does not answer"}, b.src.Status())

		e.set(func() { e.running["a"] = run("a", 0, tcp(81, 80)) })
		assert.NotEqual(t, e.has(), b.after(28*time.Second))
		assert.Equal(t, e.has(), b.after(2*time.Second))
		b.after(5 * time.Minute)
		assert.Equal(t, 17, e.listings())
	})
}

// TestContainersUnreachable: C-31, an engine that fails takes nothing away, is
// warned of once, and comes back by itself.
func TestContainersUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(run("a", 0, tcp(80, 80)), run("b", 0, tcp(81, 80)))
		b := newContainersBed(t, e)
		all := b.after(time.Second)
		require.Len(t, all, 2)
		b.pub.takeCalls()

		e.set(func() { e.fails = errors.New("engine at tcp://10.0.2.2:2375 answers nonsense") })
		e.set(func() { clear(e.running) })
		e.cut(true)
		assert.Equal(t, all, b.after(time.Hour))
		assert.Equal(t, 1, b.log.lines("level=WARN"))
		assert.Equal(t, 1, b.log.lines("level=WARN", "container engine does not answer", "answers nonsense", "vm=default"))
		assert.Empty(t, slices.DeleteFunc(b.pub.takeCalls(), func(c string) bool { return c == "publish a" || c == "publish b" }), "C-31")

		e.set(func() { e.fails = nil; e.running["b"] = run("b", 0, tcp(81, 80)) })
		e.cut(false)
		assert.Equal(t, e.has(), b.after(2*time.Second))
		assert.Equal(t, 2, b.log.lines("container engine answers"), "when it came up, and when it was back")
		assert.Equal(t, "", b.src.Status().Detail)
	})
}

// TestContainersFlapping: an engine that fails every other time is warned of once
// a minute.
func TestContainersFlapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(run("a", 0, tcp(80, 80)))
		b := newContainersBed(t, e)
		b.after(time.Second)
		for i := range 600 {
			e.set(func() {
				e.fails = nil
				if i%2 == 0 {
					e.fails = errBoom
				}
			})
			e.tell("a", "start")
			assert.Len(t, b.after(time.Second), 1)
		}
		assert.LessOrEqual(t, b.log.lines("level=WARN"), 10)
		assert.LessOrEqual(t, b.log.lines("container engine"), 2*10+1)
	})
}

// TestContainersSlow: an engine that takes half a minute is slow, not dead; one
// that never answers is asked one thing at a time.
func TestContainersSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(run("a", 0, tcp(80, 80)))
		e.slow = 30 * time.Second
		b := newContainersBed(t, e)
		assert.Empty(t, b.after(29*time.Second))
		assert.Equal(t, "the container engine has not answered for 29s", b.src.Status().Detail)
		assert.Equal(t, e.has(), b.after(2*time.Second))
		assert.True(t, b.src.Status().Reachable)
		assert.Zero(t, b.log.lines("level=WARN"))

		// The engine hangs while an event comes: nothing goes, and it is asked anew.
		e.set(func() { e.slow = time.Hour })
		e.start(run("b", 1, tcp(81, 80)))
		assert.Len(t, b.after(10*time.Minute), 1)
		assert.Equal(t, 1, b.log.lines("level=WARN"))
		assert.LessOrEqual(t, e.listings(), 13)
		e.set(func() { e.slow = 0 })
		assert.Equal(t, e.has(), b.after(listingLimit+containersRetry))
	})
}

// TestContainersBurst: a burst of events is a few listings, and each change is in
// force well within a second.
func TestContainersBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		b := newContainersBed(t, e)
		b.after(time.Second)
		before := e.listings()
		for i := range 50 {
			e.start(run(fmt.Sprint(i), i, tcp(uint16(8000+i), 80)))
			e.tell(fmt.Sprint(i), "health")
		}
		assert.Equal(t, e.has(), b.after(300*time.Millisecond))
		assert.LessOrEqual(t, e.listings()-before, 3)

		// In the middle of a burst that goes on, too.
		before = e.listings()
		for i := range 100 {
			e.start(run(fmt.Sprint(50+i), i, tcp(uint16(8050+i), 80)))
			b.after(10 * time.Millisecond)
			if i >= 30 {
				assert.Contains(t, b.pub.has(), fmt.Sprintf("%d %d:%d/tcp", 50+i-30, 8050+i-30, 8050+i-30))
			}
		}
		assert.LessOrEqual(t, e.listings()-before, 11)
	})
}

// TestContainersFB067FB068: a container's port is free 500 ms after it died, also
// when it lived for milliseconds.
func TestContainersFB067FB068(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.slow = 20 * time.Millisecond
		b := newContainersBed(t, e)
		b.after(time.Second)
		for range 50 {
			e.start(run("a", 0, tcp(80, 80)))
			assert.Equal(t, []string{"a 80:80/tcp"}, b.after(500*time.Millisecond))
			e.stop("a")
			assert.Empty(t, b.after(500*time.Millisecond))

			e.start(run("b", 0, tcp(80, 80)))
			b.after(5 * time.Millisecond)
			e.stop("b")
			assert.Empty(t, b.after(500*time.Millisecond))
			assert.Empty(t, b.loop.Notes())
		}
	})
}

// TestContainersFB078: what happens while the first listing is under way counts,
// whenever it happens.
func TestContainersFB078(t *testing.T) {
	random := rand.New(rand.NewPCG(78, 1))
	for range 100 {
		placed := time.Duration(random.Int64N(int64(2500 * time.Millisecond)))
		for _, start := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(run("there", 0, tcp(80, 80)))
				e.slow = 2 * time.Second
				b := newContainersBed(t, e)
				b.after(placed)
				if start {
					e.start(run("late", 1, tcp(81, 80)))
				} else {
					e.stop("there")
				}
				// The listing under way, and another, take 2 s each.
				e.set(func() { e.slow = 0 })
				assert.Equal(t, e.has(), b.after(max(0, 2*time.Second-placed)+time.Second))
			})
		}
	}
}

// TestContainersFB079: what happened while there was no stream is found when
// there is one again, within a second.
func TestContainersFB079(t *testing.T) {
	random := rand.New(rand.NewPCG(79, 1))
	for _, away := range []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			e := newEngine()
			for i := range 10 {
				e.running[fmt.Sprint(i)] = run(fmt.Sprint(i), i, tcp(uint16(8000+i), 80))
			}
			b := newContainersBed(t, e)
			b.after(time.Second)
			for range 20 {
				e.cut(true)
				for range 10 {
					id := fmt.Sprint(random.IntN(20))
					e.set(func() {
						if _, runs := e.running[id]; runs {
							delete(e.running, id)
						} else {
							e.running[id] = run(id, 1, tcp(uint16(9000+random.IntN(1000)), 80))
						}
					})
				}
				b.after(away)
				e.cut(false)
				assert.Equal(t, e.has(), b.after(time.Second))
			}
		})
	}
}

// TestContainersFB080: a stream that is cut while nothing happens, and replays
// its last event, opens nothing again and fills no log.
func TestContainersFB080(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(run("a", 0, tcp(80, 80)))
		b := newContainersBed(t, e)
		require.Len(t, b.after(time.Second), 1)
		b.pub.takeCalls()
		lines := b.log.lines("")
		opened := e.opened
		for range 14 { // the loop states everything again after 30 s
			e.cut(false)
			b.after(time.Second)
			e.tell("a", "start")
			b.after(time.Second)
		}
		assert.Equal(t, opened+14, e.opened)
		assert.Empty(t, b.pub.takeCalls())
		assert.LessOrEqual(t, b.log.lines(""), lines+1)
	})
}

// TestContainersEventsRefused: an engine without events is said once, and only
// while it answers.
func TestContainersEventsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(run("a", 0, tcp(80, 80)))
		e.deaf = true
		b := newContainersBed(t, e)
		assert.Len(t, b.after(time.Hour), 1)
		assert.Equal(t, 1, b.log.lines("level=WARN"))
		assert.Equal(t, 1, b.log.lines("events cannot be followed"))
		e.cut(false)
		b.after(time.Second)
		assert.Equal(t, 1, b.log.lines("events are followed again"))
		assert.Empty(t, b.src.Status().Detail)
	})
}

// TestContainersFB070: whatever happens in whatever order, after a quiet second
// the host has what the engine has, and ports that stayed were not touched.
func TestContainersFB070(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(70, 1))
		e := newEngine(run("stays", 0, tcp(7999, 80)))
		b := newContainersBed(t, e)
		b.after(time.Second)
		b.pub.takeCalls()
		for step := range 500 {
			i := random.IntN(30)
			id := fmt.Sprint(i)
			switch random.IntN(6) {
			case 0, 1:
				e.start(run(id, step, tcp(uint16(8000+i), 80), over("udp", tcp(uint16(8000+i), 80))))
			case 2:
				e.stop(id)
			case 3: // restarted with another dynamic port (FB-089)
				e.start(run(id, step, tcp(uint16(49152+random.IntN(1000)), 80)))
			case 4: // the event is lost with its stream
				e.cut(false)
				e.set(func() { delete(e.running, id) })
			case 5: // the engine restarts
				e.cut(true)
				e.set(func() { e.fails = errBoom })
				b.after(time.Duration(random.IntN(3)) * time.Second)
				e.set(func() { e.fails = nil })
				e.cut(false)
			}
			if random.IntN(4) == 0 {
				assert.Equal(t, e.has(), b.after(time.Second), "step %d", step)
			}
		}
		assert.Equal(t, e.has(), b.after(time.Second))
		assert.NotContains(t, b.pub.takeCalls(), "withdraw stays")
	})
}

// TestContainersChanges: FB-047, FB-082, FB-088, FB-089: what changes without the
// container's leaving.
func TestContainersChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := run("1", 0, tcp(80, 80))
		one.Name = "one"
		e := newEngine(one)
		b := newContainersBed(t, e)
		b.after(time.Second)
		b.pub.takeCalls()

		one.Name = "two"
		e.set(func() { e.running["1"] = one })
		e.tell("1", "rename")
		b.after(time.Second)
		assert.Equal(t, "no such name", leads(b.loop.Names(), "one"))
		assert.Equal(t, "[127.0.0.1 ::1]", leads(b.loop.Names(), "two"))
		assert.Empty(t, b.pub.takeCalls(), "FB-082: a rename touches no port")

		// It takes its name back while another takes the other, and the stream is away.
		e.cut(true)
		one.Name = "one"
		other := run("2", 1)
		other.Name = "two"
		e.set(func() { e.running["1"], e.running["2"] = one, other })
		b.after(time.Second)
		e.cut(false)
		b.after(time.Second)
		assert.Equal(t, "1", b.loop.Names().Views()[0].Owners[0].ID)
		assert.Equal(t, "2", b.loop.Names().Views()[1].Owners[0].ID)
		assert.Empty(t, b.pub.takeCalls())

		for i := range 20 { // FB-089: the id is the same, the port is not
			one.Bindings = []docker.Binding{tcp(uint16(49153+i), 80)}
			e.start(one)
			assert.Equal(t, e.has(), b.after(time.Second))
		}
	})
}

// TestContainersEnds: a source whose life ends in the middle of whatever leaves
// nothing behind, and its snapshots carry its life.
func TestContainersEnds(t *testing.T) {
	for _, slow := range []time.Duration{0, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			e := newEngine(run("a", 0, at("127.0.0.1", tcp(8080, 80))))
			e.slow = slow
			log, _ := newLog()
			o := options(e, log)
			o.Generation, o.VM = 7, "box"
			o.Reach = func(ctx context.Context, _ netip.AddrPort) error { <-ctx.Done(); return ctx.Err() }
			src := NewContainers(o)
			assert.Equal(t, "containers", src.Name())
			ctx, cancel := context.WithCancel(context.Background())
			out := make(chan Snapshot)
			done := make(chan error)
			go func() { done <- src.Run(ctx, out) }()
			if slow == 0 {
				snap := <-out
				assert.Equal(t, "containers", snap.Source)
				assert.Equal(t, "box", snap.VM)
				assert.EqualValues(t, 7, snap.Generation)
				require.Len(t, snap.Wants, 1)
				assert.Equal(t, listener.Owner{Kind: "docker", ID: "a", VM: "box"}, snap.Wants[0].Owner)
			}
			synctest.Wait()
			cancel()
			assert.ErrorIs(t, <-done, context.Canceled)
		})
	}
}

// BenchmarkContainersSnapshot makes a Snapshot of a listing of 1 000 containers
// with a port each.
func BenchmarkContainersSnapshot(b *testing.B) {
	log, _ := newLog()
	out := make(chan Snapshot, 1)
	r := &containersRun{
		Containers: NewContainers(options(newEngine(), log)), out: out,
		reach: newReach(nil), own: make(map[string]netip.Addr), good: true,
	}
	for i := range 1000 {
		r.listed = append(r.listed, run(fullID(fmt.Sprintf("%04x", i)), i, at("0.0.0.0", tcp(uint16(8000+i), 80)), at("::", tcp(uint16(8000+i), 80))))
	}
	n := newNames()
	b.ReportAllocs()
	for b.Loop() {
		r.send(b.Context())
		n.set((<-out).Wants)
	}
}
