package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/cmd/internal/daemon"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares got with testdata/NAME.golden.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "go test ./cmd/culvert -run %s -update writes it", t.Name())
	assert.Equal(t, string(want), got)
}

// cli runs a command line and returns what it printed and its exit code.
func cli(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	code = run(ctx, args, &out, &errs)
	return out.String(), errs.String(), code
}

// A fakeBackend answers with documents that never change.
type fakeBackend struct{}

var fakeTime = api.Time{Time: time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)}

func (fakeBackend) Listeners() []api.Listener {
	web := api.Listener{
		Owner: api.Owner{Kind: "cli", ID: "8080:80/tcp"}, Protocol: "tcp", Host: "127.0.0.1:8080",
		Bound: []string{"127.0.0.1:8080", "[::1]:8080"}, VM: "default", Guest: "10.0.2.2:80", State: "forwarded", Source: "gateway",
		Flows: api.FlowCount{Total: 3, Refused: 1, Refusals: map[string]uint64{"timeout": 1}},
		Bytes: api.Traffic{ToGuest: 78, ToHost: 5 << 20}, Since: fakeTime,
	}
	dns := api.Listener{
		Owner: api.Owner{Kind: "config", ID: "53:53/udp"}, Protocol: "udp", Host: "127.0.0.1:53", Bound: []string{}, VM: "default",
		Guest: "10.0.2.2:53", State: "failed", Detail: "host port 127.0.0.1:53/udp is in use by \x1b[31mnamed (pid 12)", Source: "gateway",
		Flows: api.FlowCount{Refusals: map[string]uint64{}}, RetryAt: fakeTime, Since: fakeTime,
	}
	return []api.Listener{web, dns}
}

func (fakeBackend) Flows() []api.Flow {
	return []api.Flow{{
		ID: 7, Protocol: "tcp", Owner: api.Owner{Kind: "cli", ID: "8080:80/tcp"}, VM: "default", Client: "127.0.0.1:50000",
		Host: "127.0.0.1:8080", Source: "10.0.2.1:1025", Guest: "10.0.2.2:80", State: "open", Age: 3700, Idle: 2.5,
		Bytes: api.Traffic{ToGuest: 1, ToHost: 2048},
	}}
}

func (fakeBackend) VMs() []api.VM {
	return []api.VM{{
		Name: "default", Attach: "tap:tap0", State: "ready", Node: "10.0.2.2", Gateway: "10.0.2.1/24", Generation: 2,
		Offloads: []string{"csum", "tso4"}, Queues: 1, LastFrame: fakeTime, Probe: api.Probe{OK: true, At: fakeTime, RTT: 0.000123},
		Frames: api.Traffic{ToGuest: 5, ToHost: 6}, Bytes: api.Traffic{ToGuest: 500, ToHost: 600},
		Drops: map[string]uint64{"foreign-source": 3}, Flows: 1, Since: fakeTime,
	}}
}

func (b fakeBackend) Publish(context.Context, api.PublishRequest) ([]api.Listener, error) {
	return b.Listeners(), nil
}

func (b fakeBackend) Unpublish(context.Context, api.PublishRequest) ([]api.Listener, error) {
	return nil, &api.Problem{Status: http.StatusNotFound, Detail: "nothing is published as 1:1/tcp"}
}

func (fakeBackend) Events(ctx context.Context, emit func(api.Event) error) error {
	<-ctx.Done()
	return ctx.Err()
}

// serveFake serves the fake backend and returns its socket.
func serveFake(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "api.sock")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	s := api.NewServer(fakeBackend{})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		s.Shutdown(ctx)
		assert.NoError(t, <-done)
	})
	return socket
}

