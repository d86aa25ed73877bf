package main_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// again follows the engine's events anew, after what has ended the stream.
func (e *containersEnv) again(t *testing.T) {
	t.Helper()
	e.heard.stop()
	e.heard = e.watch(t, e.top)
}

// engineIDs are the containers that run, as the engine says.
func (e *containersEnv) engineIDs(t *testing.T) []string {
	t.Helper()
	ids := strings.Fields(e.docker(t, "ps", "-q", "--no-trunc"))
	slices.Sort(ids)
	return ids
}

// agrees complains unless the host has rows of just the containers that run, which
// must all have ports, and all of them forwarded.
func (e *containersEnv) agrees(t *testing.T) error {
	var ids []string
	for _, r := range e.rows(t, "") {
		if r.State != "forwarded" {
			return fmt.Errorf("%s is %s: %s", r.Host, r.State, r.Detail)
		}
		ids = append(ids, r.Owner.ID)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	if want := e.engineIDs(t); !slices.Equal(ids, want) {
		return fmt.Errorf("the host has ports of %d containers, the engine has %d", len(ids), len(want))
	}
	return nil
}

// What ran before the daemon, and what was started and stopped while there was
// none.
func testContainerDaemonRestart(t *testing.T, e *containersEnv) {
	port := e.ports(t, 3)
	publish := func(i int) string { return fmt.Sprintf("%d:%d", port+i, portEcho) }
	_, _ = e.container(t, "-p", publish(0), "guestd")
	gone, started := e.container(t, "-p", publish(1), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port+1)) })
	e.d.kill()
	e.docker(t, "rm", "-f", gone)
	_, _ = e.container(t, "-p", publish(2), "guestd")
	e.d.start(t)
	e.reboot(t)
	ready := time.Now()
	e.within(t, ready, 2*time.Second, "all is back", func() error { return e.agrees(t) })
	require.NoError(t, echoes("tcp", onLoopback(port)))
	require.NoError(t, echoes("tcp", onLoopback(port+2)))
	require.NoError(t, portsFree(port+1, 1))
}

// An engine that ends takes its containers along (live-restore is off), and those
// with a restart policy are back with it, one way or the other.
func testContainerEngineRestart(t *testing.T, e *containersEnv) {
	port := e.ports(t, 2)
	back, _ := e.container(t, "--restart=always", "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	gone, started := e.container(t, "-p", fmt.Sprintf("%d:%d", port+1, portEcho), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port+1)) })

	t.Run("killed", func(t *testing.T) {
		// Its containers run on, and so do their flows: nobody has said that
		// they are gone (C-31).
		c := keep(t, port)
		e.killEngine(t)
		e.unreachable(t)
		require.NoError(t, e.allForwarded(t, gone, 1))
		c.assertKept(t)
	})
	t.Run("back", func(t *testing.T) {
		e.startEngine(t)
		answered := time.Now()
		e.within(t, answered, 2*time.Second, "the one with a restart policy", func() error {
			if err := e.allForwarded(t, back, 1); err != nil {
				return err
			}
			return echoes("tcp", onLoopback(port))
		})
		e.within(t, answered, 2*time.Second, "the other's port is free", func() error {
			if err := e.noRows(t, gone); err != nil {
				return err
			}
			return portsFree(port+1, 1)
		})
		e.again(t)
	})
	t.Run("stopped", func(t *testing.T) {
		e.stopEngine(t)
		e.unreachable(t)
		e.startEngine(t)
		answered := time.Now()
		e.again(t)
		e.within(t, answered, 2*time.Second, "the one with a restart policy", func() error {
			if err := e.allForwarded(t, back, 1); err != nil {
				return err
			}
			return echoes("tcp", onLoopback(port))
		})
		require.NoError(t, e.agrees(t))
	})
}

// The VM ends in the middle of everything: its flows, ports and names end within a
// second, and are back where they were within two of the engine's first answer
// (C-26, C-27, FB-119).
func testContainerVMKilled(t *testing.T, e *containersEnv) {
	const containers, flows = 4, 200
	port := e.ports(t, containers)
	var started time.Time
	for i := range containers {
		_, started = e.container(t, "--restart=always", "--name", fmt.Sprint("auto", i), "-p", fmt.Sprintf("%d:%d", port+i, portEcho), "guestd")
	}
	e.within(t, started, time.Second, "rows", func() error { return e.agrees(t) })
	var kept []*keptFlow
	for i := range flows {
		kept = append(kept, keep(t, port+i%containers))
	}
	require.GreaterOrEqual(t, len(e.d.flows(t)), flows)

	e.settle(t)
	since := time.Now()
	e.unplug(t)
	e.withinNative(t, since, time.Second, "all retired", func() error {
		if n := len(e.d.flows(t)); n > 0 {
			return fmt.Errorf("%d flows", n)
		}
		if err := e.noRows(t, ""); err != nil {
			return err
		}
		return portsFree(port, containers)
	})
	require.NoError(t, e.leadsTo("auto0.culvert.internal")())
	require.Empty(t, list[nameRow](t, e.d, "names"))
	for _, k := range kept {
		k.assertReset(t)
	}

	e.boot(t)
	e.answering(t)
	answered := time.Now()
	e.within(t, answered, 2*time.Second, "all is back", func() error {
		for i := range containers {
			if err := echoes("tcp", onLoopback(port+i)); err != nil {
				return err
			}
		}
		return e.leadsTo("auto0.culvert.internal", "127.0.0.1")()
	})
	e.again(t)
	require.NoError(t, e.agrees(t))
}

// answering waits until the engine answers the test.
func (e *containersEnv) answering(t *testing.T) {
	t.Helper()
	client := e.engineClient()
	require.Eventually(t, func() bool {
		resp, err := client.Get("http://engine/_ping")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}, 3*time.Minute, 10*time.Millisecond)
}

// The event stream is away in the middle of a burst of starts and stops: the host
// has what the engine has within one comparison, and what stayed was not touched
// (FB-079).
func testContainerBurst(t *testing.T, e *containersEnv) {
	burst := 50 / e.slow()
	relay := newEngineRelay(t, e.host())
	e.restart(t, settings{endpoint: relay.endpoint()})
	port := e.ports(t, 1+burst)
	_, started := e.container(t, "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port)) })
	c := keep(t, port)

	ids := make([]string, burst)
	t.Cleanup(func() {
		for _, id := range ids {
			_, _ = e.tryDocker("rm", "-f", id)
		}
	})
	half := func(first, last int) {
		// Each starts one, and stops one of two.
		require.Empty(t, each(last-first, 4, func(i int) (err error) {
			i += first
			ids[i], err = e.tryDocker("run", "-d", "-p", fmt.Sprintf("%d:%d", port+1+i, portEcho), "guestd")
			if err == nil && i%2 == 0 {
				_, err = e.tryDocker("kill", ids[i])
			}
			return err
		}))
	}
	half(0, burst/3)
	relay.down()
	half(burst/3, 2*burst/3)
	relay.up(t)
	half(2*burst/3, burst)
	last := time.Now()
	e.within(t, last, 15*time.Second, "the host agrees with the engine", func() error { return e.agrees(t) })
	require.Len(t, e.engineIDs(t), 1+burst/2)
	for i := 1; i < burst; i += 2 {
		require.NoError(t, echoes("tcp", onLoopback(port+1+i)))
	}
	c.assertKept(t)
}

// A daemon that leaves takes everything along (C-51).
func testContainerStop(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	_, started := e.container(t, "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port)) })
	c := keep(t, port)
	e.d.stop(t)
	c.assertEnds(t)
	assert.NoError(t, portsFree(e.base(), containerPorts))
}
