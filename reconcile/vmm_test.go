package reconcile

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	vmm "github.com/culvertnet/culvert/guest/vm"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// monitor is a VMM that says what it is told to.
type monitor struct{ events chan vmm.Event }

func newMonitor() *monitor { return &monitor{make(chan vmm.Event)} }

func (m *monitor) Follow(ctx context.Context, say func(vmm.Event)) {
	for {
		select {
		case e := <-m.events:
			say(e)
		case <-ctx.Done():
			return
		}
	}
}

// says has the VMM say events, one right after the other, and waits until what
// follows at once has followed.
func (m *monitor) says(events ...vmm.Event) {
	for _, e := range events {
		m.events <- e
	}
	synctest.Wait()
}

var (
	_ VMM = (*monitor)(nil)
	_ VMM = (*vmm.QMP)(nil)

	running  = vmm.Event{Kind: vmm.Running}
	paused   = vmm.Event{Kind: vmm.Paused, Detail: "paused"}
	shutdown = vmm.Event{Kind: vmm.Shutdown, Detail: "guest-shutdown"}
	reset    = vmm.Event{Kind: vmm.Reset, Detail: "guest-reset"}
	lostVMM  = vmm.Event{Kind: vmm.Lost, Detail: "QMP socket /run/qmp: nobody listens there"}
)

const (
	whyPaused   = "its VMM paused it"
	whyShutdown = "the guest has shut down (guest-shutdown)"
	whyReset    = "the guest was reset (guest-reset)"
)

// probed returns how often l's node was asked.
func (l *link) probed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.probes)
}

func bothKinds(t *testing.T, f func(t *testing.T, b *vmBench, connected bool)) {
	t.Helper()
	for _, connected := range []bool{true, false} {
		t.Run(fmt.Sprint("connected=", connected), func(t *testing.T) {
			inVMs(t, func(t *testing.T, b *vmBench) { f(t, b, connected) })
		})
	}
}

// C-28: a pause keeps listeners and flows, however long it is, and whether or
// not the attachment would tell of a peer that left.
func TestC28PauseAndResume(t *testing.T) {
	bothKinds(t, func(t *testing.T, b *vmBench, connected bool) {
		l := b.ready(t, "one", connected)
		b.sources[0].send <- Snapshot{Source: "containers", VM: "default", Generation: 1, Wants: []Want{want(t, "a", "80:80")}}
		b.attacher.takeCalls()
		for range 3 {
			b.says(vmm.Event{Kind: vmm.Paused})
			b.is(t, VMPaused, 1, "its VMM paused it")
			b.says(vmm.Event{Kind: vmm.Paused, Detail: "io-error"})
			b.is(t, VMPaused, 1, "its VMM paused it (io-error)")
			l.set(func(l *link) { l.silent = true })
			time.Sleep(2 * probeConnected)
			asked := l.probed()
			time.Sleep(time.Hour)
			b.is(t, VMPaused, 1, "its VMM paused it (io-error)")
			assert.True(t, l.isPaused())
			assert.Equal(t, asked, l.probed(), "asked while it cannot answer")
			l.set(func(l *link) { l.silent = false })
			b.says(running)
			assert.False(t, l.isPaused())
			time.Sleep(2 * time.Millisecond)
			b.is(t, VMReady, 1, "")
		}
		assert.Empty(t, b.attacher.takeCalls())
		assert.Equal(t, []string{"a 80:80/tcp"}, b.has())
		v, _ := b.View("default")
		assert.Equal(t, "running", v.VMM)
	})
}

