package daemon

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/guest/guesttest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A fakeCluster is an API server, while it is up, without Services but those that
// items lists as JSON.
type fakeCluster struct {
	*httptest.Server
	down  atomic.Bool
	items string // set before anybody asks
}

// newCluster starts a cluster and returns its kubeconfig too.
func newCluster(t *testing.T) (c *fakeCluster, kubeconfig string) {
	t.Helper()
	c = &fakeCluster{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case c.down.Load():
			http.Error(w, "down", http.StatusServiceUnavailable)
		case r.URL.Query().Get("watch") != "":
			w.Header().Set("Content-Type", "application/json")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		default:
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[%s]}`, c.items)
		}
	}))
	t.Cleanup(c.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, `
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: %q}}]
users: [{name: u, user: {token: t}}]
`, c.URL), 0o600))
	return c, kubeconfig
}

// fail breaks the cluster's connections and refuses to answer from now on.
func (c *fakeCluster) fail() {
	c.down.Store(true)
	c.CloseClientConnections()
}

// startFollowing starts a daemon with a VM that has an engine and a cluster.
func startFollowing(t *testing.T) (*bed, *guesttest.Engine, *fakeCluster) {
	t.Helper()
	engine := guesttest.NewUnixEngine(t)
	cluster, kubeconfig := newCluster(t)
	return start(t, fmt.Sprintf(`
names: {listen: "127.0.0.1:0"}
trace: {flightRecorder: 100}
vms: [{name: a, attach: memory, docker: %q, kubernetes: {kubeconfig: %s, via: host}, publish: ["0:80"]}]
`, engine.Endpoint(), kubeconfig)), engine, cluster
}

// freePort returns a port that nobody has. It lies below those that the kernel gives
// to clients, of which one could take it before the daemon does.
func freePort(t *testing.T) uint16 {
	t.Helper()
	for range 100 {
		port := uint16(10_000 + rand.IntN(20_000))
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
	require.FailNow(t, "no port is free")
	return 0
}

func TestEvents(t *testing.T) {
	b, engine, cluster := startFollowing(t)
	ctx, cancel := context.WithCancel(t.Context())
	events, begun, ended := make(chan api.Event, 1000), make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- b.client.Events(ctx, func() error { close(begun); return nil }, func(e api.Event) error { events <- e; return nil })
	}()
	<-begun
	var seen []api.Event
	expect := func(kind string, fits func(api.Event) bool) api.Event {
		t.Helper()
		for i, e := range seen {
			if e.Kind == kind && fits(e) {
				seen = append(seen[:i:i], seen[i+1:]...)
				return e
			}
		}
		timeout := time.After(patience)
		for {
			select {
			case e := <-events:
				if e.Kind == kind && fits(e) {
					return e
				}
				seen = append(seen, e)
			case <-timeout:
				require.FailNow(t, "no event "+kind, "%+v", seen)
			}
		}
	}
	any := func(api.Event) bool { return true }
	of := func(kind string) func(api.Event) bool {
		return func(e api.Event) bool { return e.Owner.Kind == kind }
	}

	g := b.attach(t, "a")
	expect("vm.stalled", any)
	expect("vm.ready", any)
	row := expect("row.forwarded", of("config"))
	assert.Equal(t, "a", row.VM)
	assert.NotEmpty(t, row.Row)
	for _, kind := range []string{"engine.reachable", "cluster.reachable"} {
		e := expect(kind, any)
		assert.Equal(t, "a", e.VM)
		assert.Empty(t, e.Reason)
		assert.WithinDuration(t, time.Now(), e.At.Time, patience)
	}

	engine.Start(guesttest.Published(1, freePort(t), 80))
	expect("row.forwarded", of("docker"))
	engine.Stop(guesttest.FakeID(1))
	expect("row.gone", of("docker"))

	cluster.fail()
	assert.NotEmpty(t, expect("cluster.unreachable", any).Reason)
	cluster.down.Store(false)
	expect("cluster.reachable", any)
	g.Close()
	expect("vm.gone", any)
	expect("row.pending", of("config"))
	for _, kind := range []string{"engine.unreachable", "cluster.unreachable"} {
		assert.Equal(t, "VM a is gone", expect(kind, any).Reason)
	}
	cancel()
	<-ended
}

func TestAnswerEvents(t *testing.T) {
	engine, cluster := answerer{"engine", "a"}, answerer{"cluster", "a"}
	up, down := answer{reachable: true}, answer{detail: "why"}
	kinds := func(before, now map[answerer]answer) (kinds []string) {
		for _, e := range answerEvents(before, now) {
			kinds = append(kinds, e.Kind+" "+e.VM+" "+e.Reason)
		}
		return kinds
	}
	assert.Empty(t, kinds(nil, nil))
	assert.Empty(t, kinds(nil, map[answerer]answer{engine: down}), "it was not reachable before either")
	assert.Empty(t, kinds(map[answerer]answer{engine: down}, map[answerer]answer{engine: {detail: "another"}}))
	assert.Empty(t, kinds(map[answerer]answer{engine: up}, nil), "nobody follows it any more")
	assert.Equal(t, []string{"engine.reachable a "}, kinds(nil, map[answerer]answer{engine: up, cluster: down}))
	assert.Equal(t, []string{"cluster.unreachable a why"}, kinds(map[answerer]answer{engine: up, cluster: up}, map[answerer]answer{engine: up, cluster: down}))
}
