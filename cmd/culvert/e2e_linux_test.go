package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/cmd/internal/daemon"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Whole daemons in this process, with guests in memory:
//
//	run(args) ── API ── daemon.Run ── memory.Pair ── a second stack with a web server
//
// What needs a process of its own is in the suite.

// A testDaemon is a daemon that runs until the test ends.
type testDaemon struct {
	socket string
	config string
	hangup chan os.Signal
	hurry  chan struct{}
	guests chan datapath.Attachment
	log    chan string // its lines
	end    context.CancelFunc
	ended  chan error
}

func startDaemon(t *testing.T, config string) *testDaemon {
	t.Helper()
	noLeaks(t)
	dir := tempDir(t)
	d := &testDaemon{
		socket: filepath.Join(dir, "api.sock"), config: filepath.Join(dir, "c.yaml"),
		hangup: make(chan os.Signal, 1), hurry: make(chan struct{}), guests: make(chan datapath.Attachment, 8),
		log: make(chan string, 10_000), ended: make(chan error, 1),
	}
	d.write(t, config)
	over := daemon.Overrides{APISocket: d.socket, ForceAPI: true}
	load := func() (*daemon.Config, error) { return loadConfig(d.config, over) }
	c, err := load()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	d.end = cancel
	started := make(chan struct{})
	go func() {
		d.ended <- daemon.Run(ctx, c, daemon.Options{
			Log: slog.New(slog.NewTextHandler(io.MultiWriter(t.Output(), lines(d.log)), nil)), Reload: load,
			Hangup: d.hangup, Hurry: d.hurry, Started: func() { close(started) },
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
	t.Cleanup(func() { d.stop(t) })
	select {
	case <-started:
	case err := <-d.ended:
		d.ended <- err
		require.FailNow(t, "the daemon does not start", "%v", err)
	}
	return d
}

// stop ends the daemon and waits for that; a second time it does nothing.
func (d *testDaemon) stop(t *testing.T) {
	t.Helper()
	d.end()
	select {
	case err := <-d.ended:
		assert.NoError(t, err)
		d.ended <- nil
	case <-time.After(30 * time.Second):
		buf := make([]byte, 1<<20)
		t.Fatalf("the daemon does not end:\n%s", buf[:runtime.Stack(buf, true)])
	}
}

// write replaces the config in one step: the daemon may be reading it.
func (d *testDaemon) write(t *testing.T, config string) {
	t.Helper()
	require.NoError(t, os.WriteFile(d.config+".new", []byte(config), 0o600))
	require.NoError(t, os.Rename(d.config+".new", d.config))
}

// reload gives the daemon another config and waits until it has said want.
func (d *testDaemon) reload(t *testing.T, config, want string) {
	t.Helper()
	d.write(t, config)
	d.hangup <- os.Interrupt
	d.logs(t, want)
}

// logs waits for a line of the log with want in it.
func (d *testDaemon) logs(t *testing.T, want string) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case line := <-d.log:
			if strings.Contains(line, want) {
				return
			}
		case <-timeout:
			require.FailNow(t, "not in the log: "+want)
		}
	}
}

// lines sends what is written to it, which the log's handler does line by line.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default: // nobody asks
	}
	return len(p), nil
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

// cli runs a command line that has to work.
func (d *testDaemon) cli(t *testing.T, args ...string) string {
	t.Helper()
	out, errs, code := cli(t, append([]string{"--api", d.socket}, args...)...)
	require.Zero(t, code, "culvert %s: %s", strings.Join(args, " "), errs)
	return out
}

// fails runs a command line that has to fail, and say want.
func (d *testDaemon) fails(t *testing.T, code int, want string, args ...string) {
	t.Helper()
	_, errs, got := cli(t, append([]string{"--api", d.socket}, args...)...)
	assert.Equal(t, code, got, "culvert %s: %s", strings.Join(args, " "), errs)
	assert.Contains(t, errs, want)
}

