package reconcile

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"testing/synctest"
	"time"

	vmm "github.com/culvertnet/culvert/guest/vm"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A bench is a running loop, VMs, and one VM called "default" in a bubble of
// its own. synctest fails the test when a goroutine is left behind.
type vmBench struct {
	*VMs
	*publisher
	*attacher
	*monitor
	log     *logBuffer
	sources []*source // one for each life that became ready
}

func inVMs(t *testing.T, f func(t *testing.T, b *vmBench)) {
	t.Helper()
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, log *logBuffer) {
		b := &vmBench{VMs: NewVMs(l, l.log), publisher: p, attacher: newAttacher(), monitor: newMonitor(), log: log}
		require.NoError(t, b.VMs.Add(VM{Name: "default", Attacher: b.attacher, VMM: b.monitor, Sources: func(generation uint64, _ Link) []Source {
			src := newSource("containers")
			b.sources = append(b.sources, src)
			return []Source{src}
		}}))
		synctest.Wait()
		f(t, b)
		b.VMs.Close()
		assert.Empty(t, b.VMs.Views())
		assert.True(t, b.attacher.closed)
	})
}

// is asserts the VM's state now.
func (b *vmBench) is(t *testing.T, state VMState, generation uint64, detail string) {
	t.Helper()
	synctest.Wait()
	v, has := b.View("default")
	require.True(t, has)
	assert.Equal(t, state.String(), v.State.String())
	assert.Equal(t, generation, v.Generation)
	assert.Equal(t, detail, v.Detail)
}

// ready makes the next life and sees it become ready.
func (b *vmBench) ready(t *testing.T, name string, connected bool) *link {
	t.Helper()
	l := b.attacher.newLink(name, connected)
	b.next <- l
	require.NoError(t, b.Wait(t.Context(), "default", VMReady))
	return l
}

func TestVMLife(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		b.is(t, VMWaiting, 0, "nothing has attached yet")
		changes, cancel := b.Subscribe()
		defer cancel()

		// Attached while it boots: the node is silent, then refuses, then answers.
		l := b.attacher.newLink("one", true)
		l.silent = true
		b.next <- l
		b.is(t, VMStalled, 1, "attached, the node has not answered yet")
		time.Sleep(90 * time.Second)
		b.is(t, VMStalled, 1, "attached, the node has not answered yet")
		l.set(func(l *link) { l.silent, l.answer = false, errBoom })
		time.Sleep(2 * time.Second)
		b.is(t, VMStalled, 1, "attached, the node has not answered yet: boom")
		assert.Empty(t, b.attacher.takeCalls(), "no listener opens before the first answer (C-27)")
		l.set(func(l *link) { l.answer = nil })
		began := time.Now()
		time.Sleep(probeFirst + 2*time.Millisecond)
		b.is(t, VMReady, 1, "")
		v, _ := b.View("default")
		assert.Equal(t, Probe{OK: true, At: v.Probe.At, RTT: time.Millisecond}, v.Probe)
		assert.WithinRange(t, v.Since, began, time.Now())
		assert.Equal(t, []string{"attach one"}, b.attacher.takeCalls())

		// Its sources run.
		b.sources[0].send <- Snapshot{Source: "containers", VM: "default", Generation: 1, Wants: []Want{want(t, "a", "80:80")}}
		synctest.Wait()
		assert.Equal(t, []string{"a 80:80/tcp"}, b.has())

		// Two misses are no stall, three are; listeners stay (C-27).
		l.set(func(l *link) { l.silent = true })
		time.Sleep(5 * time.Second)
		b.is(t, VMReady, 1, "")
		time.Sleep(2 * time.Second)
		b.is(t, VMStalled, 1, "the node does not answer")
		assert.Empty(t, b.attacher.takeCalls())
		assert.Equal(t, []string{"a 80:80/tcp"}, b.has())
		time.Sleep(time.Hour)
		b.is(t, VMStalled, 1, "the node does not answer")
		l.set(func(l *link) { l.silent = false })
		time.Sleep(probeConnected + 2*time.Millisecond)
		b.is(t, VMReady, 1, "")
		assert.Empty(t, b.attacher.takeCalls(), "attached once a life")

		// QEMU goes: listeners first, then the sources' rows, then the link.
		l.reason = errors.New("QEMU closed the connection")
		l.slow = time.Minute
		close(l.done)
		b.is(t, VMGone, 1, "QEMU closed the connection")
		assert.Equal(t, []string{"detach one"}, b.attacher.takeCalls())
		assert.Empty(t, b.has())
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, []string{"close one"}, b.attacher.takeCalls())
		b.is(t, VMGone, 1, "QEMU closed the connection")

		b.ready(t, "two", true)
		b.is(t, VMReady, 2, "")
		assert.Equal(t, []string{"attach two"}, b.attacher.takeCalls())
		cancel()
		var seen []string
		for v := range changes {
			seen = append(seen, fmt.Sprint(v.State, v.Generation))
		}
		assert.Equal(t, []string{"stalled 1", "ready 1", "stalled 1", "ready 1", "gone 1", "stalled 2", "ready 2"}, seen)
	})
}

