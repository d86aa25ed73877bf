package eventfd

import (
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// mustPair makes both ends of one eventfd, each with a descriptor of its own as
// when they lie in two processes.
func mustPair(t *testing.T) (*Kick, *Call) {
	t.Helper()
	fd, err := New()
	require.NoError(t, err)
	other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	return mustKick(t, fd), mustCall(t, other)
}

func mustKick(t *testing.T, fd int) *Kick {
	t.Helper()
	k, err := NewKick(fd)
	require.NoError(t, err)
	t.Cleanup(func() { _ = k.Close() })
	return k
}

func mustCall(t *testing.T, fd int) *Call {
	t.Helper()
	c, err := NewCall(fd)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	return c
}

// waiting starts a Wait and returns when it is sure to see what comes.
func waiting(k *Kick) <-chan error {
	armed, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- k.Wait(func() bool {
			close(armed)
			return false
		})
	}()
	<-armed
	return done
}

func never() bool { return false }

// TestKick: each signal ends one wait, though nothing reads the counter.
func TestKick(t *testing.T) {
	datapathtest.Leaks(t)
	k, c := mustPair(t)
	for range 100 {
		done := waiting(k)
		c.Signal()
		require.NoError(t, <-done)
	}
}

// TestKickReady: there is no wait where there is something to do.
func TestKickReady(t *testing.T) {
	k, _ := mustPair(t)
	require.NoError(t, k.Wait(func() bool { return true }))
}

// TestKickBeforeWait: ready is called when nothing can be missed any more, so
// who signals after having made work, and who looks for work in ready, cannot
// both miss the other.
func TestKickBeforeWait(t *testing.T) {
	k, c := mustPair(t)
	const rounds = 20_000
	var made, taken atomic.Int64
	go func() {
		for range rounds {
			made.Add(1)
			c.Signal()
		}
	}()
	for taken.Load() < rounds {
		require.NoError(t, k.Wait(func() bool { return made.Load() > taken.Load() }))
		taken.Store(made.Load())
	}
}

func TestInterrupt(t *testing.T) {
	k, c := mustPair(t)
	done := waiting(k)
	k.Interrupt()
	require.NoError(t, <-done)

	k.Interrupt() // nobody waits: it is for the next
	require.NoError(t, k.Wait(never))

	done = waiting(k) // and for that one only
	c.Signal()
	require.NoError(t, <-done)
}

func TestKickClose(t *testing.T) {
	datapathtest.Leaks(t)
	k, _ := mustPair(t)
	done := waiting(k)
	require.NoError(t, k.Close())
	require.ErrorIs(t, <-done, os.ErrClosed)
	require.ErrorIs(t, k.Wait(never), os.ErrClosed)
	k.Interrupt()
	require.ErrorIs(t, k.Wait(never), os.ErrClosed)
}

// TestKickIsNoBusyLoop: a descriptor that is readable for ever wakes nobody
// again and again.
func TestKickIsNoBusyLoop(t *testing.T) {
	k, c := mustPair(t)
	c.Signal() // nothing reads it
	woken, returns := make(chan struct{}), 0
	var stop atomic.Bool
	go func() {
		for !stop.Load() {
			assert.NoError(t, k.Wait(never))
			returns++
		}
		close(woken)
	}()
	time.Sleep(50 * time.Millisecond) // long enough for thousands
	stop.Store(true)
	k.Interrupt()
	<-woken
	assert.LessOrEqual(t, returns, 3) // registered, signalled, interrupted
}

// TestPipes: a kick through a pipe does not fill it up, one whose other end has
// gone does not spin, and a call into a full pipe or to nobody does not block.
func TestPipes(t *testing.T) {
	datapathtest.Leaks(t)
	var p [2]int
	require.NoError(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
	k, c := mustKick(t, p[0]), mustCall(t, p[1])
	for range 20_000 { // 160 000 bytes, more than a pipe holds
		done := waiting(k)
		c.Signal()
		require.NoError(t, <-done)
	}
	for range 20_000 {
		c.Signal()
	}
	require.NoError(t, k.Close())
	c.Signal()
}

// TestCallNeverBlocks: the other process may have set the counter to its
// maximum, where a write waits.
func TestCallNeverBlocks(t *testing.T) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC) // blocking, as some make it
	require.NoError(t, err)
	_, err = unix.Write(fd, []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	require.NoError(t, err)
	mustCall(t, fd).Signal()
}

// TestRefused: what cannot be waited for is refused and closed.
func TestRefused(t *testing.T) {
	datapathtest.Leaks(t)
	f, err := os.Open("/proc/self/exe")
	require.NoError(t, err)
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	_, err = NewKick(fd)
	require.ErrorContains(t, err, "put kick on the poller")
	_, err = NewKick(-1)
	require.Error(t, err)
	_, err = NewCall(-1)
	require.Error(t, err)
}

func TestAllocs(t *testing.T) {
	k, c := mustPair(t)
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		c.Signal()
		k.Interrupt()
		_ = k.Wait(never)
	}))
}