func (d *testDaemon) rows(t *testing.T, args ...string) (rows []api.Listener) {
	t.Helper()
	out := d.cli(t, append([]string{"ls", "-o", "json"}, args...)...)
	require.NoError(t, json.Unmarshal([]byte(out), &rows))
	return rows
}

// noLeaks asserts at the test's end that there are no more goroutines than now.
// Those of kept connections and timers take a moment to go.
func noLeaks(t *testing.T) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP) // begins the one goroutine that package signal keeps
	signal.Stop(signals)
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		deadline := time.Now().Add(3 * time.Second)
		for runtime.NumGoroutine() > before && time.Now().Before(deadline) {
			time.Sleep(10 * time.Millisecond)
		}
		if now := runtime.NumGoroutine(); now > before && !t.Failed() {
			buf := make([]byte, 1<<20)
			t.Errorf("%d goroutines more than before:\n%s", now-before, buf[:runtime.Stack(buf, true)])
		}
	})
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

// hold opens a flow through addr and leaves it open.
func hold(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: guest\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	page, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, demoPage, string(page))
	return c
}

// portsFree asserts that a server can have each of addrs.
func portsFree(t *testing.T, addrs []string) {
	t.Helper()
	require.NotEmpty(t, addrs)
	for _, addr := range addrs {
		l, err := net.Listen("tcp", addr)
		if assert.NoError(t, err, "the port is free") {
			_ = l.Close()
		}
	}
}

// TestDaemonLife is a VM that comes, goes and returns, and a publish that comes
// and goes (C-1, C-4, C-10, C-26, C-27).
func TestDaemonLife(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['0:80']}]")
	row := d.rows(t)[0]
	assert.Equal(t, "pending", row.State)
	assert.Equal(t, "10.0.2.2:80", row.Guest, "the target is known before the VM is there")
	assert.Equal(t, "VM vm1 is waiting: nothing has attached yet", row.Detail)

	guest := d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	var published []api.Listener
	require.NoError(t, json.Unmarshal([]byte(d.cli(t, "publish", "0:80", "-o", "json")), &published))
	assert.Equal(t, api.Owner{Kind: "cli", ID: "0:80/tcp"}, published[0].Owner)
	rows := d.rows(t)
	require.Len(t, rows, 2)
	for _, r := range rows {
		assert.Equal(t, "forwarded", r.State)
		assert.Len(t, r.Bound, 2, "both families")
		for _, addr := range r.Bound {
			assert.Equal(t, demoPage, fetch(t, addr))
		}
	}
	ours := d.rows(t, "--owner", "cli")
	require.Len(t, ours, 1)
	assert.Equal(t, published[0].Bound, ours[0].Bound)
	assert.Equal(t, published[0].Bound[0], ours[0].Host, "the row shows the port that the kernel picked")
	assert.Equal(t, uint64(2), ours[0].Flows.Total)

	// A row is found by what a person sees of it.
	for _, of := range []string{"0:80/tcp", "0:80", "0"} {
		assert.Len(t, d.rows(t, of), 2, of)
	}
	assert.Len(t, d.rows(t, published[0].Bound[0]+"/tcp"), 1)
	assert.Len(t, d.rows(t, published[0].Bound[1]), 1)
	for _, of := range []string{"0:8", "0:80/t", published[0].Bound[0] + "/udp"} {
		d.fails(t, exitFailed, "there is no row", "ls", of)
	}

	// Publishing again changes nothing (C-2).
	assert.Contains(t, d.cli(t, "publish", "0:80"), published[0].Bound[0])
	assert.Len(t, d.rows(t), 2)

	require.NoError(t, guest.Close())
	d.cli(t, "wait", "--for", "gone", "--timeout", "10s")
	for _, r := range d.rows(t) {
		assert.Equal(t, "pending", r.State)
		assert.Contains(t, r.Detail, "VM vm1 is gone: ")
	}
	portsFree(t, published[0].Bound)
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	for i, r := range d.rows(t) {
		assert.Equal(t, rows[i].Bound, r.Bound, "the same host ports")
	}

	assert.Contains(t, d.cli(t, "unpublish", "0:80"), "gone")
	portsFree(t, published[0].Bound)
	assert.Len(t, d.rows(t), 1)
	d.fails(t, exitFailed, "published by the config", "unpublish", "0:80")
	d.cli(t, "unpublish", "8080:80") // what is unknown is no error (C-4)

	d.stop(t)
	left, err := os.ReadDir(filepath.Dir(d.socket))
	require.NoError(t, err)
	assert.Len(t, left, 1, "only the config is left: %v", left)
	d.fails(t, exitNoDaemon, "no daemon at "+d.socket, "ls")
}

