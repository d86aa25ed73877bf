package main_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The VMM's word, from the real one: QEMU pauses, resets and ends its guest, and
// all that is to be seen of it is what QMP says.
//
//	test ── QMP ────────────┐
//	  │                   QEMU ── guest's servers
//	  │      ┌──── QMP ─────┤
//	  └── daemon ══ one connection, which QEMU 7.2 makes once

// A monitor is the test's own QMP connection.
type monitor struct {
	conn  net.Conn
	lines *bufio.Scanner
}

func mustMonitor(t *testing.T, path string) *monitor {
	t.Helper()
	m := new(monitor)
	require.Eventually(t, func() bool {
		var err error
		m.conn, err = net.Dial("unix", path)
		return err == nil
	}, 20*time.Second, 10*time.Millisecond, "QEMU does not listen on %s", path)
	t.Cleanup(func() { _ = m.conn.Close() })
	m.lines = bufio.NewScanner(m.conn)
	m.run(t, "qmp_capabilities")
	return m
}

// run has QEMU execute a command and returns when it has.
func (m *monitor) run(t *testing.T, command string) {
	t.Helper()
	require.NoError(t, m.conn.SetDeadline(time.Now().Add(time.Minute)))
	_, err := fmt.Fprintf(m.conn, "{\"execute\": %q}\n", command)
	require.NoError(t, err)
	for m.lines.Scan() {
		var said struct {
			Return, Error json.RawMessage
		}
		require.NoError(t, json.Unmarshal(m.lines.Bytes(), &said), m.lines.Text())
		require.Empty(t, said.Error, command)
		if said.Return != nil {
			return // the greeting and events have neither
		}
	}
	require.NoError(t, m.lines.Err(), command)
	require.FailNow(t, "QEMU has left", command)
}

// A qmpEnv is an env whose daemon follows the VMM, which the test moves.
type qmpEnv struct {
	*env
	vmm          *qemuBed
	ours, theirs string // QMP sockets: the daemon's, and the test's
	qmp          *monitor
	hosts        []string
}

// A life is what `culvert vms -o json` says of a VM's lives.
type life struct {
	State      string
	Detail     string
	VMM        string
	Generation int
}

func (e *qmpEnv) life(t *testing.T) life {
	t.Helper()
	vms := list[life](t, e.d, "vms")
	require.Len(t, vms, 1)
	return vms[0]
}

// becomes waits until the VM is in a state and returns what is said of it then.
func (e *qmpEnv) becomes(t *testing.T, state string) (l life) {
	t.Helper()
	require.Eventually(t, func() bool { l = e.life(t); return l.State == state }, time.Minute, 20*time.Millisecond,
		"it is not %s:\n%s", state, e.d.logs.tail(20))
	return l
}

// boots waits until the guest has booted n times, and everything is back on the
// same host ports.
func (e *qmpEnv) boots(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Count(e.vmm.serial.String(), "guest ready") == n },
		3*time.Minute, 50*time.Millisecond, "the guest does not boot:\n%s", e.vmm.serial.tail(20))
	e.assertBack(t, e.hosts)
}

// newQMP is a VM behind the attachment, for which nic is boot.sh's, with a daemon
// that follows its monitor and has started; boot and the test's own monitor are
// to come. rest is for QEMU as well.
func newQMP(t *testing.T, attach string, nic []string, rest ...string) *qmpEnv {
	t.Helper()
	dir := shortTempDir(t)
	e := &qmpEnv{ours: filepath.Join(dir, "qmp"), theirs: filepath.Join(dir, "control")}
	e.vmm = newQEMU(t, attach, slices.Concat(nic, rest,
		[]string{"-qmp", "unix:" + e.ours + ",server=on,wait=off", "-qmp", "unix:" + e.theirs + ",server=on,wait=off"})...)
	e.env = &env{bed: e.vmm, base: freePorts(t, hostLen)}
	e.d = newDaemon(t, attach, publishes(e.base))
	e.d.follows(t, e.ours)
	e.d.start(t)
	return e
}

// up boots the VM, which is ready then.
func (e *qmpEnv) up(t *testing.T) {
	t.Helper()
	e.boot(t)
	e.qmp = mustMonitor(t, e.theirs)
	e.d.waitReady(t)
	e.hosts = e.env.hosts(t)
}

