package main_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// margin is by how much this suite is more patient than the product's bounds:
// it shares two cores with the guest it emulates and with other tests. What a
// bound took is logged.
const margin = 2

// transfers are clients in the middle of something: downloads, uploads, and
// one that waits for an answer.
type transfers struct {
	ends chan transferEnd
	n    int
}

type transferEnd struct {
	what string
	err  error
	at   time.Time
}

func (e *env) startTransfers(t *testing.T) *transfers {
	t.Helper()
	tr := &transfers{ends: make(chan transferEnd)}
	run := func(what string, port int, use func(io.ReadWriter) error) {
		c := e.dial(t, port)
		moving := make(chan struct{})
		tr.n++
		go func() {
			buf := make([]byte, 4096)
			_, err := io.ReadFull(known(), buf)
			if err == nil && port == portFlood {
				_, err = io.ReadFull(c, buf)
			} else if err == nil {
				_, err = c.Write(buf)
			}
			close(moving)
			if err == nil {
				err = use(c)
			}
			tr.ends <- transferEnd{what, err, time.Now()}
		}()
		<-moving
	}
	for i := range 4 {
		run(fmt.Sprint("download ", i), portFlood, func(c io.ReadWriter) error {
			_, err := io.Copy(io.Discard, c)
			return err
		})
		run(fmt.Sprint("upload ", i), portSink, func(c io.ReadWriter) error {
			_, err := io.Copy(c, known())
			return err
		})
	}
	run("idle", portSink, func(c io.ReadWriter) error {
		_, err := io.Copy(io.Discard, c)
		return err
	})
	return tr
}

// assertReset waits for every transfer's end, which must be a reset (C-13:
// a clean end would pass half a file off as whole), within limit of since.
func (tr *transfers) assertReset(t *testing.T, since time.Time, limit time.Duration) {
	t.Helper()
	for _, end := range tr.assertEnd(t, since, limit) {
		assert.True(t, isReset(end.err), "%s ended with %v", end.what, end.err)
	}
}

// assertEnd waits for every transfer's end, within limit of since.
func (tr *transfers) assertEnd(t *testing.T, since time.Time, limit time.Duration) (ends []transferEnd) {
	t.Helper()
	var last time.Duration
	for range tr.n {
		select {
		case end := <-tr.ends:
			ends = append(ends, end)
			last = max(last, end.at.Sub(since))
		case <-time.After(limit + 10*time.Second):
			require.FailNow(t, "a client waits on")
		}
	}
	t.Logf("the last client was told after %v", last)
	assert.Less(t, last, margin*limit)
	return ends
}

// assertGone asserts what a guest's end means (C-26), within limit of since:
// rows pending, ports free, nothing flows.
func (e *env) assertGone(t *testing.T, since time.Time, limit time.Duration) {
	t.Helper()
	e.d.waitState(t, "pending", margin*limit+10*time.Second)
	pending := time.Since(since)
	for _, r := range e.d.ls(t) {
		assert.NotEmpty(t, r.Detail, "what %s waits for", r.Host)
		assert.Empty(t, r.Bound, r.Host)
	}
	require.NoError(t, portsFree(e.base, hostLen), "a pending row holds its port")
	t.Logf("rows were pending and ports free after %v", pending)
	assert.Less(t, pending, margin*limit)
	// A tap is made anew at once, and stalled until somebody sets it up.
	assert.Contains(t, []string{"gone", "waiting", "stalled"}, e.d.vm(t).State)
	assert.Empty(t, e.d.flows(t))
}

// assertBack waits for a guest that was started and asserts that everything is
// where it was.
func (e *env) assertBack(t *testing.T, hosts []string) {
	t.Helper()
	e.d.waitReady(t)
	assert.Equal(t, hosts, e.hosts(t), "the same host ports")
	testHTTP(t, e)
	testUDPEcho(t, e)
}

func (e *env) hosts(t *testing.T) (hosts []string) {
	t.Helper()
	for _, r := range e.d.ls(t) {
		hosts = append(hosts, r.Host+"/"+r.Protocol)
	}
	return hosts
}