// TestSecondDaemon is refused, and the first goes on (C-51).
func TestSecondDaemon(t *testing.T) {
	d := startDaemon(t, "vms: [{attach: memory}]")
	d.fails(t, exitFailed, "another daemon owns "+d.socket, "daemon")
	assert.Len(t, d.rows(t), 0)
	info, err := os.Stat(d.socket)
	require.NoError(t, err)
	assert.Equal(t, os.ModeSocket|0o600, info.Mode())
}

// runBriefly runs `culvert daemon` until it is ready, and ends it.
func runBriefly(t *testing.T, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	log := make(lines, 1000)
	ended := make(chan int, 1)
	go func() { ended <- run(ctx, nil, append([]string{"daemon"}, args...), io.Discard, log) }()
	for line := ""; !strings.Contains(line, "msg=ready"); {
		select {
		case line = <-log:
		case code := <-ended:
			require.FailNow(t, "the daemon does not start", "exit code %d: %s", code, <-log)
		}
	}
	cancel()
	assert.Zero(t, <-ended)
}

// TestFB122StaleSocket is one that a killed daemon left: it is replaced.
func TestFB122StaleSocket(t *testing.T) {
	socket := filepath.Join(tempDir(t), "api.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	runBriefly(t, "--api", socket)
	require.NoFileExists(t, socket)

	// What is no socket is left alone.
	require.NoError(t, os.WriteFile(socket, []byte("mine"), 0o600))
	_, errs, code := cli(t, "daemon", "--api", socket)
	assert.Equal(t, exitFailed, code)
	assert.Contains(t, errs, "not a socket")
	require.FileExists(t, socket)
	require.NoFileExists(t, socket+".lock")
}

// TestFB170SocketPath goes up to the longest path a socket can have.
func TestFB170SocketPath(t *testing.T) {
	dir := tempDir(t)
	path := func(n int) string { return dir + "/" + strings.Repeat("s", n-len(dir)-1) }
	runBriefly(t, "--api", path(107))
	for _, n := range []int{108, 120} {
		_, errs, code := cli(t, "daemon", "--api", path(n))
		assert.Equal(t, exitUsage, code)
		assert.Contains(t, errs, "107")
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, left)
}

// TestStartFails leaves nothing half-started.
func TestStartFails(t *testing.T) {
	noLeaks(t)
	dir := tempDir(t)
	for want, args := range map[string][]string{
		"no/such":         {"--attach", "a=unixgram:" + dir + "/vm.sock", "--attach", "b=unixgram:/no/such/vm.sock"},
		"already":         {"--attach", "a=memory", "--attach", "a=memory"},
		"its own":         {"--attach", "a=unixgram:" + dir + "/vm.sock", "--attach", "b=unixgram:" + dir + "/vm.sock"},
		"there is no VM":  {"-p", "8080:80"},
		"guest port":      {"--attach", "a=unixgram:" + dir + "/vm.sock", "-p", "8080"},
		"is not of the f": {"--attach", "unixgram:" + dir + "/vm.sock"},
	} {
		_, errs, code := cli(t, append([]string{"daemon", "--api", dir + "/api.sock"}, args...)...)
		assert.NotZero(t, code, want)
		assert.Contains(t, errs, want)
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		assert.Empty(t, left, want)
	}
}

// TestTakenPort is a start whose publish cannot be had: the daemon serves, and
// the row says why not.
func TestTakenPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	d := startDaemon(t, "vms: [{attach: memory, publish: ['"+l.Addr().String()+":80']}]")
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	row := d.rows(t)[0]
	assert.Equal(t, "failed", row.State)
	assert.Contains(t, row.Detail, "in use")
	assert.False(t, row.RetryAt.IsZero())
	_, port, _ := net.SplitHostPort(l.Addr().String())
	d.fails(t, exitFailed, "1 of 2 not published", "publish", "0:80", port+":80")
}