func TestVMProbeRhythm(t *testing.T) {
	for connected, every := range map[bool]time.Duration{true: 2 * time.Second, false: time.Second} {
		t.Run(fmt.Sprint("connected=", connected), func(t *testing.T) {
			inVMs(t, func(t *testing.T, b *vmBench) {
				l := b.attacher.newLink("one", connected)
				l.answer = errBoom
				began := time.Now()
				b.next <- l
				time.Sleep(600 * time.Millisecond)
				l.set(func(l *link) { l.answer = nil })
				time.Sleep(10 * time.Second)
				l.mu.Lock()
				defer l.mu.Unlock()
				var at []time.Duration
				for _, p := range l.probes[:6] {
					at = append(at, p.Sub(began))
				}
				ms := time.Millisecond
				assert.Equal(t, []time.Duration{0, 250 * ms, 500 * ms, 750 * ms, 750*ms + every, 750*ms + 2*every}, at)
			})
		})
	}
}

func TestVMConnectionlessIsGoneAfterThreeMissedProbes(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		l := b.ready(t, "one", false)
		l.set(func(l *link) { l.silent = true })
		left := time.Now()
		require.NoError(t, b.Wait(t.Context(), "default", VMGone))
		assert.LessOrEqual(t, time.Since(left), 4*time.Second)
		b.is(t, VMGone, 1, "the node missed 3 probes of 1s")
		assert.Equal(t, []string{"attach one", "detach one", "close one"}, b.attacher.takeCalls())
		b.ready(t, "two", false)
		b.is(t, VMReady, 2, "")
	})
}

func TestVMConnectionlessMissesMustBeInARow(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		l := b.ready(t, "one", false)
		for range 20 {
			l.set(func(l *link) { l.silent = true })
			time.Sleep(2500 * time.Millisecond)
			l.set(func(l *link) { l.silent = false })
			time.Sleep(1500 * time.Millisecond)
			b.is(t, VMReady, 1, "")
		}
	})
}

func TestVMConnectionlessThatNeverAnswersMakesRoom(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		l := b.attacher.newLink("one", false)
		l.silent = true
		b.next <- l
		time.Sleep(firstAnswerWithin - time.Second)
		b.is(t, VMStalled, 1, "attached, the node has not answered yet")
		time.Sleep(2 * time.Second)
		b.is(t, VMGone, 1, "the node has not answered within 30s")
		assert.Equal(t, []string{"close one"}, b.attacher.takeCalls())
		b.ready(t, "two", false)
	})
}

func TestVMAcceptErrors(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		refused := errors.New("dial unix /run/vm.sock: connection refused")
		began := time.Now()
		for range 20 {
			b.next <- refused
		}
		b.is(t, VMWaiting, 0, "nothing has attached yet; last try: dial unix /run/vm.sock: connection refused")
		b.next <- errBoom
		time.Sleep(time.Minute)
		b.is(t, VMWaiting, 0, "nothing has attached yet; last try: boom")
		assert.Equal(t, 1, b.log.lines("attach failed", "connection refused"), "once, though it failed twenty times")
		assert.Equal(t, 1, b.log.lines("attach failed", "boom"))

		l := b.ready(t, "one", true)
		assert.Greater(t, time.Since(began), time.Minute)
		l.reason = errors.New("QEMU closed the connection")
		close(l.done)
		b.next <- refused
		time.Sleep(time.Second)
		b.is(t, VMGone, 1, "QEMU closed the connection; last try: dial unix /run/vm.sock: connection refused")
		b.ready(t, "two", true)
		b.is(t, VMReady, 2, "")
	})
}

func TestVMAcceptBacksOff(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		began := time.Now()
		for range 200 {
			b.next <- errBoom
		}
		for len(b.next) > 0 {
			time.Sleep(time.Second)
		}
		// Each delay is between 1 s and 2 s but for the first three.
		assert.WithinRange(t, time.Now(), began.Add(196*time.Second), began.Add(399*time.Second))
	})
}