// TestSuiteQEMUMonitor leads one QEMU, on one connection, through all that its monitor can say.
func TestSuiteQEMUMonitor(t *testing.T) {
	needsTime(t)
	link := filepath.Join(shortTempDir(t), "vm.sock")
	e := newQMP(t, "qemu:unix:"+link, []string{"-netdev", "stream,id=n0,server=off,addr.type=unix,addr.path=" + link},
		"-action", "reboot=reset,shutdown=pause") // boot.sh's guests end in both
	lost := "QMP socket " + e.ours + ": nobody listens there"
	assert.Equal(t, life{"waiting", "nothing has attached yet", "lost (" + lost + ")", 0}, e.life(t))
	out, code := e.d.cli("vms")
	require.Zero(t, code)
	assert.Contains(t, out, "nothing has attached yet; "+lost)

	e.up(t)
	assert.Equal(t, life{State: "ready", VMM: "running", Generation: 1}, e.life(t))
	e.run(t,
		testCase{"Pause", e.testPause},
		testCase{"FB122", e.testStopped},
		testCase{"Reset", e.testReset},
		testCase{"Shutdown", e.testShutdown},
		testCase{"Quit", e.testQuit},
		testCase{"Stop", testStopIdle},
	)
}

// TestSuiteVhostUserMonitor is a pause that stops rings, too.
func TestSuiteVhostUserMonitor(t *testing.T) {
	needsTime(t)
	attach := "vhost-user:" + filepath.Join(shortTempDir(t), "vm.sock")
	e := newQMP(t, attach, []string{attach})
	e.up(t)
	e.run(t, testCase{"Pause", e.testPause}, testCase{"FB126", e.testFB126}, testCase{"Stop", testStopIdle})
}

// testStopIdle is testStop without a flow.
func testStopIdle(t *testing.T, e *env) { e.d.stop(t) }

// follows gives the daemon's VM a QMP socket, before the daemon is started.
func (d *daemon) follows(t *testing.T, qmp string) {
	t.Helper()
	path := filepath.Join(filepath.Dir(d.api), "culvert.yaml")
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	var config map[string]any
	require.NoError(t, json.Unmarshal(b, &config))
	config["vms"].([]any)[0].(map[string]any)["qmp"] = qmp
	b, err = json.Marshal(config)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, b, 0o600))
}

// testPause: listeners and flows stay, half-closed ones too, and go on (C-28).
// What a client sends meanwhile arrives; who connects meanwhile is told, once the
// guest has not answered for 3 s (C-15).
func (e *qmpEnv) testPause(t *testing.T, _ *env) {
	open := e.dial(t, portEcho)
	mustEcho(t, open, "before")
	half := e.dial(t, portAnswer5s)
	_, err := io.WriteString(half, "hello")
	require.NoError(t, err)
	require.NoError(t, half.CloseWrite())
	require.Eventually(t, func() bool { return e.flowStates(t)["half-closed-client"] == 1 }, 10*time.Second, 20*time.Millisecond)

	e.qmp.run(t, "stop")
	paused := e.becomes(t, "paused")
	assert.Equal(t, life{"paused", "its VMM paused it", paused.VMM, 1}, paused)
	assert.Regexp(t, `^paused( \(paused\))?$`, paused.VMM, "the event, and the answer to what is asked then")
	_, err = io.WriteString(open, "meanwhile")
	require.NoError(t, err)
	late := e.dial(t, portEcho)
	_, err = io.Copy(io.Discard, late)
	assert.True(t, isReset(err), "who connects to a paused guest sees %v", err)
	for _, r := range e.d.ls(t) {
		assert.Equal(t, "forwarded", r.State, r.Host)
		assert.NotEmpty(t, r.Bound, r.Host)
	}
	states := e.flowStates(t)
	assert.Equal(t, 1, states["open"], "%v", states)
	assert.Equal(t, 1, states["half-closed-client"], "%v", states)
	assert.Equal(t, "paused", e.life(t).State)

	e.qmp.run(t, "cont")
	got := make([]byte, len("meanwhile"))
	_, err = io.ReadFull(open, got)
	require.NoError(t, err)
	assert.Equal(t, "meanwhile", string(got))
	mustEcho(t, open, "after")
	answer, err := io.ReadAll(half)
	require.NoError(t, err)
	assert.Equal(t, "OK 5\n", string(answer))
	assert.Equal(t, 1, e.becomes(t, "ready").Generation)
	e.assertBack(t, e.hosts)
}

