package main_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The end-to-end suite: the real binary between real clients and a real guest,
// over each kind of attachment. What is true of one has to be true of all;
// what differs is how a guest's end is noticed.
//
//	test ── host ports ── culvert daemon ── attachment ── guest's servers
//
// It takes minutes, most of them the emulated VM's, and is left out with
// -short.

type testCase struct {
	name string
	run  func(*testing.T, *env)
}

// cases are what every bed must pass, on one daemon and one guest.
var cases = []testCase{
	{"Wait", testWait},
	{"HTTP", testHTTP},
	{"Transfer", testTransfer},
	{"Connections", testConnections},
	{"UDPEcho", testUDPEcho},
	{"FB001", testFB001},
	{"FB002", testFB002},
	{"FB003", testFB003},
	{"FB005", testFB005},
	{"FB007", testFB007},
	{"FB011", testFB011},
	{"FB012", testFB012},
	{"FB013", testFB013},
	{"FB017", testFB017},
	{"FB046", testFB046},
	{"FB049", testFB049},
	{"StoppedReader", testStoppedReader},
	{"Churn", testChurn},
}

// TestSuiteQEMU is the real VM whose QEMU connects to the daemon.
func TestSuiteQEMU(t *testing.T) {
	needsTime(t)
	sock := filepath.Join(shortTempDir(t), "vm.sock")
	b := newQEMU(t, "qemu:unix:"+sock, "stream,server=off,addr.type=unix,addr.path="+sock)
	e := start(t, b)

	// FB-002's slowest server answers 90 s after the client's end; the other
	// cases run meanwhile.
	late := make(chan error, 1)
	go func() { late <- e.halfClose(portAnswer90s, "hello", 90*time.Second) }()
	// A guest that was warm is no baseline for one that has a flow; the late
	// one is in both counts.
	e.run(t, cases...)
	e.run(t,
		testCase{"HTTPD", testHTTPD},
		testCase{"FB002Late", func(t *testing.T, _ *env) { require.NoError(t, <-late) }},
		testCase{"Pause", testPause(b, 5*time.Second)},
		testCase{"Killed", testEnd(b.kill, time.Second)},
		testCase{"Stop", testStop},
	)
}

// TestSuiteQEMUDial is the real VM whose QEMU listens: the form in which either
// side may go and return.
func TestSuiteQEMUDial(t *testing.T) {
	needsTime(t)
	sock := filepath.Join(shortTempDir(t), "vm.sock")
	b := newQEMU(t, "qemu:unix:"+sock+",dial", "stream,server=on,addr.type=unix,addr.path="+sock)
	start(t, b).run(t,
		testCase{"HTTP", testHTTP},
		testCase{"FB118", testRestart},
		testCase{"Killed", testEnd(b.kill, time.Second)},
	)
}

// TestSuiteUnixgram is the real VM over datagrams. Nothing but the probe tells
// of its end: three of one second missed (C-26).
func TestSuiteUnixgram(t *testing.T) {
	needsTime(t)
	dir := shortTempDir(t)
	ours, theirs := filepath.Join(dir, "culvert.sock"), filepath.Join(dir, "qemu.sock")
	b := newQEMU(t, "unixgram:"+ours,
		"dgram,local.type=unix,local.path="+theirs+",remote.type=unix,remote.path="+ours)
	e := start(t, b)
	e.run(t, cases...)
	e.run(t,
		testCase{"FB118", testRestart},
		testCase{"Killed", testEnd(b.kill, 5*time.Second)},
		testCase{"Stop", testStop},
	)
}

// TestSuiteTap is a namespace with a tap in it.
func TestSuiteTap(t *testing.T) {
	needsTime(t)
	b := newTap(t)
	e := start(t, b)
	e.run(t, cases...)
	e.run(t,
		testCase{"InterfaceDeleted", testEnd(b.unplug, time.Second)},
		testCase{"NamespaceDeleted", testNamespaceDeleted},
		testCase{"FB121", testCycles(b, 10)},
		testCase{"Goroutines", testGoroutines},
		testCase{"Stop", testStop},
	)
}

func needsTime(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("the end-to-end suite takes minutes: run without -short")
	}
}

// start brings up a daemon, then the guest, and waits until both have met.
func start(t *testing.T, b bed) *env {
	t.Helper()
	e := &env{bed: b, base: freePorts(t, hostLen)}
	e.d = newDaemon(t, b.spec(), publishes(e.base))
	e.d.start(t)
	e.boot(t)
	e.d.waitReady(t)
	return e
}

// run runs cases in order. One that fails does not keep the next from running,
// as long as there is a daemon to run it against.
func (e *env) run(t *testing.T, cases ...testCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			require.NotNil(t, e.d.cmd, "the daemon has ended")
			c.run(t, e)
		})
	}
}