func TestVMLinkDiesDuringTheFirstProbe(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		l := b.attacher.newLink("one", true)
		l.deaf = true
		b.next <- l
		b.is(t, VMStalled, 1, "attached, the node has not answered yet")
		close(l.done)
		b.is(t, VMGone, 1, "the datapath ended")
		assert.Equal(t, []string{"close one"}, b.attacher.takeCalls(), "never attached, so not detached")
	})
}

func TestVMLinkDiesWhileItIsAttached(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		changes, cancel := b.Subscribe()
		b.attacher.gate = make(chan struct{})
		l := b.attacher.newLink("one", true)
		b.next <- l
		time.Sleep(time.Second)
		b.is(t, VMStalled, 1, "attached, the node has not answered yet")
		close(l.done)
		b.attacher.gate <- struct{}{}
		b.is(t, VMGone, 1, "the datapath ended")
		assert.Equal(t, []string{"attach one", "detach one", "close one"}, b.attacher.takeCalls())
		assert.Empty(t, b.sources)
		cancel()
		for v := range changes {
			assert.NotEqual(t, VMReady, v.State, "it never was ready")
		}
	})
}

func TestVMLateProbeOfAnEarlierLifeChangesNothing(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		one := b.ready(t, "one", true)
		one.set(func(l *link) { l.deaf = true })
		time.Sleep(5 * time.Second) // a probe hangs
		one.slow = 10 * time.Second
		close(one.done)
		b.is(t, VMGone, 1, "the datapath ended")
		two := b.attacher.newLink("two", true)
		two.silent = true
		b.next <- two
		time.Sleep(time.Minute) // the hanging one came back with success
		b.is(t, VMStalled, 2, "attached, the node has not answered yet")
		v, _ := b.View("default")
		assert.False(t, v.Probe.OK)
		assert.Zero(t, v.Probe.RTT)
		assert.Equal(t, []string{"attach one", "detach one", "close one"}, b.attacher.takeCalls())
	})
}

func TestVMLateSnapshotOfAnEarlierLifeChangesNothing(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		one := b.ready(t, "one", true)
		close(one.done)
		b.is(t, VMGone, 1, "the datapath ended")
		b.ready(t, "two", true)
		b.loop.in <- Snapshot{Source: "containers", VM: "default", Generation: 1, Wants: []Want{want(t, "a", "80:80")}}
		b.sources[1].send <- Snapshot{Source: "containers", VM: "default", Generation: 2, Wants: []Want{want(t, "b", "81:80")}}
		synctest.Wait()
		assert.Equal(t, []string{"b 81:80/tcp"}, b.has())
	})
}

// Ended in each stage, a VM leaves nothing behind: the bubble ends only when
// every goroutine has.
func TestVMRemovedInEachStage(t *testing.T) {
	stages := map[string]struct {
		prepare func(t *testing.T, b *vmBench)
		calls   []string
	}{
		"accepting":   {func(t *testing.T, b *vmBench) {}, []string{"close"}},
		"backing off": {func(t *testing.T, b *vmBench) { b.next <- errBoom; synctest.Wait() }, []string{"close"}},
		"first probe": {func(t *testing.T, b *vmBench) {
			l := b.attacher.newLink("one", true)
			l.deaf = true
			b.next <- l
			synctest.Wait()
		}, []string{"close one", "close"}},
		"between probes": {func(t *testing.T, b *vmBench) {
			l := b.attacher.newLink("one", true)
			l.answer = errBoom
			b.next <- l
			synctest.Wait()
		}, []string{"close one", "close"}},
		"attaching": {func(t *testing.T, b *vmBench) {
			b.attacher.gate = make(chan struct{})
			b.next <- b.attacher.newLink("one", true)
			time.Sleep(time.Second)
			time.AfterFunc(time.Second, func() { close(b.attacher.gate) })
		}, []string{"attach one", "detach one", "close one", "close"}},
		"ready": {func(t *testing.T, b *vmBench) { b.ready(t, "one", true) },
			[]string{"attach one", "detach one", "close one", "close"}},
		"held": {func(t *testing.T, b *vmBench) {
			b.ready(t, "one", true)
			b.says(vmm.Event{Kind: vmm.Shutdown})
		}, []string{"attach one", "detach one", "close one", "close"}},
		"reset": {func(t *testing.T, b *vmBench) {
			b.ready(t, "one", true)
			b.says(vmm.Event{Kind: vmm.Reset})
		}, []string{"attach one", "detach one", "close one", "close"}},
		"paused": {func(t *testing.T, b *vmBench) {
			b.ready(t, "one", true)
			b.says(vmm.Event{Kind: vmm.Paused})
		}, []string{"attach one", "detach one", "close one", "close"}},
		"retired": {func(t *testing.T, b *vmBench) {
			l := b.ready(t, "one", true)
			l.slow = time.Minute
			close(l.done)
			synctest.Wait()
		}, []string{"attach one", "detach one", "close one", "close"}},
	}
	for name, stage := range stages {
		t.Run(name, func(t *testing.T) {
			inVMs(t, func(t *testing.T, b *vmBench) {
				stage.prepare(t, b)
				b.Remove("default")
				b.Remove("default")
				assert.Equal(t, stage.calls, b.attacher.takeCalls())
				_, has := b.View("default")
				assert.False(t, has)
				if name == "ready" {
					assert.Zero(t, b.log.lines("level=WARN"), "an end that was asked for is no warning")
					assert.Equal(t, 1, b.log.lines("state=gone"))
				}
			})
		})
	}
}