// Probes that were missed before a pause, and the one that was under way when it
// began, do not count against the VM.
func TestPauseBetweenMisses(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		began := time.Now()
		at := func(s float64) { time.Sleep(time.Until(began.Add(time.Duration(s * float64(time.Second))))) }
		l := b.ready(t, "one", false)
		l.set(func(l *link) { l.silent = true })
		at(3.7) // asked at 1, 2 and 3 s, missed at 2 and 3 s
		b.says(paused, running)
		b.is(t, VMStalled, 1, noAnswerSince)
		at(5.9) // one of before ended at 4 s, the first of now at 5 s
		b.is(t, VMStalled, 1, noAnswerSince)
		l.set(func(l *link) { l.silent = false })
		at(6.5) // the second was missed at 6 s, the third passed
		b.is(t, VMReady, 1, "")
	})
}

// One that was resumed and does not answer is judged as any other.
func TestResumedButSilent(t *testing.T) {
	bothKinds(t, func(t *testing.T, b *vmBench, connected bool) {
		l := b.ready(t, "one", connected)
		l.set(func(l *link) { l.silent = true })
		b.says(paused)
		time.Sleep(time.Hour)
		b.says(running)
		b.is(t, VMStalled, 1, noAnswerSince)
		time.Sleep(time.Second + time.Millisecond)
		b.is(t, VMStalled, 1, noAnswerSince)
		time.Sleep(5 * time.Second)
		if connected {
			b.is(t, VMStalled, 1, noAnswerSince)
			l.set(func(l *link) { l.silent = false })
			require.NoError(t, b.Wait(t.Context(), "default", VMReady))
			assert.Equal(t, []string{"attach one"}, b.attacher.takeCalls())
		} else {
			b.is(t, VMGone, 1, "the node missed 3 probes of 1s")
		}
	})
}

func TestPausedWhileItBoots(t *testing.T) {
	bothKinds(t, func(t *testing.T, b *vmBench, connected bool) {
		// Paused from before it attached.
		b.says(vmm.Event{Kind: vmm.Paused, Detail: "prelaunch"})
		b.is(t, VMWaiting, 0, "nothing has attached yet")
		l := b.attacher.newLink("one", connected)
		l.silent = true
		b.next <- l
		b.is(t, VMPaused, 1, "its VMM paused it (prelaunch)")
		time.Sleep(time.Hour)
		b.is(t, VMPaused, 1, "its VMM paused it (prelaunch)")
		assert.Zero(t, l.probed())
		assert.True(t, l.isPaused())
		b.says(running)
		b.is(t, VMStalled, 1, noAnswerYet)
		assert.False(t, l.isPaused())

		// Paused in the middle: the time does not count.
		time.Sleep(firstAnswerWithin - 5*time.Second)
		b.says(paused)
		b.is(t, VMPaused, 1, whyPaused)
		time.Sleep(time.Hour)
		b.says(running)
		time.Sleep(firstAnswerWithin - 5*time.Second)
		b.is(t, VMStalled, 1, noAnswerYet)
		assert.Empty(t, b.attacher.takeCalls())
		l.set(func(l *link) { l.silent = false })
		require.NoError(t, b.Wait(t.Context(), "default", VMReady))
	})
}

// STOP while the listeners open: paused, and never said to be ready.
func TestPausedWhileItIsAttached(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		changes, cancel := b.Subscribe()
		b.attacher.gate = make(chan struct{})
		b.next <- b.attacher.newLink("one", true)
		time.Sleep(time.Second)
		b.says(paused)
		b.attacher.gate <- struct{}{}
		b.is(t, VMPaused, 1, whyPaused)
		assert.Len(t, b.sources, 1)
		cancel()
		for v := range changes {
			assert.NotEqual(t, VMReady, v.State)
		}
		b.says(running)
		require.NoError(t, b.Wait(t.Context(), "default", VMReady))
		assert.Equal(t, []string{"attach one"}, b.attacher.takeCalls())
	})
}

