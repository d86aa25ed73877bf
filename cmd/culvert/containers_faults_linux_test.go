package main_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/guest/guesttest"
)

// An engineRelay stands between the daemon and a real engine, which cannot be
// made to cut streams, to be slow or to lie.
//
//	daemon ── unix socket ── engineRelay ── engine
type engineRelay struct {
	path    string
	forward http.Handler
	server  *http.Server
	served  chan struct{}

	mu    sync.Mutex
	fault func(http.Handler) http.Handler // around the answers to listings
}

func newEngineRelay(t *testing.T, host string) *engineRelay {
	t.Helper()
	network, addr, _ := strings.Cut(host, "://")
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}
	quiet := log.New(io.Discard, "", 0)
	r := &engineRelay{path: filepath.Join(shortTempDir(t), "engine.sock")}
	r.forward = &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { p.SetURL(&url.URL{Scheme: "http", Host: "engine"}) },
		Transport:     tr,
		FlushInterval: -1, // events at once
		ErrorLog:      quiet,
	}
	r.up(t)
	t.Cleanup(func() {
		r.down()
		tr.CloseIdleConnections()
	})
	return r
}

func (r *engineRelay) endpoint() string { return "unix://" + r.path }

func (r *engineRelay) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	h := r.forward
	if strings.HasSuffix(req.URL.Path, "/containers/json") {
		r.mu.Lock()
		if r.fault != nil {
			h = r.fault(h)
		}
		r.mu.Unlock()
	}
	h.ServeHTTP(w, req)
}

// faulty puts f around listings from now on; nil heals them.
func (r *engineRelay) faulty(f func(http.Handler) http.Handler) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fault = f
}

// down makes the engine unreachable, and cuts what was connected to it.
func (r *engineRelay) down() {
	_ = r.server.Close()
	<-r.served
}

func (r *engineRelay) up(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", r.path)
	require.NoError(t, err)
	r.server = &http.Server{Handler: r, ErrorLog: log.New(io.Discard, "", 0)}
	r.served = make(chan struct{})
	go func() {
		defer close(r.served)
		_ = r.server.Serve(l)
	}()
}

// An engineView is what `culvert vms -o json` says of a VM's engine.
type engineView struct {
	Engine struct {
		Endpoint  string
		Reachable bool
		Detail    string
		Failures  int
	}
}

func (e *containersEnv) engineView(t *testing.T) engineView {
	t.Helper()
	vms := list[engineView](t, e.d, "vms")
	require.Len(t, vms, 1)
	return vms[0]
}

// unreachable waits until the daemon has failed to list containers more than once.
func (e *containersEnv) unreachable(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		v := e.engineView(t)
		return !v.Engine.Reachable && v.Engine.Failures >= 2
	}, time.Minute, 20*time.Millisecond, "the daemon still reaches the engine")
}

// warnings counts what the daemon has said of an engine that does not answer.
func (e *containersEnv) warnings() int {
	return strings.Count(e.d.logs.String(), "container engine does not answer")
}

// withFault starts a daemon with the relay in front of the engine and one
// container, whose flow and listener must outlive what fault does. Meanwhile
// another container starts, whose port has to appear within limit once heal has
// returned; and all of it costs one warning (C-31).
func (e *containersEnv) withFault(t *testing.T, limit time.Duration, warnings int, fault, heal func(t *testing.T, r *engineRelay)) {
	t.Helper()
	relay := newEngineRelay(t, e.host())
	e.restart(t, settings{endpoint: relay.endpoint()})
	port := e.ports(t, 3)
	publish := func(i int) string { return fmt.Sprintf("%d:%d", port+i, portEcho) }
	_, _ = e.container(t, "-p", publish(0), "guestd")
	gone, started := e.container(t, "-p", publish(1), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return e.agrees(t) })
	c := keep(t, port)
	before := e.warnings()

	fault(t, relay)
	_, _ = e.container(t, "-p", publish(2), "guestd")
	e.docker(t, "rm", "-f", gone)
	assert.Equal(t, before+warnings, e.warnings(), "warnings:\n%s", e.d.logs.tail(20))
	require.NoError(t, e.allForwarded(t, gone, 1), "torn down without evidence")
	c.assertKept(t)

	heal(t, relay)
	healed := time.Now()
	e.within(t, healed, limit, "recovered", func() error {
		if err := e.agrees(t); err != nil {
			return err
		}
		if v := e.engineView(t); !v.Engine.Reachable || v.Engine.Detail != "" {
			return fmt.Errorf("the engine's state is %+v", v)
		}
		return echoes("tcp", onLoopback(port+2))
	})
	assert.Equal(t, before+warnings, e.warnings(), "warnings:\n%s", e.d.logs.tail(20))
	require.NoError(t, portsFree(port+1, 1))
	c.assertKept(t)
}

