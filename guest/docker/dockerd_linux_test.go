package docker_test

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/guest/guesttest"
)

// A real engine, reached at its TCP address inside the namespace and at its
// socket: what the fake claims is what it does.
func TestDockerd(t *testing.T) {
	ns := datapathtest.NewNetNS(t)
	d := guesttest.NewDockerd(t, guesttest.DockerdOptions{NS: ns, TCP: "127.0.0.1:2375"})
	c, err := docker.New(docker.Options{Endpoint: "tcp://127.0.0.1:2375", Dial: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		err = ns.Do(func() error {
			conn, err = new(net.Dialer).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	assert.Empty(t, mustList(t, c))
	w := watch(t, c)
	receive(t, w.subscribed, "the stream")

	run := func(name string, args ...string) string {
		all := append([]string{"run", "-d", "--stop-timeout", "1", "--name", name}, args...)
		return d.Docker(append(all, guesttest.Image, "sleep", "1000")...)
	}
	// until waits for an event, past others.
	until := func(want docker.Event) {
		t.Helper()
		for receive(t, w.events, want.Action) != want {
		}
	}
	find := func(id string) docker.Container {
		t.Helper()
		for _, one := range mustList(t, c) {
			if one.ID == id {
				return one
			}
		}
		require.FailNow(t, "not listed: "+id)
		return docker.Container{}
	}
	tcp := func(host string, hostPort, port uint16) docker.Binding {
		b := docker.Binding{Proto: "tcp", Port: port, HostPort: hostPort}
		if host != "" {
			b.HostIP = netip.MustParseAddr(host)
		}
		return b
	}
	// v4 leaves out what newer engines bind at :: beside 0.0.0.0.
	v4 := func(bindings []docker.Binding) (v4 []docker.Binding) {
		for _, b := range bindings {
			if !b.HostIP.Is6() {
				v4 = append(v4, b)
			}
		}
		return v4
	}

	t.Run("publishes", func(t *testing.T) {
		id := run("web", "-p", "8080:80", "-p", "127.0.0.1:9000:9000", "-p", "53:53", "-p", "53:53/udp", "--expose", "443",
			"-l", "com.docker.compose.project=shop", "-l", "com.docker.compose.service=front")
		until(docker.Event{ID: id, Action: "start"})
		web := find(id)
		assert.Equal(t, "web shop front", web.Name+" "+web.Project+" "+web.Service)
		started, err := time.Parse(time.RFC3339Nano, d.Docker("inspect", "-f", "{{.State.StartedAt}}", id))
		require.NoError(t, err)
		assert.Equal(t, started, web.Started)
		require.Len(t, web.Addrs, 1)
		assert.Equal(t, d.Docker("inspect", "-f", "{{.NetworkSettings.Networks.bridge.IPAddress}}", id), web.Addrs[0].String())
		udp := tcp("0.0.0.0", 53, 53)
		udp.Proto = "udp"
		assert.Equal(t, []docker.Binding{tcp("0.0.0.0", 53, 53), tcp("0.0.0.0", 8080, 80), tcp("127.0.0.1", 9000, 9000), udp}, v4(web.Bindings))
		assert.Equal(t, []docker.Unusable{{Proto: "tcp", Port: 443, Reason: "no host port"}}, web.Unusable)

		d.Docker("rename", "web", "shop")
		until(docker.Event{ID: id, Action: "rename"})
		assert.Equal(t, "shop", find(id).Name)
		d.Docker("pause", id)
		assert.Equal(t, "shop", find(id).Name, "a paused container keeps its ports")
		d.Docker("unpause", id)
		d.Docker("rm", "-f", id)
		until(docker.Event{ID: id, Action: "destroy"})
		assert.Empty(t, mustList(t, c))
	})

	t.Run("range", func(t *testing.T) {
		id := run("many", "-p", "7000-7099:7000-7099")
		bindings := v4(find(id).Bindings)
		require.Len(t, bindings, 100)
		for i, b := range bindings {
			assert.Equal(t, tcp("0.0.0.0", 7000+uint16(i), 7000+uint16(i)), b)
		}
		d.Docker("rm", "-f", id)
	})

	t.Run("dynamic port, restarted", func(t *testing.T) {
		id := run("dynamic", "-p", "80")
		port := func() uint16 {
			_, number, ok := strings.Cut(strings.Fields(d.Docker("port", id, "80"))[0], ":")
			require.True(t, ok)
			n, err := strconv.ParseUint(number, 10, 16)
			require.NoError(t, err)
			return uint16(n)
		}
		before := find(id)
		assert.Equal(t, []docker.Binding{tcp("0.0.0.0", port(), 80)}, v4(before.Bindings))
		d.Docker("restart", id)
		until(docker.Event{ID: id, Action: "restart"})
		after := find(id)
		assert.Equal(t, []docker.Binding{tcp("0.0.0.0", port(), 80)}, v4(after.Bindings))
		assert.True(t, after.Started.After(before.Started))
		d.Docker("rm", "-f", id)
	})

	t.Run("networks", func(t *testing.T) {
		d.Docker("network", "create", "--internal", "alpha")
		id := run("homes", "--network", "alpha", "-p", "8081:80")
		assert.Empty(t, find(id).Bindings, "the engine publishes nothing of an internal network")
		d.Docker("network", "connect", "bridge", id)
		until(docker.Event{ID: id, Action: "connect"})
		homes := find(id)
		assert.Equal(t, []docker.Binding{tcp("0.0.0.0", 8081, 80)}, v4(homes.Bindings))
		assert.Len(t, homes.Addrs, 2)
		assert.Equal(t, d.Docker("inspect", "-f", "{{.NetworkSettings.Networks.alpha.IPAddress}}", id), homes.Addrs[0].String())
		d.Docker("network", "disconnect", "bridge", id)
		until(docker.Event{ID: id, Action: "disconnect"})
		// Docker 20.10 goes on showing the port, in its own listing too; what it shows
		// is what counts. See TestHostConfigurationIsSecondChoice for one that does not.
		assert.Equal(t, d.Docker("port", id) != "", len(find(id).Bindings) != 0)
		assert.Len(t, find(id).Addrs, 1)
		d.Docker("rm", "-f", id)

		// Endpoints are new after each start, in the networks without an address too:
		// what appearance builds on. Nothing tells the client here but the listing.
		other := mustClient(t, d.Endpoint(), docker.TLSFiles{})
		for _, network := range []string{"host", "none"} {
			id := run(network, "--network", network, "-p", "8082:80")
			list := func() docker.Container {
				all := mustList(t, other)
				require.Len(t, all, 1)
				return all[0]
			}
			before := list()
			assert.Equal(t, before.ID, id)
			assert.Empty(t, before.Bindings)
			assert.Empty(t, before.Addrs)
			d.Docker("restart", id)
			assert.True(t, list().Started.After(before.Started), network)
			d.Docker("rm", "-f", id)
		}
	})

	t.Run("restarts of the engine", func(t *testing.T) {
		run("mortal")
		id := run("policy", "--restart", "always", "-p", "8083:80")
		before := find(id)
		restart := func(name string, end func()) {
			end()
			err := receive(t, w.ended, "the end of the stream")
			assert.Regexp(t, `^engine at tcp://127\.0\.0\.1:2375 (ended its stream of events|closed the connection)`, err.Error(), name)
			assert.EqualError(t, listError(t, c), "engine at tcp://127.0.0.1:2375 refused the connection", name)
			d.Start()
			w = watch(t, c)
			receive(t, w.subscribed, "the stream after "+name)
			require.Eventually(t, func() bool {
				all := mustList(t, c)
				return len(all) == 1 && all[0].Started.After(before.Started) && len(v4(all[0].Bindings)) == 1
			}, patience, 50*time.Millisecond, name)
			before = find(id)
			assert.Equal(t, []docker.Binding{tcp("0.0.0.0", 8083, 80)}, v4(before.Bindings), name)
		}
		restart("SIGTERM", d.Stop)
		restart("SIGKILL", d.Kill)
	})
}