// TestReload changes the config under the daemon: what stays is not touched.
func TestReload(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['0:80', '127.0.0.1:0:81']}]")
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	kept := d.rows(t)[0]
	flow := hold(t, kept.Bound[0])

	events := make(chan api.Event, 100)
	ctx, cancel := context.WithCancel(t.Context())
	c := api.NewClient(d.socket)
	defer c.Close()
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- c.Events(ctx, func() error { close(started); return nil }, func(e api.Event) error { events <- e; return nil })
	}()
	<-started

	d.reload(t, "vms: [{name: vm1, attach: memory, publish: ['0:80', '0:82']}, {name: vm2, attach: memory}]", "config reloaded")
	// Of rows and VMs it is told in no order.
	kinds := map[string]string{}
	timeout := time.After(20 * time.Second)
	for kinds["127.0.0.1:0:81/tcp"] == "" || kinds["0:82/tcp"] == "" {
		select {
		case e := <-events:
			kinds[e.Owner.ID] = e.Kind
		case <-timeout:
			require.FailNow(t, "not told of both rows", "%v", kinds)
		}
	}
	assert.Equal(t, "row.gone", kinds["127.0.0.1:0:81/tcp"])
	assert.Contains(t, kinds["0:82/tcp"], "row.")
	cancel()
	assert.ErrorIs(t, <-ended, context.Canceled)

	rows := d.rows(t)
	require.Len(t, rows, 2)
	assert.Equal(t, kept.Bound, rows[0].Bound)
	assert.Equal(t, kept.Since, rows[0].Since)
	assert.Equal(t, 1, rows[0].Flows.Active, "its flow lives on")
	assert.Equal(t, "0:82/tcp", rows[1].Owner.ID)

	// With two VMs a publish has to say which.
	d.fails(t, exitFailed, "--vm", "publish", "0:80")
	assert.Contains(t, d.cli(t, "publish", "--vm", "vm2", "0:80"), "pending") // which is no failure

	// A removed VM leaves the CLI's rows, and they can be taken back.
	d.reload(t, "vms: [{name: vm1, attach: memory, publish: ['0:80']}]", "config reloaded")
	require.Len(t, d.rows(t, "--vm", "vm2"), 1)
	assert.Contains(t, d.cli(t, "unpublish", "--vm", "vm2", "0:80"), "gone")
	assert.Equal(t, kept.Bound, d.rows(t)[0].Bound)

	// What is wrong changes nothing, and says where.
	d.reload(t, "vms: [{name: vm1, attach: memory, publish: ['0:81'], nonsense: 1}]", "c.yaml:1:54: unknown field")
	assert.Equal(t, kept.Bound, d.rows(t)[0].Bound)
	assert.Len(t, d.rows(t), 1)

	// Nor does a file that an editor has truncated and not yet written.
	d.reload(t, "\n", "the file is empty")
	assert.Equal(t, kept.Bound, d.rows(t)[0].Bound)

	// What cannot change says so, and the rest does.
	d.reload(t, "api: /elsewhere\nlimits: {flows: 5}\nvms: [{name: vm1, attach: memory, publish: ['0:80', '0:84']}]", "key=limits")
	d.logs(t, "config reloaded")
	assert.Len(t, d.rows(t), 2)

	// Another link is another VM: its flows end, and its rows wait for it.
	d.reload(t, "vms: [{name: vm1, attach: memory, mtu: 9000, publish: ['0:80']}]", "config reloaded")
	_, err := flow.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	assert.Equal(t, "pending", d.rows(t)[0].State)
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	assert.Equal(t, demoPage, fetch(t, d.rows(t)[0].Bound[0]))
}