// When the VMM can no longer be asked, the probe decides.
func TestVMMLostWhilePaused(t *testing.T) {
	bothKinds(t, func(t *testing.T, b *vmBench, connected bool) {
		b.says(lostVMM)
		l := b.ready(t, "one", connected)
		b.says(paused)
		b.is(t, VMPaused, 1, whyPaused)
		b.says(lostVMM)
		b.is(t, VMStalled, 1, noAnswerSince)
		assert.False(t, l.isPaused(), "nobody would say when it is over")
		require.NoError(t, b.Wait(t.Context(), "default", VMReady))
		v, _ := b.View("default")
		assert.Equal(t, "lost ("+lostVMM.Detail+")", v.VMM)
		assert.Equal(t, 2, b.log.lines("level=WARN", "nobody listens there"), "each time that it is lost")
	})
}

// C-26: gone at once, and gone it stays while the VMM has no guest. QEMU 7.2 does
// not connect again, so its connection is kept for the next guest.
func TestC26Shutdown(t *testing.T) {
	bothKinds(t, func(t *testing.T, b *vmBench, connected bool) {
		l := b.ready(t, "one", connected)
		b.sources[0].send <- Snapshot{Source: "containers", VM: "default", Generation: 1, Wants: []Want{want(t, "a", "80:80")}}
		synctest.Wait()
		b.says(shutdown)
		b.is(t, VMGone, 1, whyShutdown)
		assert.Empty(t, b.has())
		b.next <- errBoom // nobody accepts
		asked := l.probed()
		time.Sleep(time.Hour)
		b.is(t, VMGone, 1, whyShutdown)
		assert.Equal(t, asked, l.probed())
		assert.Equal(t, []string{"attach one", "detach one"}, b.attacher.takeCalls())
		assert.Len(t, b.next, 1)

		b.says(reset, vmm.Event{Kind: vmm.Paused, Detail: "prelaunch"})
		time.Sleep(time.Minute)
		b.is(t, VMPaused, 2, "its VMM paused it (prelaunch)")
		assert.True(t, l.isPaused())
		b.says(paused, shutdown)
		b.is(t, VMGone, 2, whyShutdown)
		assert.False(t, l.isPaused())
		b.says(running)
		require.NoError(t, b.Wait(t.Context(), "default", VMReady))
		b.is(t, VMReady, 3, "")
		assert.Equal(t, []string{"attach one"}, b.attacher.takeCalls())
		close(l.done)
		synctest.Wait()
		assert.Equal(t, []string{"detach one", "close one"}, b.attacher.takeCalls())
	})
}

// The VMM leaves after its guest, in any order of the news, and another comes.
func TestShutdownAndTheVMMLeaves(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		one := b.ready(t, "one", true)
		b.says(shutdown, lostVMM)
		time.Sleep(time.Minute)
		b.is(t, VMGone, 1, whyShutdown) // the connection is there: so is the VMM
		close(one.done)
		b.is(t, VMGone, 1, whyShutdown)
		// The next attaches before it is known by its VMM, and need have none.
		two := b.ready(t, "two", true)
		b.is(t, VMReady, 2, "")
		b.says(running)
		b.is(t, VMReady, 2, "")

		close(two.done)
		b.says(shutdown)
		b.says(lostVMM)
		b.ready(t, "three", true)
		b.is(t, VMReady, 3, "")

		// Shut and lost, then back: what it says then holds.
		b.says(shutdown, lostVMM, shutdown)
		time.Sleep(time.Minute)
		b.is(t, VMGone, 3, "the guest has shut down (guest-shutdown)")
		b.says(lostVMM, running)
		require.NoError(t, b.Wait(t.Context(), "default", VMReady))
		b.is(t, VMReady, 4, "")
		assert.Equal(t, []string{"attach one", "detach one", "close one", "attach two", "detach two", "close two",
			"attach three", "detach three", "attach three"}, b.attacher.takeCalls())
	})
}