// recovery is how long an engine that answers again may go unnoticed: it is asked
// every two seconds, and answers.
const recovery = 3 * time.Second

func testContainerUnreachable(t *testing.T, e *containersEnv) {
	e.withFault(t, recovery, 1,
		func(t *testing.T, r *engineRelay) {
			r.down()
			e.unreachable(t)
			assert.Contains(t, e.engineView(t).Engine.Detail, r.path)
		},
		func(t *testing.T, r *engineRelay) { r.up(t) })
}

// An answer that takes half a minute is an answer; until it is there the state
// says what is waited for.
func testContainerSlow(t *testing.T, e *containersEnv) {
	held := guesttest.Hold()
	e.withFault(t, recovery, 0,
		func(t *testing.T, r *engineRelay) {
			r.faulty(held.In)
			// An event has it list.
			_, _ = e.container(t, "-p", fmt.Sprintf("%d:%d", e.ports(t, 1), portEcho), "guestd")
			<-held.Arrived
			require.Eventually(t, func() bool { return strings.Contains(e.engineView(t).Engine.Detail, "has not answered for") },
				30*time.Second, 50*time.Millisecond)
		},
		func(_ *testing.T, _ *engineRelay) { held.Release() })
}

// Half an answer is none.
func testContainerTruncated(t *testing.T, e *containersEnv) {
	e.withFault(t, recovery, 1,
		func(t *testing.T, r *engineRelay) {
			r.faulty(guesttest.Truncated(200, false))
			_, _ = e.container(t, "-p", fmt.Sprintf("%d:%d", e.ports(t, 1), portEcho), "guestd")
			e.unreachable(t)
		},
		func(_ *testing.T, r *engineRelay) { r.faulty(nil) })
}

// badEngine starts the daemon with an endpoint that cannot be used, sees that the
// state and the log say why, in one line each, and that the rest works.
func (e *containersEnv) badEngine(t *testing.T, endpoint any, why string) {
	t.Helper()
	e.restart(t, settings{endpoint: endpoint})
	e.unreachable(t)
	detail := e.engineView(t).Engine.Detail
	t.Log(detail)
	assert.Contains(t, detail, why)
	assert.Equal(t, 1, e.warnings(), e.d.logs.tail(20))
	assert.Contains(t, e.d.logs.String(), why)
	out, code := e.d.cli("vms")
	require.Zero(t, code)
	assert.Contains(t, out, why)

	port := e.ports(t, 2)
	_, _ = e.container(t, "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	publish := fmt.Sprintf("%d:%d", port+1, port)
	out, code = e.d.cli("publish", publish)
	require.Zero(t, code, out)
	e.within(t, time.Now(), 10*time.Second, "the container's server", func() error { return echoes("tcp", onLoopback(port+1)) })
	out, code = e.d.cli("unpublish", publish)
	require.Zero(t, code, out)
	assert.Empty(t, e.rows(t, ""))
}

func testContainerRefused(t *testing.T, e *containersEnv) {
	t.Run("nobody there", func(t *testing.T) { e.badEngine(t, "tcp://10.0.2.2:2399", "refused") })
	t.Run("another server", func(t *testing.T) {
		port := e.ports(t, 1)
		_, _ = e.container(t, "-p", fmt.Sprintf("%d:%d", port, portHTTP), "guestd")
		e.badEngine(t, fmt.Sprintf("tcp://10.0.2.2:%d", port), "not as a Docker engine does")
	})
	t.Run("no such socket", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "nosuch.sock")
		e.badEngine(t, "unix://"+path, path)
	})
}