// TestDrain ends a daemon with a flow: it accepts no more, and lets that one end
// by itself (C-51).
func TestDrain(t *testing.T) {
	d := startDaemon(t, "{timeouts: {drain: 1h}, vms: [{attach: memory, publish: ['0:80']}]}")
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	addrs := d.rows(t)[0].Bound
	flow := hold(t, addrs[0])
	d.end()
	d.logs(t, "msg=stopping")
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", addrs[1])
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	}, 10*time.Second, 10*time.Millisecond, "it accepts no more")
	_, err := io.WriteString(flow, "GET / HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	answer, err := io.ReadAll(flow)
	require.NoError(t, err, "an end, no reset")
	assert.Contains(t, string(answer), demoPage)
	require.NoError(t, flow.Close())
	d.stop(t)
}

// TestHurry ends a daemon whose flow does not end, with a second signal.
func TestHurry(t *testing.T) {
	d := startDaemon(t, "{timeouts: {drain: 1h}, vms: [{attach: memory, publish: ['0:80']}]}")
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	flow := hold(t, d.rows(t)[0].Bound[0])
	d.end()
	d.logs(t, "msg=stopping")
	close(d.hurry)
	_, err := flow.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	d.stop(t)
}

// TestFollow is `ls -w` into a pipe, ended as ^C does.
func TestFollow(t *testing.T) {
	d := startDaemon(t, "vms: [{attach: memory, publish: ['0:80']}]")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := make(lines, 100)
	var errs bytes.Buffer
	ended := make(chan int, 1)
	go func() { ended <- run(ctx, nil, []string{"--api", d.socket, "ls", "-w"}, out, &errs) }()
	assert.Contains(t, <-out, "pending")
	d.attach(t)
	row := <-out
	for strings.Contains(row, "pending") { // attached, and not heard yet
		row = <-out
	}
	assert.Contains(t, row, "forwarded")
	assert.NotContains(t, row, "HOST")
	d.cli(t, "publish", "0:81")
	assert.Contains(t, <-out, "cli")
	cancel()
	assert.Zero(t, <-ended)
	assert.Empty(t, errs.String())
}

// TestWatchEnds with its daemon, and says so.
func TestWatchEnds(t *testing.T) {
	d := startDaemon(t, "vms: [{attach: memory}]")
	out := make(lines, 100)
	var errs bytes.Buffer
	ended := make(chan int, 1)
	go func() { ended <- run(t.Context(), nil, []string{"--api", d.socket, "ls", "-w"}, out, &errs) }()
	<-out
	d.stop(t)
	assert.NotZero(t, <-ended)
	assert.Contains(t, errs.String(), "daemon")
}

// TestDemo leaves nothing behind.
func TestDemo(t *testing.T) {
	noLeaks(t)
	before, err := filepath.Glob(filepath.Join(os.TempDir(), "culvert-demo*"))
	require.NoError(t, err)
	out, errs, code := cli(t, "demo")
	assert.Zero(t, code, errs)
	assert.Contains(t, out, demoPage)
	assert.Contains(t, out, "forwarded")
	after, err := filepath.Glob(filepath.Join(os.TempDir(), "culvert-demo*"))
	require.NoError(t, err)
	assert.Equal(t, before, after)
}

// TestGatewaySkipped publishes our own address on the link, by the config and by
// hand: said at once, and no port is taken for it.
func TestGatewaySkipped(t *testing.T) {
	d := startDaemon(t, "vms: [{attach: memory, publish: ['0:10.0.2.1:80']}]")
	d.fails(t, exitFailed, "not published", "publish", "0:10.0.2.1:81")
	rows := d.rows(t)
	assert.Len(t, rows, 2)
	for _, r := range rows {
		assert.Equal(t, "skipped", r.State)
		assert.Contains(t, r.Detail, "10.0.2.1 is culvert's own address")
		assert.Empty(t, r.Bound)
	}
}