// testEnd ends the guest in the middle of transfers, sees everything withdrawn
// within limit, and everything back with the next guest.
func testEnd(end func(*testing.T), limit time.Duration) func(*testing.T, *env) {
	return func(t *testing.T, e *env) {
		hosts := e.hosts(t)
		tr := e.startTransfers(t)
		since := time.Now()
		end(t)
		e.assertGone(t, since, limit)
		tr.assertReset(t, since, limit)
		e.boot(t)
		e.assertBack(t, hosts)
	}
}

// A VM that is in the state already is not waited for.
func testWait(t *testing.T, e *env) {
	start := time.Now()
	out, code := e.d.cli("wait", "--timeout", "20s")
	require.Zero(t, code, out)
	require.Less(t, time.Since(start), 10*time.Second)

	out, code = e.d.cli("wait", "--timeout", "100ms", "--for", "gone")
	assert.Equal(t, 1, code)
	assert.Contains(t, out, "is not gone", "what it waits for")
}

// testNamespaceDeleted is testEnd for a guest whose kernel outlives its
// processes by a moment, and ends their connections as it sees fit.
func testNamespaceDeleted(t *testing.T, e *env) {
	hosts := e.hosts(t)
	tr := e.startTransfers(t)
	since := time.Now()
	e.bed.kill(t)
	tr.assertEnd(t, since, time.Second)
	e.assertGone(t, since, time.Second)
	e.boot(t)
	e.assertBack(t, hosts)
}

// testPause stops the VMM for longer than a probe's patience: listeners and
// flows live on (C-28).
func testPause(vmm interface {
	signal(*testing.T, syscall.Signal)
}, pause time.Duration) func(*testing.T, *env) {
	return func(t *testing.T, e *env) {
		c := e.dial(t, portEcho)
		mustEcho(t, c, "before")
		vmm.signal(t, syscall.SIGSTOP)
		time.Sleep(pause)
		state := e.d.vm(t).State
		forwarded := true
		for _, r := range e.d.ls(t) {
			forwarded = forwarded && r.State == "forwarded"
		}
		vmm.signal(t, syscall.SIGCONT)
		assert.Contains(t, []string{"stalled", "ready"}, state)
		assert.True(t, forwarded, "listeners were closed")
		mustEcho(t, c, "after")
		e.d.waitReady(t)
	}
}

// testRestart kills the daemon under a running guest; what it is started with
// brings everything back (FB-118).
func testRestart(t *testing.T, e *env) {
	hosts := e.hosts(t)
	tr := e.startTransfers(t)
	killed := time.Now()
	e.d.kill()
	// How a client is told is the kernel's doing now.
	tr.assertEnd(t, killed, time.Second)

	started := time.Now()
	e.d.start(t)
	e.d.waitState(t, "forwarded", margin*3*time.Second+10*time.Second)
	took := time.Since(started)
	t.Logf("everything was back after %v", took)
	assert.Less(t, took, margin*3*time.Second)
	e.assertBack(t, hosts)
}

// testCycles attaches and detaches over and over under traffic; nothing piles
// up (FB-121, FB-130).
func testCycles(b bed, cycles int) func(*testing.T, *env) {
	return func(t *testing.T, e *env) {
		e.assertSettled(t, func() {
			for range cycles {
				tr := e.startTransfers(t)
				since := time.Now()
				b.kill(t)
				tr.assertEnd(t, since, time.Second)
				b.boot(t)
				e.d.waitReady(t)
				require.NoError(t, e.askLine(0))
			}
		})
	}
}

// testGoroutines compares what a daemon that has done everything runs with
// what one that has done nothing yet does.
func testGoroutines(t *testing.T, e *env) {
	require.Eventually(t, func() bool { return len(e.d.flows(t)) == 0 }, udpIdle+margin*3*time.Second, 100*time.Millisecond)
	again := func() {
		e.d.start(t)
		e.boot(t)
		e.d.waitReady(t)
	}
	used := e.d.goroutines(t)
	again()
	fresh := e.d.goroutines(t)
	again()
	t.Logf("%d goroutines, %d in a fresh daemon", used, fresh)
	assert.LessOrEqual(t, used, fresh+5)
}

// testStop leaves with SIGTERM while a flow is open.
func testStop(t *testing.T, e *env) {
	c := e.dial(t, portEcho)
	_, err := io.WriteString(c, "still here")
	require.NoError(t, err)
	e.d.stop(t)
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = io.Copy(io.Discard, c)
	assert.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the flow outlived the daemon")
	assert.NoError(t, portsFree(e.base, hostLen))
}
