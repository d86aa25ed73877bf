package main_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A port published as most are: on both of the host's loopback addresses, at the
// engine's own number (C-6, C-12).
func testContainerPublish(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	id, started := e.container(t, "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port)) })
	require.NoError(t, e.allForwarded(t, id, 1))
	require.NoError(t, echoes("tcp", net.JoinHostPort("::1", strconv.Itoa(port))))
	r := e.rows(t, id)[0]
	assert.Equal(t, "docker", r.Owner.Kind)
	assert.Equal(t, "default", r.VM)
	assert.Equal(t, fmt.Sprintf("10.0.2.2:%d", port), r.Guest)
	assert.ElementsMatch(t, []string{onLoopback(port), net.JoinHostPort("::1", strconv.Itoa(port))}, r.Bound)
}

// A port published on the guest's own loopback, which is reached at the
// container's own address (C-35).
func testContainerPinned(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	id, started := e.container(t, "-p", fmt.Sprintf("127.0.0.1:%d:%d", port, portEcho), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port)) })
	require.NoError(t, e.allForwarded(t, id, 1))
	r := e.rows(t, id)[0]
	assert.Equal(t, []string{onLoopback(port)}, r.Bound)
	assert.True(t, strings.HasPrefix(r.Guest, "172.17."), r.Guest)
}

// What the image exposes, at numbers that the engine picks.
func testContainerAll(t *testing.T, e *containersEnv) {
	id, started := e.container(t, "-P", "--expose", "7/tcp", "--expose", "7/udp", "guestd")
	for _, network := range []string{"tcp", "udp"} {
		addr := e.published(t, id, "7/"+network)
		e.within(t, started, time.Second, network+" traffic", func() error { return echoes(network, addr) })
	}
	require.NoError(t, e.allForwarded(t, id, 2))
}

// published returns where on the host a port of a container is, by what the
// engine says.
func (e *containersEnv) published(t *testing.T, id, port string) string {
	t.Helper()
	out := e.docker(t, "port", id, port)
	ap, err := netip.ParseAddrPort(strings.Fields(out)[0])
	require.NoError(t, err, out)
	return onLoopback(int(ap.Port()))
}

// One number is two ports.
func testContainerBothProtocols(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	id, started := e.container(t, "-p", fmt.Sprintf("%d:7/tcp", port), "-p", fmt.Sprintf("%d:7/udp", port), "guestd")
	for _, network := range []string{"tcp", "udp"} {
		e.within(t, started, time.Second, network+" traffic", func() error { return echoes(network, onLoopback(port)) })
	}
	require.NoError(t, e.allForwarded(t, id, 2))
}

// A hundred ports, fewer under emulation, where each costs the engine a second; of
// which guestd serves some. Each leads to its own.
func testContainerRange(t *testing.T, e *containersEnv) {
	const first = 8995
	n := 100 / e.slow()
	port := e.ports(t, n)
	id, started := e.container(t, "-p", fmt.Sprintf("%d-%d:%d-%d", port, port+n-1, first, first+n-1), "guestd")
	e.within(t, started, time.Second, "rows", func() error { return e.allForwarded(t, id, n) })
	answers := func(guest int, question, want string) func() error {
		return func() error {
			c, err := net.DialTimeout("tcp", onLoopback(port+guest-first), 10*time.Second)
			if err != nil {
				return err
			}
			defer c.Close()
			if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
				return err
			}
			if _, err := io.WriteString(c, question); err != nil {
				return err
			}
			if err := c.(*net.TCPConn).CloseWrite(); err != nil {
				return err
			}
			answer, err := io.ReadAll(c)
			if err == nil && string(answer) != want {
				err = fmt.Errorf("port %d answers %q", guest, answer)
			}
			return err
		}
	}
	e.within(t, started, time.Second, "traffic", answers(portLine, "line\n", "line\n"))
	require.NoError(t, answers(portAnswer50ms, "hello", "OK 5\n")())
	require.NoError(t, answers(portSink, "", fmt.Sprintf("%s %d\n", knownHash(0), 0))())
	c, err := net.Dial("tcp", onLoopback(port)) // nobody's
	if err == nil {
		require.NoError(t, c.SetDeadline(time.Now().Add(20*time.Second)))
		_, err = c.Read(make([]byte, 1))
		_ = c.Close()
	}
	assert.True(t, isReset(err), "%v", err)

	// The engine takes seconds to undo its own part, and does not return before.
	killed := e.dockerMeanwhile("kill", id)
	e.within(t, e.heard.at(t, "die", id), time.Second, "ports free", bindable(port, n))
	require.NoError(t, e.noRows(t, id))
	require.NoError(t, <-killed)
}