func TestGolden(t *testing.T) {
	socket := serveFake(t)
	for name, args := range map[string][]string{
		"ls":         {"ls"},
		"ls-json":    {"ls", "-o", "json"},
		"ls-none":    {"ls", "--owner", "docker"},
		"ls-id":      {"ls", "8080"},
		"flows":      {"flows"},
		"flows-json": {"flows", "-o", "json"},
		"vms":        {"vms"},
		"vms-json":   {"vms", "-o", "json"},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, code := cli(t, append([]string{"--api", socket}, args...)...)
			assert.Zero(t, code)
			assert.Empty(t, errs)
			golden(t, name, out)
		})
	}
	out, _, code := cli(t, "--api", socket, "ls", "--vm", "other", "-o", "json")
	assert.Zero(t, code)
	assert.Equal(t, "[]\n", out)
}

func TestExitCodes(t *testing.T) {
	socket := serveFake(t)
	missing := filepath.Join(t.TempDir(), "no.sock")
	for _, c := range []struct {
		args string
		code int
		want string // on standard error
	}{
		{"ls --api " + missing, 3, "no daemon at " + missing},
		{"publish 8080:80 --api " + missing, 3, "culvert daemon"},
		{"wait --api " + missing, 3, "no daemon"},
		{"ls -o xml --api " + socket, 2, "xml"},
		{"ls --owner nobody --api " + socket, 2, "nobody"},
		{"ls a b --api " + socket, 2, "--help"},
		{"frobnicate", 2, "frobnicate"},
		{"ls --frobnicate", 2, "--frobnicate"},
		{"publish --api " + socket, 2, "at least 1"},
		{"publish 70000:80 --api " + socket, 2, "70000"},
		{"publish 6000-6009:7000-7001 --api " + socket, 2, "7000-7001"},
		{"publish 8080:80 --api " + socket, 1, "1 of 2 not published"},
		{"unpublish 1:1 --api " + socket, 1, "nothing is published"},
		{"wait --for tea --api " + socket, 2, "tea"},
		{"wait --vm other --api " + socket, 1, `no VM named "other"`},
		{"wait --for gone --timeout 50ms --api " + socket, 1, "it is ready"},
		{"daemon --attach memory", 2, "VM=SPEC"},
		{"daemon --config /nonexistent.yaml", 2, "nonexistent"},
		{"daemon --api /" + strings.Repeat("x", 120), 2, "107"},
	} {
		t.Run(c.args, func(t *testing.T) {
			_, errs, code := cli(t, strings.Fields(c.args)...)
			assert.Equal(t, c.code, code, errs)
			assert.Contains(t, errs, c.want)
			assert.Equal(t, 1, strings.Count(errs, "culvert: "), "one sentence: %s", errs)
		})
	}
	for _, args := range [][]string{{"--help"}, {"version"}, {"completion", "bash"}, {"wait", "--api", socket}} {
		_, errs, code := cli(t, args...)
		assert.Zero(t, code, "%v: %s", args, errs)
	}
}

// A testDaemon is a daemon in this process with a guest in memory.
type testDaemon struct {
	socket string
	config string
	hangup chan os.Signal
	guests chan datapath.Attachment
	stop   func() error
}

func startDaemon(t *testing.T, config string) *testDaemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	d := &testDaemon{
		socket: filepath.Join(dir, "api.sock"), config: filepath.Join(dir, "c.yaml"),
		hangup: make(chan os.Signal, 1), guests: make(chan datapath.Attachment, 8),
	}
	d.write(t, config)
	over := daemon.Overrides{APISocket: d.socket, ForceAPI: true}
	load := func() (*daemon.Config, error) { return loadConfig(d.config, over) }
	c, err := load()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- daemon.Run(ctx, c, daemon.Options{
			Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Reload: load, Hangup: d.hangup,
			Started: func() { close(started) },
			Memory: func(ctx context.Context) (datapath.Attachment, error) {
				select {
				case att := <-d.guests:
					return att, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			},
		})
	}()
	select {
	case <-started:
	case err := <-ended:
		t.Fatal(err)
	}
	stopped := false
	d.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return <-ended
	}
	t.Cleanup(func() { assert.NoError(t, d.stop()) })
	return d
}