// flowStates counts the TCP flows in each state.
func (e *qmpEnv) flowStates(t *testing.T) map[string]int {
	t.Helper()
	n := make(map[string]int)
	for _, f := range e.d.flows(t) {
		if f.Protocol == "tcp" {
			n[f.State]++
		}
	}
	return n
}

// testFB126: 500 clients a second find the guest paused. Each is told within the
// bound of C-15, and none of it hurts the guest, nor the flow that was there.
func (e *qmpEnv) testFB126(t *testing.T, _ *env) {
	const rate, seconds = 500, 4
	c := e.dial(t, portEcho)
	mustEcho(t, c, "before")
	e.qmp.run(t, "stop")
	e.becomes(t, "paused")
	ends := make(chan error, rate*seconds)
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	for range cap(ends) {
		<-tick.C
		go func() {
			late, err := e.tryDial(portEcho)
			if err == nil {
				err = late.SetDeadline(time.Now().Add(20 * time.Second)) // of 3, on a busy host
			}
			if err == nil {
				_, err = io.Copy(io.Discard, late)
				_ = late.Close()
			}
			ends <- err
		}()
	}
	for range cap(ends) {
		err := <-ends
		require.True(t, isReset(err), "%v", err)
	}
	e.qmp.run(t, "cont")
	mustEcho(t, c, "after")
	assert.Equal(t, 1, e.becomes(t, "ready").Generation)
	require.Empty(t, each(100, 8, e.askLine))
	e.assertBack(t, e.hosts)
	assert.NotContains(t, e.vmm.serial.String(), "not a head", "what a guest says of a ring that was written to while it was paused")
}

// testStopped: daemon and VMM stand still for a while, as when the host sleeps,
// together or one of them. Nothing is lost by it.
func (e *qmpEnv) testStopped(t *testing.T, _ *env) {
	c := e.dial(t, portEcho)
	for _, who := range [][]*os.Process{{e.d.cmd.Process}, {e.d.cmd.Process, e.vmm.cmd.Process}} {
		mustEcho(t, c, "before")
		for _, p := range who {
			require.NoError(t, p.Signal(syscall.SIGSTOP))
		}
		time.Sleep(3 * time.Second) // three probes' patience
		for _, p := range who {
			require.NoError(t, p.Signal(syscall.SIGCONT))
		}
		mustEcho(t, c, "after")
		assert.Equal(t, 1, e.becomes(t, "ready").Generation)
		e.assertBack(t, e.hosts)
	}
}

// testReset: a guest that is reset has left and returned (C-27).
func (e *qmpEnv) testReset(t *testing.T, _ *env) {
	before := e.life(t).Generation
	tr := e.startTransfers(t)
	since := time.Now()
	e.qmp.run(t, "system_reset")
	tr.assertReset(t, since, time.Second)
	e.boots(t, 2)
	// SeaBIOS may reset the machine once more by itself.
	assert.Contains(t, []int{before + 1, before + 2}, e.life(t).Generation)
}

// testShutdown: a guest that has powered off is gone, though its VMM stays and
// its connection is there, until it has another (C-26).
func (e *qmpEnv) testShutdown(t *testing.T, _ *env) {
	before := e.life(t).Generation
	tr := e.startTransfers(t)
	_, err := io.WriteString(e.vmm.keyboard, "poweroff\n")
	require.NoError(t, err)
	gone := e.becomes(t, "gone")
	since := time.Now()
	assert.Equal(t, life{"gone", "the guest has shut down (guest-shutdown)", gone.VMM, before}, gone)
	assert.Contains(t, gone.VMM, "shutdown")
	e.assertGone(t, since, time.Second)
	tr.assertEnd(t, since, time.Second) // the guest's kernel may have had a word first

	e.qmp.run(t, "system_reset")
	e.qmp.run(t, "cont")
	e.boots(t, 3)
	assert.Greater(t, e.life(t).Generation, before)
}

// testQuit: a VMM that leaves says so before its connection does.
func (e *qmpEnv) testQuit(t *testing.T, _ *env) {
	tr := e.startTransfers(t)
	since := time.Now()
	e.qmp.run(t, "quit")
	e.assertGone(t, since, time.Second)
	tr.assertReset(t, since, time.Second)
	assert.Equal(t, "gone", e.life(t).State)
	require.NoError(t, e.vmm.cmd.Wait())
	e.vmm.cmd = nil
}
