package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/culvertnet/culvert/cmd/internal/api"
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
	code = run(ctx, nil, args, &out, &errs)
	return out.String(), errs.String(), code
}

// A fakeBackend answers with documents that never change.
type fakeBackend struct{}

var fakeTime = api.Time{Time: time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)}

func (fakeBackend) Listeners(of string) ([]api.Listener, error) {
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
	switch of {
	case "":
		return []api.Listener{web, dns}, nil
	case "8080":
		return []api.Listener{web}, nil
	}
	return nil, &api.Problem{Status: http.StatusNotFound, Detail: "there is no " + of}
}

func (fakeBackend) Names() []api.Name {
	return []api.Name{{
		Name: "web", VM: "default", Addresses: []string{"127.0.0.1", "::1"},
		Owners: []api.Owner{{Kind: "docker", ID: strings.Repeat("3f2a", 16)}},
	}}
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
		Offloads: []string{"csum", "tso4"}, Queues: 1, TCP: "netstack", LastFrame: fakeTime, Probe: api.Probe{OK: true, At: fakeTime, RTT: 0.000123},
		Frames: api.Traffic{ToGuest: 5, ToHost: 6}, Bytes: api.Traffic{ToGuest: 500, ToHost: 600},
		Drops: map[string]uint64{"foreign-source": 3}, Flows: 1, VMM: "running", Since: fakeTime,
	}}
}

func (b fakeBackend) Publish(context.Context, api.PublishRequest) ([]api.Listener, error) {
	return b.Listeners("")
}

func (b fakeBackend) Unpublish(context.Context, api.PublishRequest) ([]api.Listener, error) {
	return nil, nil
}

func (fakeBackend) Doctor(_ context.Context, vm, of string) ([]api.Step, error) {
	switch {
	case of == "nobody":
		return nil, &api.Problem{Status: http.StatusConflict, Detail: "there are two " + of + " in " + vm}
	case of != "":
		return []api.Step{
			{VM: "default", Row: "127.0.0.1:8080/tcp", Step: "host socket", State: "ok", Detail: "the kernel has the daemon's at 127.0.0.1:8080"},
			{VM: "default", Step: "vm", State: "ok", Detail: "attached"},
			{VM: "default", Row: "127.0.0.1:8080/tcp", Step: "guest port", State: "unknown", Detail: "10.0.2.2:80 \x1b[31msays nothing"},
		}, nil
	}
	return []api.Step{
		{VM: "default", Step: "vm", State: "ok", Detail: "attached as tap:tap0, stalled for 3s, life 1"},
		{VM: "default", Step: "node", State: "broken", Detail: "10.0.2.2 does not answer", Advice: "in the guest: ip link set IFACE up"},
		{VM: "default", Row: "127.0.0.1:8080/tcp", Step: "guest port", State: "skipped", Detail: "the node is not reached"},
	}, nil
}

func (fakeBackend) Kubernetes() []api.Kubernetes { return nil }

func (fakeBackend) WantKubernetes(context.Context, api.KubernetesRequest) error { return nil }

func (fakeBackend) Events(ctx context.Context, started func(), _ func(api.Event) error) error {
	started()
	<-ctx.Done()
	return ctx.Err()
}

// tempDir is a directory whose sockets' paths are short enough, which those of
// t.TempDir are not always.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// serveFake serves the fake backend and returns its socket.
func serveFake(t *testing.T) string {
	t.Helper()
	return serveBackend(t, fakeBackend{})
}

func serveBackend(t *testing.T, b api.Backend) string {
	t.Helper()
	socket := filepath.Join(tempDir(t), "api.sock")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	s := api.NewServer(b, slog.New(slog.DiscardHandler))
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
		"ls":          {"ls"},
		"ls-json":     {"ls", "-o", "json"},
		"ls-none":     {"ls", "--owner", "docker"},
		"ls-id":       {"ls", "8080"},
		"flows":       {"flows"},
		"flows-json":  {"flows", "-o", "json"},
		"doctor-port": {"doctor", "8080"},
		"names":       {"names"},
		"names-json":  {"names", "-o", "json"},
		"vms":         {"vms"},
		"vms-json":    {"vms", "-o", "json"},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, code := cli(t, append([]string{"--api", socket}, args...)...)
			assert.Zero(t, code)
			assert.Empty(t, errs)
			golden(t, name, out)
		})
	}
	// An empty list is a document too.
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
		{"ls nobody --api " + socket, 1, "there is no nobody"},
		{"names --api " + missing, 3, "no daemon"},
		{"doctor --api " + missing, 3, "no daemon"},
		{"doctor nobody --vm here --api " + socket, 1, "there are two nobody in here"},
		{"doctor a b --api " + socket, 2, "--help"},
		{"frobnicate", 2, "frobnicate"},
		{"completion", 2, "zsh"},
		{"completion ksh", 2, "ksh"},
		{"ls --frobnicate", 2, "--frobnicate"},
		{"publish --api " + socket, 2, "at least 1"},
		{"publish 70000:80 --api " + socket, 2, "70000"},
		{"publish 6000-6009:7000-7001 --api " + socket, 2, "7000-7001"},
		{"publish 8080:80 --api " + socket, 1, "1 of 2 not published; what failed stays wanted"},
		{"unpublish 1:1 --api " + socket, 0, "1 of 1 were not published"},
		{"wait --for tea --api " + socket, 2, "tea"},
		{"wait --vm other --api " + socket, 1, `no VM named "other"`},
		{"wait --for gone --timeout 50ms --api " + socket, 1, "it is ready"},
		{"wait --timeout 0s --api " + socket, 2, "--timeout 0s"},
		{"wait default --api " + socket, 2, "behind --vm"},
		{"vms default --api " + socket, 2, `no arguments, and "default" is one`},
		{"trace tcp port 80 --api " + socket, 2, "a filter goes behind -f"},
		{"daemon culvert.yaml", 2, "behind --config"},
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
	for _, args := range [][]string{{"--help"}, {"version"}, {"--version"}, {"completion", "bash"}, {"wait", "--api", socket}} {
		_, errs, code := cli(t, args...)
		assert.Zero(t, code, "%v: %s", args, errs)
	}
}