func (d *testDaemon) write(t *testing.T, config string) {
	t.Helper()
	// In one step: the daemon may be reading it.
	require.NoError(t, os.WriteFile(d.config+".new", []byte(config), 0o600))
	require.NoError(t, os.Rename(d.config+".new", d.config))
}

// attach gives the daemon a new guest with a web server.
func (d *testDaemon) attach(t *testing.T) io.Closer {
	t.Helper()
	ours, theirs := memory.Pair(memory.Options{})
	guest, err := demoGuest(theirs)
	require.NoError(t, err)
	t.Cleanup(func() { _ = guest.Close() })
	d.guests <- ours
	return guest
}

func (d *testDaemon) rows(t *testing.T) []api.Listener {
	t.Helper()
	out, errs, code := cli(t, "--api", d.socket, "ls", "-o", "json")
	require.Zero(t, code, errs)
	var rows []api.Listener
	require.NoError(t, json.Unmarshal([]byte(out), &rows))
	return rows
}

// fetch gets the guest's page through addr.
func fetch(t *testing.T, addr string) string {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := c.Get("http://" + addr + "/")
	require.NoError(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(page)
}

func TestDaemonLife(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['0:80']}]")
	assert.Equal(t, "pending", d.rows(t)[0].State)
	assert.Equal(t, "10.0.2.2:80", d.rows(t)[0].Guest, "the target is known before the VM is there")

	// Both families lead to the guest (C-10), for the config's row and the CLI's.
	guest := d.attach(t)
	_, errs, code := cli(t, "--api", d.socket, "wait", "--timeout", "10s")
	require.Zero(t, code, errs)
	out, errs, code := cli(t, "--api", d.socket, "publish", "0:80", "-o", "json")
	require.Zero(t, code, errs)
	var published []api.Listener
	require.NoError(t, json.Unmarshal([]byte(out), &published))
	rows := d.rows(t)
	require.Len(t, rows, 2)
	for _, r := range rows {
		assert.Equal(t, "forwarded", r.State)
		for _, addr := range r.Bound {
			assert.Equal(t, demoPage, fetch(t, addr))
		}
	}
	assert.Equal(t, "cli", published[0].Owner.Kind)

	// The guest goes: rows pending, ports free. It returns: the same ports.
	require.NoError(t, guest.Close())
	_, errs, code = cli(t, "--api", d.socket, "wait", "--for", "gone", "--timeout", "10s")
	require.Zero(t, code, errs)
	for _, r := range d.rows(t) {
		assert.Equal(t, "pending", r.State)
		assert.Contains(t, r.Detail, "vm1")
	}
	for _, addr := range published[0].Bound {
		l, err := net.Listen("tcp", addr)
		require.NoError(t, err, "the port is free")
		require.NoError(t, l.Close())
	}
	d.attach(t)
	_, errs, code = cli(t, "--api", d.socket, "wait", "--timeout", "10s")
	require.Zero(t, code, errs)
	for i, r := range d.rows(t) {
		assert.Equal(t, rows[i].Bound, r.Bound, "the same host ports")
	}

	// Unpublished, the port is free.
	_, errs, code = cli(t, "--api", d.socket, "unpublish", "0:80")
	require.Zero(t, code, errs)
	assert.Len(t, d.rows(t), 1)
	_, errs, code = cli(t, "--api", d.socket, "unpublish", "0:80")
	assert.Equal(t, 1, code)
	assert.Contains(t, errs, "published by the config")

	// A second daemon is refused; the first goes on.
	_, errs, code = cli(t, "daemon", "--api", d.socket)
	assert.Equal(t, 1, code)
	assert.Contains(t, errs, "another daemon owns "+d.socket)
	assert.Equal(t, demoPage, fetch(t, d.rows(t)[0].Bound[0]))

	require.NoError(t, d.stop())
	_, err := os.Stat(d.socket)
	assert.ErrorIs(t, err, os.ErrNotExist)
	_, _, code = cli(t, "--api", d.socket, "ls")
	assert.Equal(t, 3, code)
}