func TestFB121RandomLives(t *testing.T) {
	const seed = 121
	random := rand.New(rand.NewPCG(seed, seed))
	inVMs(t, func(t *testing.T, b *vmBench) {
		for i := range 200 {
			l := b.attacher.newLink(fmt.Sprint(i), random.IntN(2) == 0)
			l.silent = random.IntN(4) == 0
			l.deaf = random.IntN(8) == 0
			l.slow = time.Duration(random.IntN(100)) * time.Millisecond
			if random.IntN(4) == 0 {
				b.next <- errBoom
			}
			b.next <- l
			for range random.IntN(4) {
				time.Sleep(time.Duration(random.IntN(5000)) * time.Millisecond)
				l.set(func(l *link) { l.silent = !l.silent })
			}
			time.Sleep(time.Duration(random.IntN(3)) * time.Millisecond)
			close(l.done)
			<-l.closed
		}
		last := b.ready(t, "last", true)
		b.is(t, VMReady, 201, "")
		attached := ""
		for _, c := range b.attacher.takeCalls() {
			var what, name string
			_, _ = fmt.Sscan(c, &what, &name)
			switch what {
			case "attach":
				require.Empty(t, attached)
				attached = name
			case "detach":
				require.Equal(t, attached, name)
				attached = ""
			case "close":
				require.Empty(t, attached, "a link is closed after its VM is detached")
			}
		}
		assert.Equal(t, last.name, attached)
	})
}

// Twenty boots: what the file asks for is never withdrawn, what the guest runs is
// set up from its own listing each time, and nobody types anything.
func TestFB119EveryBootRestoresTheForwards(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		ssh := listener.Owner{Kind: listener.KindConfig, ID: "22:22/tcp"}
		row := func(state listener.State) {
			b.publisher.mu.Lock()
			defer b.publisher.mu.Unlock()
			b.publisher.state[ssh] = state
		}
		row(listener.Pending)
		_, err := NewStatic(b.loop).SetConfig(t.Context(), mustSpec(t, "default", "22:22"))
		require.NoError(t, err)
		for boot := range uint64(20) {
			row(listener.Forwarded)
			l := b.ready(t, "guest", true)
			b.sources[boot].send <- Snapshot{Source: "containers", VM: "default", Generation: boot + 1, Wants: []Want{
				want(t, "db", "5432:5432"), want(t, "web", "80:80", "443:443"),
			}}
			synctest.Wait()
			assert.Equal(t, []string{"22:22/tcp 22:22/tcp", "db 5432:5432/tcp", "web 443:443/tcp", "web 80:80/tcp"}, b.has())
			row(listener.Pending)
			close(l.done)
			require.NoError(t, b.Wait(t.Context(), "default", VMGone))
			synctest.Wait()
			assert.Equal(t, int(boot)+1, b.log.lines("state=forwarded", "22:22/tcp"), "said at once, once a boot")
			assert.Equal(t, int(boot)+2, b.log.lines("state=pending", "22:22/tcp"))
			assert.Equal(t, []string{"22:22/tcp 22:22/tcp"}, b.has(), "gone with what they came from (C-26)")
		}
		assert.NotContains(t, b.publisher.takeCalls(), "withdraw 22:22/tcp")
	})
}

// C-47: a peer that comes and goes as fast as it can costs a bounded number of
// lives.
func TestVMPeerThatFlaps(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		for range 50 {
			l := b.attacher.newLink("flap", true)
			close(l.done)
			b.next <- l
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		v, _ := b.View("default")
		assert.LessOrEqual(t, v.Generation, uint64(21))
		assert.Greater(t, v.Generation, uint64(10))
	})
}