// TLS that only one side speaks, or with another's certificate.
func testContainerNoTLS(t *testing.T, e *containersEnv) {
	certs := guesttest.NewCerts(t, false, time.Now().Add(time.Hour), net.IPv4(10, 0, 2, 2))
	t.Run("the engine speaks none", func(t *testing.T) {
		e.badEngine(t, map[string]any{"endpoint": "tcp://10.0.2.2:2375", "tls": map[string]any{"ca": certs.CA}}, "TLS")
	})
	guesttest.ServeEngine(t, e.engineBed.(*tapEngine).spare, &tls.Config{Certificates: certs.Server.Certificates})
	t.Run("the engine speaks it", func(t *testing.T) { e.badEngine(t, spareEndpoint, "speaks TLS; set docker.tls") })
	t.Run("another authority", func(t *testing.T) {
		others := guesttest.NewCerts(t, false, time.Now().Add(time.Hour), net.IPv4(10, 0, 2, 2))
		e.badEngine(t, map[string]any{"endpoint": spareEndpoint, "tls": map[string]any{"ca": others.CA}}, "certificate")
	})
}

func testContainerOld(t *testing.T, e *containersEnv) {
	old := guesttest.NewUnixEngine(t)
	old.SetVersion("1.38")
	e.badEngine(t, old.Endpoint(), "1.38")
}

// An engine that claims to have 100 000 containers, or one with a name that no
// container has: neither costs memory, and what was there before stays.
func testContainerHuge(t *testing.T, e *containersEnv) {
	liar := guesttest.NewUnixEngine(t)
	port := e.ports(t, 2)
	odd := guesttest.Published(1, uint16(port+1), 80)
	odd.Name = "odd\x1b[31m\nname"
	liar.Set(guesttest.Published(0, uint16(port), 80), odd)
	e.restart(t, settings{endpoint: liar.Endpoint()})
	e.within(t, time.Now(), 2*time.Second, "both ports", func() error {
		if err := e.allForwarded(t, guesttest.FakeID(0), 1); err != nil {
			return err
		}
		if rows := e.rows(t, guesttest.FakeID(1)); len(rows) == 0 || rows[0].State != "forwarded" {
			return fmt.Errorf("the odd one has %v", rows)
		}
		return nil
	})
	require.NoError(t, e.leadsTo("c0.culvert.internal", "127.0.0.1")())
	names := list[nameRow](t, e.d, "names")
	require.Len(t, names, 1, "%v", names)
	for _, command := range []string{"ls", "vms", "names"} {
		out, code := e.d.cli(command)
		require.Zero(t, code)
		assert.NotContains(t, out, "\x1b", command)
	}
	inode := listenInode(t, onLoopback(port))
	before := e.d.rss(t)

	const many = 100_000
	var claim strings.Builder
	for i := range many {
		_, _ = fmt.Fprintf(&claim, `%c{"Id":%q,"Names":["/c%d"],"State":"running","Ports":[{"PrivatePort":80,"PublicPort":%d,"Type":"tcp"}]}`,
			"[,"[min(i, 1)], guesttest.FakeID(i), i, 1024+i%60000)
	}
	claim.WriteByte(']')
	liar.FaultIn("list", guesttest.Text(claim.String()))
	liar.Emit("container", "start", guesttest.FakeID(2))
	e.unreachable(t)
	t.Log(e.engineView(t).Engine.Detail)
	assert.Equal(t, 1, e.warnings(), e.d.logs.tail(20))
	assert.Equal(t, inode, listenInode(t, onLoopback(port)))
	require.NoError(t, e.allForwarded(t, guesttest.FakeID(0), 1))
	if grown := e.d.rss(t) - before; !raceEnabled { // whose shadow memory is several times the data
		assert.Less(t, grown, int64(64<<20))
	}
	liar.Set(guesttest.Published(0, uint16(port), 80))
	liar.Fault(nil)
	e.within(t, time.Now(), recovery, "recovered", func() error {
		if v := e.engineView(t); !v.Engine.Reachable {
			return fmt.Errorf("%s", v.Engine.Detail)
		}
		return e.noRows(t, guesttest.FakeID(1))
	})
	assert.Equal(t, inode, listenInode(t, onLoopback(port)))
}

// A DNS port that is taken fails the start, with its holder named (C-38).
func testContainerTakenDNSPort(t *testing.T, e *containersEnv) {
	e.d.stop(t)
	taken, err := net.ListenPacket("udp", e.dns.String())
	require.NoError(t, err)
	out, code := e.d.cli(e.d.args...)
	assert.NotZero(t, code)
	assert.Contains(t, out, e.dns.String())
	comm, err := os.ReadFile("/proc/self/comm")
	require.NoError(t, err)
	assert.Contains(t, out, fmt.Sprintf("%s (pid %d)", strings.TrimSpace(string(comm)), os.Getpid()), "who has it")
	require.NoError(t, taken.Close())
	e.d.start(t)
	e.reboot(t)
}