// TestTable is what a terminal gets: one line a row, whatever is in it.
func TestTable(t *testing.T) {
	made := func() *table {
		return &table{head: []string{"HOST", "STATE", "DETAIL"}, state: 1, rows: [][]string{
			{"127.0.0.1:80/tcp", "forwarded", "a long\nstory \x1b[2J that goes on"}, {"[::1]:80/tcp", "failed", ""},
		}}
	}
	assert.Equal(t, "HOST               STATE       DETAIL\n"+
		"127.0.0.1:80/tcp   forwarded   a long story \uFFFD[2J that goes on\n"+
		"[::1]:80/tcp       failed\n", made().text(0, false))
	assert.Equal(t, "HOST               STATE       DETAIL\n"+
		"127.0.0.1:80/tcp   forwarded   a long s…\n"+
		"[::1]:80/tcp       failed\n", made().text(40, false))
	assert.Equal(t, "HOST               STATE       DETAIL\n"+
		"127.0.0.1:80/tcp   \x1b[32mforwarded\x1b[0m   a long s…\n"+
		"[::1]:80/tcp       \x1b[31mfailed\x1b[0m\n", made().text(40, true))
	for width := 1; width < 30; width++ {
		for line := range strings.Lines(made().text(width, false)) {
			assert.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), width)
		}
	}
}

// TestChanges follows a ledger into a pipe: what is new, what is other, what is
// gone, and no word of what only counts on.
func TestChanges(t *testing.T) {
	var out bytes.Buffer
	rows, err := fakeBackend{}.Listeners("")
	require.NoError(t, err)
	c := &changes[api.Listener]{kind: listeners, out: &out}
	require.NoError(t, c.show(rows))
	first := out.String()
	assert.Equal(t, 3, strings.Count(first, "\n"), first)

	out.Reset()
	rows[0].Flows.Total++
	rows[0].Bytes.ToGuest++
	require.NoError(t, c.show(rows))
	assert.Empty(t, out.String())

	rows[0].State, rows[0].Detail = "pending", "VM default is not there"
	require.NoError(t, c.show(rows))
	assert.Equal(t, 1, strings.Count(out.String(), "\n"), "no second header: %s", out.String())
	header, _, _ := strings.Cut(first, "\n")
	assert.Equal(t, strings.Index(header, "STATE"), strings.Index(out.String(), "pending"), "the column stays")

	out.Reset()
	require.NoError(t, c.show(rows[1:]))
	assert.Contains(t, out.String(), "gone")
	out.Reset()
	require.NoError(t, (&changes[api.Listener]{kind: listeners, out: &out, json: true}).show(rows))
	for line := range strings.Lines(out.String()) {
		assert.NoError(t, json.Unmarshal([]byte(line), new(api.Listener)), "one document a line")
	}
}

// DETAIL says all that is wrong, the state's own reason first.
func TestVMDetail(t *testing.T) {
	const lost = "lost (QMP socket /run/qmp: nobody listens there)"
	engine := api.Engine{Detail: "engine: no answer"}
	for _, c := range []struct {
		vm   api.VM
		want string
	}{
		{api.VM{State: "ready", VMM: "running"}, ""},
		{api.VM{State: "paused", Detail: "its VMM paused it", VMM: "paused (paused)"}, "its VMM paused it"},
		{api.VM{State: "ready", VMM: lost}, "QMP socket /run/qmp: nobody listens there"},
		{
			api.VM{State: "stalled", Detail: "no answer", Engine: engine, VMM: lost},
			"no answer; engine: no answer; QMP socket /run/qmp: nobody listens there",
		},
	} {
		table := vmTable([]api.VM{c.vm})
		assert.Equal(t, c.want, table.rows[0][len(table.head)-1])
	}
}