// Without a connection the VMM's own is what tells that it left.
func TestShutdownAndTheVMMLeavesConnectionless(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		b.ready(t, "one", false)
		b.says(shutdown, lostVMM)
		time.Sleep(time.Second)
		assert.Equal(t, []string{"attach one", "detach one", "close one"}, b.attacher.takeCalls())
		b.is(t, VMGone, 1, whyShutdown)
		b.ready(t, "two", false)
		b.says(shutdown)
		time.Sleep(time.Hour)
		b.is(t, VMGone, 2, whyShutdown)
		b.says(lostVMM)
		assert.Equal(t, []string{"attach two", "detach two", "close two"}, b.attacher.takeCalls())
		b.ready(t, "three", false)
		b.is(t, VMReady, 3, "")
	})
}

// A VMM without a guest attaches: as gone as one that had a guest.
func TestShutdownDuringAccept(t *testing.T) {
	bothKinds(t, func(t *testing.T, b *vmBench, connected bool) {
		b.says(shutdown)
		b.is(t, VMWaiting, 0, "nothing has attached yet")
		l := b.attacher.newLink("one", connected)
		b.next <- l
		time.Sleep(time.Hour)
		b.is(t, VMGone, 0, whyShutdown)
		assert.Zero(t, l.probed())
		assert.Empty(t, b.attacher.takeCalls())
		b.says(reset)
		require.NoError(t, b.Wait(t.Context(), "default", VMReady))
		b.is(t, VMReady, 1, "")
	})
}

// What ends the guest while the listeners open closes them again.
func TestGuestEndsWhileItIsAttached(t *testing.T) {
	for name, e := range map[string]vmm.Event{"shutdown": shutdown, "reset": reset} {
		t.Run(name, func(t *testing.T) {
			inVMs(t, func(t *testing.T, b *vmBench) {
				changes, cancel := b.Subscribe()
				b.attacher.gate = make(chan struct{}, 1)
				l := b.attacher.newLink("one", true)
				b.next <- l
				time.Sleep(time.Second)
				b.says(e)
				b.attacher.gate <- struct{}{}
				synctest.Wait()
				assert.Equal(t, []string{"attach one", "detach one"}, b.attacher.takeCalls())
				assert.Empty(t, b.sources, "none of a guest that is gone")
				cancel()
				for v := range changes {
					assert.NotEqual(t, VMReady, v.State, "it never was ready")
				}
				b.attacher.gate <- struct{}{}
				b.says(running)
				require.NoError(t, b.Wait(t.Context(), "default", VMReady))
				b.is(t, VMReady, 2, "")
			})
		})
	}
}

// C-27: a reset is leaving and returning, on the same link.
func TestC27Reset(t *testing.T) {
	bothKinds(t, func(t *testing.T, b *vmBench, connected bool) {
		ssh := listener.Owner{Kind: listener.KindConfig, ID: "22:22/tcp"}
		_, err := NewStatic(b.loop).SetConfig(t.Context(), mustSpec(t, "default", "22:22"))
		require.NoError(t, err)
		changes, cancel := b.Subscribe()
		l := b.ready(t, "one", connected)
		for boot := range uint64(20) {
			b.sources[boot].send <- Snapshot{Source: "containers", VM: "default", Generation: boot + 1, Wants: []Want{want(t, "a", "80:80")}}
			synctest.Wait()
			assert.Equal(t, []string{ssh.ID + " 22:22/tcp", "a 80:80/tcp"}, b.has())
			asked := l.probed()
			b.says(reset)
			b.is(t, VMGone, boot+1, whyReset)
			assert.Equal(t, []string{ssh.ID + " 22:22/tcp"}, b.has())
			// What the earlier guest sent last is read before anything is asked.
			time.Sleep(lifeEvery - time.Millisecond)
			assert.Equal(t, asked, l.probed())
			require.NoError(t, b.Wait(t.Context(), "default", VMReady))
			b.is(t, VMReady, boot+2, "")
			assert.Equal(t, []string{"attach one", "detach one"}, b.attacher.takeCalls()[:2])
			b.attacher.note("attach one") // of this life, taken above
			b.loop.in <- Snapshot{Source: "containers", VM: "default", Generation: boot + 1, Wants: []Want{want(t, "late", "81:80")}}
			synctest.Wait()
			assert.NotContains(t, b.has(), "late 81:80/tcp")
		}
		cancel()
		var states []string
		for v := range changes {
			states = append(states, v.State.String())
		}
		assert.Equal(t, []string{"stalled", "ready", "gone", "stalled", "ready", "gone"}, states[:6])
	})
}