// C-29: whatever one VM's attacher and link do, another's life goes on.
func TestVMsAreIndependent(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		// "default" hangs in AttachVM, "closing" in Close of its link.
		b.attacher.gate = make(chan struct{})
		b.next <- b.attacher.newLink("one", true)
		closing := newAttacher()
		require.NoError(t, b.VMs.Add(VM{Name: "closing", Attacher: closing}))
		hung := closing.newLink("hung", true)
		hung.slow = time.Hour
		close(hung.done)
		closing.next <- hung
		synctest.Wait()

		good := newAttacher()
		require.NoError(t, b.VMs.Add(VM{Name: "good", Attacher: good}))
		for range 3 {
			l := good.newLink("good", true)
			good.next <- l
			began := time.Now()
			require.NoError(t, b.Wait(t.Context(), "good", VMReady))
			assert.LessOrEqual(t, time.Since(began), lifeEvery+2*time.Millisecond)
			close(l.done)
			require.NoError(t, b.Wait(t.Context(), "good", VMGone))
		}
		var names []string
		for _, v := range b.Views() {
			names = append(names, v.Name)
		}
		assert.Equal(t, []string{"default", "closing", "good"}, names)
		close(b.attacher.gate)
	})
}

func TestVMsAdd(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		again := newAttacher()
		require.ErrorContains(t, b.VMs.Add(VM{Name: "default", Attacher: again}), `add VM "default": name is taken`)
		assert.True(t, again.closed)
		b.VMs.Close()
		late := newAttacher()
		require.ErrorIs(t, b.VMs.Add(VM{Name: "late", Attacher: late}), os.ErrClosed)
		assert.True(t, late.closed)
		changes, cancel := b.Subscribe()
		cancel()
		_, open := <-changes
		assert.False(t, open)
	})
}

func TestVMsCloseEndsAllAtOnce(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		b.ready(t, "one", true).slow = time.Hour
		other := newAttacher()
		require.NoError(t, b.VMs.Add(VM{Name: "other", Attacher: other}))
		l := other.newLink("two", true)
		l.slow = time.Hour
		other.next <- l
		require.NoError(t, b.Wait(t.Context(), "other", VMReady))
		began := time.Now()
		b.VMs.Close()
		assert.Equal(t, time.Hour, time.Since(began))
		assert.Equal(t, []string{"attach two", "detach two", "close two", "close"}, other.takeCalls())
	})
}

func TestWait(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		require.ErrorIs(t, b.Wait(t.Context(), "nobody", VMReady), ErrNoSuchVM)
		require.NoError(t, b.Wait(t.Context(), "default", VMGone), "nothing is there")

		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		b.next <- errBoom
		err := b.Wait(ctx, "default", VMReady)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, `wait for VM "default" to be ready: it is waiting (nothing has attached yet; last try: boom)`)

		b.ready(t, "one", true)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorContains(t, b.Wait(ctx, "default", VMGone), "to be gone: it is ready: ")

		// A waiter sees the end of the life that was there, also when it is so slow
		// that the next is ready before it looks.
		met := make(chan error, 1)
		go func() { met <- b.Wait(t.Context(), "default", VMGone) }()
		synctest.Wait()
		b.VMs.mu.Lock()
		v := b.find("default")
		v.view.Generation++
		b.tell(v)
		b.VMs.mu.Unlock()
		require.NoError(t, <-met)

		// Removal meets gone, and ends the wait for anything else.
		never := make(chan error, 1)
		go func() { never <- b.Wait(t.Context(), "default", VMPaused) }()
		go func() { met <- b.Wait(t.Context(), "default", VMGone) }()
		synctest.Wait()
		b.Remove("default")
		require.NoError(t, <-met)
		require.ErrorIs(t, <-never, ErrNoSuchVM)
	})
}

func TestSubscriberThatFallsBehindIsClosed(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		slow, cancel := b.Subscribe()
		defer cancel()
		for range 40 { // three changes each
			close(b.ready(t, "x", true).done)
			require.NoError(t, b.Wait(t.Context(), "default", VMGone))
		}
		n := 0
		for range slow {
			n++
		}
		assert.Equal(t, stateBuffer, n)
	})
}

func TestVMStateNames(t *testing.T) {
	for state, name := range map[VMState]string{VMWaiting: "waiting", VMReady: "ready", VMStalled: "stalled", VMPaused: "paused", VMGone: "gone", 0: "unknown"} {
		assert.Equal(t, name, state.String())
	}
}