// However a container ends, its ports are free within a second, its row is gone
// and its clients are told.
func testContainerEnds(t *testing.T, e *containersEnv) {
	const waits = `while [ ! -e /tmp/go ]; do sleep 0.05; done; `
	for _, end := range []struct {
		name string
		args []string
		end  []string // but for the container
	}{
		{"Stop", []string{"guestd"}, []string{"stop", "-t", "1"}},
		{"Kill", []string{"guestd"}, []string{"kill"}},
		{"Remove", []string{"guestd"}, []string{"rm", "-f"}},
		{"AutoRemove", []string{"--rm", "guestd"}, []string{"kill"}},
		{"Exit", []string{"guestd", "sh", "-c", "guestd & " + waits}, nil},
		{"OutOfMemory", []string{"-m", "64m", "guestd", "sh", "-c", "guestd & " + waits + "exec dd if=/dev/zero of=/dev/null bs=256M"}, nil},
	} {
		t.Run(end.name, func(t *testing.T) {
			port := e.ports(t, 1)
			id, started := e.container(t, append([]string{"-p", fmt.Sprintf("%d:%d", port, portEcho)}, end.args...)...)
			e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port)) })
			c := keep(t, port)
			var ended <-chan error
			if end.end != nil {
				ended = e.dockerMeanwhile(append(end.end, id)...)
			} else {
				ended = e.dockerMeanwhile("exec", id, "touch", "/tmp/go")
			}
			if end.name == "OutOfMemory" {
				e.heard.at(t, "oom", id)
			}
			e.within(t, e.heard.at(t, "die", id), time.Second, "port free", bindable(port, 1))
			require.NoError(t, <-ended)
			require.NoError(t, e.noRows(t, id))
			c.assertEnds(t) // its end may come before the engine's word
		})
	}

	t.Run("Prune", func(t *testing.T) {
		port := e.ports(t, 2)
		_, _ = e.container(t, "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
		stopped, started := e.container(t, "-p", fmt.Sprintf("%d:%d", port+1, portEcho), "guestd")
		e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port+1)) })
		c := keep(t, port)
		e.docker(t, "kill", stopped)
		e.docker(t, "container", "prune", "-f")
		e.within(t, e.heard.at(t, "destroy", stopped), time.Second, "port free", bindable(port+1, 1))
		c.assertKept(t)
	})
}

// FB-089: a restart may change the number that the engine has picked.
func testContainerDynamic(t *testing.T, e *containersEnv) {
	fixed := e.ports(t, 1)
	id, _ := e.container(t, "-p", fmt.Sprintf("%d:%d", fixed, portReport), "-p", fmt.Sprint(portEcho), "guestd")
	before := e.published(t, id, "7/tcp")
	// Another takes the number while it is free.
	var other string
	for i := range 3 {
		old := e.published(t, id, "7/tcp")
		e.docker(t, "stop", "-t", "0", id)
		if i == 0 {
			_, port, _ := net.SplitHostPort(old)
			other, _ = e.container(t, "-p", port+":7", "guestd")
		}
		e.docker(t, "start", id)
		now := e.published(t, id, "7/tcp")
		e.within(t, e.heard.at(t, "start", id), time.Second, "traffic", func() error {
			if err := e.allForwarded(t, id, 2); err != nil {
				return err
			}
			return echoes("tcp", now)
		})
		var hosts []string
		for _, r := range e.rows(t, id) {
			hosts = append(hosts, r.Host)
		}
		_, port, _ := net.SplitHostPort(now)
		assert.True(t, slices.ContainsFunc(hosts, func(h string) bool { return strings.HasSuffix(h, ":"+port) }), "%v", hosts)
	}
	assert.NotEqual(t, before, e.published(t, id, "7/tcp"))
	require.NoError(t, e.allForwarded(t, other, 1))
}

// FB-068: containers that are gone as soon as they have come.
func testContainerFB068(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	for range 20 {
		id := e.docker(t, "run", "-d", "--rm", "-p", fmt.Sprintf("%d:80", port), "guestd", "true")
		e.within(t, e.heard.at(t, "die", id), 500*time.Millisecond, "port free", bindable(port, 1))
		require.NoError(t, e.noRows(t, id))
	}
}

// FB-047: a client that never stops sending reaches the container that has taken
// the other's place.
func testContainerFB047(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	publish := fmt.Sprintf("%d:%d/udp", port, portEcho)
	id, started := e.container(t, "-p", publish, "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("udp", onLoopback(port)) })
	c, err := net.Dial("udp", onLoopback(port))
	require.NoError(t, err)
	defer c.Close()
	ask := func() error {
		_, _ = io.WriteString(c, "anyone?") // it may be told that nobody was there
		if err := c.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			return err
		}
		_, err := c.Read(make([]byte, 64))
		return err
	}
	require.NoError(t, ask())
	stop := background(t, func() { _ = ask() })
	e.docker(t, "rm", "-f", id)
	_, started = e.container(t, "-p", publish, "guestd")
	stop()
	e.within(t, started, time.Second, "the same client's traffic", ask)
}
