package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A daemon is one `culvert daemon` process under test, talked to as a user
// does: by the command line and the JSON of INTERFACE.md, none of whose types
// are taken from the code.
type daemon struct {
	binary string
	api    string // socket
	args   []string

	cmd  *exec.Cmd
	logs *console
}

// A row is what `culvert ls -o json` says of one publish.
type row struct {
	Owner    struct{ Kind, ID string }
	Protocol string
	Host     string
	Bound    []string
	VM       string
	Guest    string
	State    string
	Detail   string
	Flows    struct{ Active, Total, Refused int64 }
	Bytes    struct{ ToGuest, ToHost int64 }
}

// A flow is what `culvert flows -o json` says of one.
type flow struct {
	Protocol string
	Client   string
	State    string
	Bytes    struct{ ToGuest, ToHost int64 }
}

// A vm is what `culvert vms -o json` says of one.
type vm struct {
	Name   string
	Attach string
	State  string
	Detail string
	TCP    string
	// Endpoints of the VM's stack, those in TIME_WAIT among them.
	Endpoints int
}

// buildCulvert builds the binary that people get, with the race detector where
// the test has it.
func buildCulvert(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "culvert")
	args := []string{"build", "-o", out}
	if raceEnabled {
		args = append(args, "-race")
	}
	b, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	require.NoError(t, err, "%s", b)
	return out
}

// udpIdle is when UDP flows end under test. The default, 90 s, is the unit
// tests' to see, in no time.
const udpIdle = 3 * time.Second

// newDaemon returns a daemon that is not started yet, set up by a config file.
func newDaemon(t *testing.T, spec string, publishes []string, with ...func(vm map[string]any)) *daemon {
	t.Helper()
	dir := shortTempDir(t)
	config := filepath.Join(dir, "culvert.yaml")
	// JSON is YAML, and quotes what needs it.
	vm := map[string]any{"name": "default", "attach": spec, "publish": publishes}
	for _, set := range with {
		set(vm)
	}
	yaml, err := json.Marshal(map[string]any{
		"timeouts": map[string]any{"udpIdle": udpIdle.String()},
		"vms":      []any{vm},
	})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(config, yaml, 0o600))
	d := &daemon{binary: buildCulvert(t), api: filepath.Join(dir, "api.sock"), args: []string{"daemon", "--config", config}}
	t.Cleanup(func() {
		d.kill()
		if t.Failed() && d.logs != nil {
			t.Logf("the daemon's last words:\n%s", d.logs.tail(40))
		}
	})
	return d
}

// start starts the process and waits until its API answers.
func (d *daemon) start(t *testing.T) {
	t.Helper()
	d.logs = new(console)
	d.cmd = exec.Command(d.binary, d.args...)
	d.cmd.Env = append(os.Environ(), "CULVERT_API="+d.api, "GOTRACEBACK=all")
	d.cmd.Stderr = d.logs
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	starter() <- func() { started <- d.cmd.Start() }
	require.NoError(t, <-started)
	require.Eventually(t, func() bool {
		_, code := d.cli("ls")
		return code == 0
	}, 10*time.Second, 50*time.Millisecond, "the API does not answer:\n%s", d.logs.tail(10))
}

// starter is a thread that lasts: a process is sent its Pdeathsig when the thread
// that started it ends (prctl(2)), and those that have been in a namespace do.
var starter = sync.OnceValue(func() chan<- func() {
	starts := make(chan func())
	go func() {
		runtime.LockOSThread()
		for start := range starts {
			start()
		}
	}()
	return starts
})

// stop asks the daemon to leave, as systemd does, and asserts that it leaves
// well and leaves nothing behind (C-51).
func (d *daemon) stop(t *testing.T) {
	t.Helper()
	require.NoError(t, d.cmd.Process.Signal(syscall.SIGTERM))
	done := make(chan error, 1)
	go func() { done <- d.cmd.Wait() }()
	select {
	case err := <-done:
		require.NoError(t, err, "exit code after SIGTERM:\n%s", d.logs.tail(20))
	case <-time.After(margin * 7 * time.Second): // it drains for 5
		require.FailNow(t, "the daemon does not end after SIGTERM", d.logs.tail(20))
	}
	require.NoFileExists(t, d.api)
	require.NotContains(t, d.logs.String(), "DATA RACE")
	d.cmd = nil
}

// kill ends the daemon as the kernel's OOM killer does. Killing one that does
// not run does nothing.
func (d *daemon) kill() {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Kill()
	_ = d.cmd.Wait()
	d.cmd = nil
}

// goroutines ends the daemon with SIGQUIT, whose dump of every goroutine
// (package runtime) is the one count that needs no help from the program.
func (d *daemon) goroutines(t *testing.T) int {
	t.Helper()
	require.NoError(t, d.cmd.Process.Signal(syscall.SIGQUIT))
	_ = d.cmd.Wait()
	d.cmd = nil
	n := strings.Count(d.logs.String(), "\ngoroutine ")
	require.NotZero(t, n, "no dump:\n%s", d.logs.tail(20))
	return n
}