// TestReload changes the config under the daemon: what stays is not touched,
// what is wrong changes nothing.
func TestReload(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['0:80', '127.0.0.1:0:81']}]")
	d.attach(t)
	_, errs, code := cli(t, "--api", d.socket, "wait", "--timeout", "10s")
	require.Zero(t, code, errs)
	kept := d.rows(t)[0]

	events := make(chan api.Event, 100)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := api.NewClient(d.socket)
	defer c.Close()
	started := make(chan struct{})
	go func() {
		_ = c.Events(ctx, func() error { close(started); return nil }, func(e api.Event) error { events <- e; return nil })
	}()
	<-started

	d.write(t, "vms: [{name: vm1, attach: memory, publish: ['0:80', '0:82']}, {name: vm2, attach: memory}]")
	d.hangup <- os.Interrupt
	seen := map[string]bool{}
	for !seen["row.gone"] || !seen["row.forwarded"] {
		e := <-events
		seen[e.Kind] = true
	}
	_, errs, code = cli(t, "--api", d.socket, "wait", "--vm", "vm2", "--for", "gone", "--timeout", "10s")
	require.Zero(t, code, errs)
	rows := d.rows(t)
	require.Len(t, rows, 2)
	assert.Equal(t, kept.Bound, rows[0].Bound)
	assert.Equal(t, kept.Since, rows[0].Since)
	assert.Equal(t, "0:82/tcp", rows[1].Owner.ID)

	// With two VMs a publish has to say which.
	_, errs, code = cli(t, "--api", d.socket, "publish", "0:80")
	assert.Equal(t, 1, code)
	assert.Contains(t, errs, "--vm")
	_, errs, code = cli(t, "--api", d.socket, "publish", "--vm", "vm2", "0:80")
	assert.Zero(t, code, errs) // pending is no failure

	d.write(t, "vms: [{name: vm1, attach: memory, publish: ['0:80'], nonsense: 1}]")
	d.hangup <- os.Interrupt
	d.write(t, "vms: [{name: vm1, attach: memory, publish: ['0:80', '0:83']}]")
	d.hangup <- os.Interrupt
	for e := range events {
		if e.Kind == "row.forwarded" && e.Owner.ID == "0:83/tcp" {
			break
		}
	}
	rows = d.rows(t)
	assert.Equal(t, kept.Bound, rows[0].Bound)
}

// TestProblems speaks to the API itself with what no client of ours sends.
func TestProblems(t *testing.T) {
	socket := serveFake(t)
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	defer c.CloseIdleConnections()
	for _, r := range []struct {
		method, path, body string
		status             int
	}{
		{"GET", "/v1/nothing", "", 404},
		{"POST", "/v1/publishes", "{}", 404},
		{"PUT", "/v1/publishes", "", 400},
		{"PUT", "/v1/publishes", `{"publish":[]}`, 400},
		{"PUT", "/v1/publishes", `{"publish":["8080:80"],"nonsense":1}`, 400},
		{"PUT", "/v1/publishes", `{"publish":["` + strings.Repeat("x", 2<<20) + `"]}`, 400},
		{"GET", "/healthz", "", 200},
	} {
		req, err := http.NewRequest(r.method, "http://culvert"+r.path, strings.NewReader(r.body))
		require.NoError(t, err)
		resp, err := c.Do(req)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, r.status, resp.StatusCode, "%s %s: %s", r.method, r.path, body)
		if r.status == 400 || r.status == 404 {
			assert.Equal(t, "application/problem+json", resp.Header.Get("Content-Type"))
		}
	}
}

func TestDemo(t *testing.T) {
	out, errs, code := cli(t, "demo")
	assert.Zero(t, code, errs)
	assert.Contains(t, out, demoPage)
	assert.Contains(t, out, "forwarded")
}