// FB-118, FB-133: where a VM runs on without its link, and its VMM will never
// connect again, the VM says what it takes.
func TestRunsWithoutALink(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		b.says(running)
		time.Sleep(reconnectWithin - time.Millisecond)
		b.is(t, VMWaiting, 0, nothingYet) // a daemon that was started again
		time.Sleep(2 * time.Millisecond)
		b.is(t, VMWaiting, 0, nothingYet+mustRestart)
		l := b.ready(t, "one", true)
		b.is(t, VMReady, 1, "")
		time.Sleep(time.Hour)
		b.is(t, VMReady, 1, "")
		close(l.done)
		b.is(t, VMGone, 1, "the datapath ended")
		time.Sleep(2 * reconnectWithin)
		b.is(t, VMGone, 1, "the datapath ended"+mustRestart)
		b.says(lostVMM)
		b.is(t, VMGone, 1, "the datapath ended")
		time.Sleep(time.Hour)
		b.is(t, VMGone, 1, "the datapath ended")
		b.ready(t, "two", true)
	})
}

// A guest that is reset before it was ready has opened nothing.
func TestResetWhileItBoots(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		l := b.attacher.newLink("one", true)
		l.silent = true
		b.next <- l
		time.Sleep(5 * time.Second)
		b.says(reset)
		b.is(t, VMGone, 1, whyReset)
		time.Sleep(5 * time.Second)
		b.is(t, VMStalled, 2, noAnswerYet)
		assert.Empty(t, b.attacher.takeCalls())
	})
}

// C-47: a guest that resets as fast as it can costs ten lives a second.
func TestResetStorm(t *testing.T) {
	inVMs(t, func(t *testing.T, b *vmBench) {
		l := b.ready(t, "one", true)
		began := time.Now()
		for range 1000 {
			b.says(reset)
			time.Sleep(3 * time.Millisecond)
		}
		v, _ := b.View("default")
		assert.LessOrEqual(t, v.Generation, 2+uint64(time.Since(began)/lifeEvery))
		assert.Greater(t, v.Generation, uint64(10))
		for range 1000 { // between two looks
			b.events <- reset
		}
		time.Sleep(time.Second)
		require.NoError(t, b.Wait(t.Context(), "default", VMReady))
		after, _ := b.View("default")
		assert.LessOrEqual(t, after.Generation, v.Generation+11)
		assert.NotContains(t, b.attacher.takeCalls(), "close "+l.name)
	})
}

// FB-121, with a VMM: whatever comes in whatever order, each life is attached
// once and detached once, a link is closed after that, and the VM is found ready
// when all is well again.
func TestFB121RandomWords(t *testing.T) {
	const seed = 4
	random := rand.New(rand.NewPCG(seed, seed))
	words := []vmm.Event{running, paused, shutdown, reset, lostVMM, running}
	inVMs(t, func(t *testing.T, b *vmBench) {
		for i := range 300 {
			l := b.attacher.newLink(fmt.Sprint(i), random.IntN(2) == 0)
			l.silent = random.IntN(4) == 0
			b.next <- l
			for range random.IntN(12) {
				b.events <- words[random.IntN(len(words))]
				time.Sleep(time.Duration(random.IntN(1000)) * time.Millisecond / time.Duration(1+random.IntN(1000)))
				l.set(func(l *link) { l.silent = random.IntN(4) == 0 })
			}
			close(l.done)
			b.says(lostVMM)
			<-l.closed
		}
		b.says(running)
		last := b.ready(t, "last", true)
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
				require.Empty(t, attached)
			}
		}
		assert.Equal(t, last.name, attached)
	})
}