// cli runs the binary's client and returns what it printed on standard output,
// or else on standard error, and its exit code.
func (d *daemon) cli(args ...string) (out string, code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.binary, args...)
	// A race-enabled program sleeps for a second before it exits, by default.
	cmd.Env = append(os.Environ(), "CULVERT_API="+d.api, "GORACE=atexit_sleep_ms=0")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		code = exit.ExitCode()
	case err != nil:
		return err.Error(), -1
	}
	if stdout.Len() == 0 {
		return stderr.String(), code
	}
	return stdout.String(), code
}

func (d *daemon) ls(t *testing.T) []row {
	t.Helper()
	return list[row](t, d, "ls")
}

func (d *daemon) flows(t *testing.T) []flow {
	t.Helper()
	return list[flow](t, d, "flows")
}

func (d *daemon) vm(t *testing.T) vm {
	t.Helper()
	vms := list[vm](t, d, "vms")
	require.Len(t, vms, 1)
	return vms[0]
}

func list[T any](t *testing.T, d *daemon, command string) []T {
	t.Helper()
	out, code := d.cli(command, "-o", "json")
	require.Zero(t, code, "culvert %s: %s", command, out)
	var v []T
	require.NoError(t, json.Unmarshal([]byte(out), &v), "culvert %s: %s", command, out)
	return v
}

// waitReady waits until the VM is ready and every publish forwarded.
func (d *daemon) waitReady(t *testing.T) {
	t.Helper()
	out, code := d.cli("wait", "--timeout", "60s")
	require.Zero(t, code, "culvert wait: %s\n%s", out, d.logs.tail(20))
	d.waitState(t, "forwarded", 10*time.Second)
}

// waitState waits until every row is in the state and returns how long that took.
func (d *daemon) waitState(t *testing.T, state string, limit time.Duration) time.Duration {
	t.Helper()
	start := time.Now()
	for {
		rows := d.ls(t)
		other := ""
		for _, r := range rows {
			if r.State != state {
				other = fmt.Sprintf("%s is %s (%s), not %s", r.Host, r.State, r.Detail, state)
			}
		}
		took := time.Since(start)
		if other == "" {
			return took
		}
		require.Less(t, took, limit, "%s\n%s", other, d.logs.tail(20))
		time.Sleep(20 * time.Millisecond)
	}
}

// Usage is what a daemon holds, as the kernel and the daemon itself count it.
type usage struct {
	fds       int
	flows     int
	endpoints int   // of the VM's stack, those in TIME_WAIT among them
	rss       int64 // bytes
}

func (u usage) String() string {
	return fmt.Sprintf("%d descriptors, %d flows, %d endpoints, %d KiB resident", u.fds, u.flows, u.endpoints, u.rss>>10)
}

func (d *daemon) usage(t *testing.T) usage {
	t.Helper()
	pid := d.cmd.Process.Pid
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	return usage{fds: len(fds), flows: len(d.flows(t)), endpoints: d.vm(t).Endpoints, rss: d.rss(t)}
}

var vmRSS = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// rss returns the daemon's resident memory in bytes (proc_pid_status(5)).
func (d *daemon) rss(t *testing.T) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
	require.NoError(t, err)
	m := vmRSS.FindSubmatch(status)
	require.NotNil(t, m)
	kib, err := strconv.ParseInt(string(m[1]), 10, 64)
	require.NoError(t, err)
	return kib << 10
}

// A console collects what a process prints, and tells when it has printed
// something. It is safe for concurrent use.
type console struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.buf.Write(p)
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.buf.String()
}

func (c *console) tail(n int) string {
	lines := strings.Split(strings.TrimRight(c.String(), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// shortTempDir is a directory whose sockets' paths fit in the 107 bytes of
// sun_path (unix(7)), which t.TempDir's do not always.
func shortTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// freePorts returns the first of n host ports in a row that nobody has, below
// the range the kernel picks from (ip_local_port_range starts at 32768).
func freePorts(t *testing.T, n int) int {
	t.Helper()
	for base := 20000 + os.Getpid()%50*100; base+n < 32768; base += 100 {
		if portsFree(base, n) == nil {
			return base
		}
	}
	require.FailNow(t, "no free ports")
	return 0
}

// portsFree binds each of n ports, as a server does, on both loopback
// addresses and for both protocols.
func portsFree(base, n int) error {
	for p := base; p < base+n; p++ {
		for _, host := range []string{"127.0.0.1", "::1"} {
			addr := net.JoinHostPort(host, strconv.Itoa(p))
			l, err := net.Listen("tcp", addr)
			if err != nil {
				return err
			}
			_ = l.Close()
			c, err := net.ListenPacket("udp", addr)
			if err != nil {
				return err
			}
			_ = c.Close()
		}
	}
	return nil
}
