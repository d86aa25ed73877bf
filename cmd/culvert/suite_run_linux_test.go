package main_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/stack/promoted"
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
	b := newNetdev(t, "qemu:unix:"+sock, "stream,server=off,addr.type=unix,addr.path="+sock)
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
	b := newNetdev(t, "qemu:unix:"+sock+",dial", "stream,server=on,addr.type=unix,addr.path="+sock)
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
	b := newNetdev(t, "unixgram:"+ours,
		"dgram,local.type=unix,local.path="+theirs+",remote.type=unix,remote.path="+ours)
	e := start(t, b)
	e.run(t, cases...)
	e.run(t,
		testCase{"FB118", testRestart},
		testCase{"Killed", testEnd(b.kill, 5*time.Second)},
		testCase{"Stop", testStop},
	)
}

// TestSuiteVhostUser is the real VM whose NIC we are.
func TestSuiteVhostUser(t *testing.T) {
	needsTime(t)
	b := newVhostUser(t, "")
	e := start(t, b)
	late := make(chan error, 1) // as in TestSuiteQEMU
	go func() { late <- e.halfClose(portAnswer90s, "hello", 90*time.Second) }()
	e.run(t, cases...)
	e.run(t,
		testCase{"HTTPD", testHTTPD},
		testCase{"FB002Late", func(t *testing.T, _ *env) { require.NoError(t, <-late) }},
		testCase{"Offloads", testOffloads(b)},
		testCase{"Reboot", testReboot(b)},
		testCase{"Idle", testIdle},
		testCase{"Pause", testPause(b, 5*time.Second)},
		testCase{"FB118", testRestart},
		testCase{"Killed", testEnd(b.kill, time.Second)},
		testCase{"FB121", testCycles(b, 5)},
		testCase{"Goroutines", testGoroutines},
		testCase{"Stop", testStop},
	)
}

// TestSuiteVhostUserQueues is the same with two pairs of queues.
func TestSuiteVhostUserQueues(t *testing.T) {
	needsTime(t)
	b := newVhostUser(t, ",queues=2")
	start(t, b).run(t,
		testCase{"HTTP", testHTTP},
		testCase{"Transfer", testTransfer},
		testCase{"Connections", testConnections},
		testCase{"UDPEcho", testUDPEcho},
		testCase{"Channels", testChannels(b)},
		testCase{"Killed", testEnd(b.kill, time.Second)},
		testCase{"Stop", testStop},
	)
}

// TestSuiteVhostUserRefused is the VM whose owner refuses one feature after
// another.
func TestSuiteVhostUserRefused(t *testing.T) {
	needsTime(t)
	b := newVhostUser(t, "")
	e := start(t, b)
	for _, f := range []string{
		"csum", "guest_csum", "host_tso4", "host_tso6", "host_ecn", "guest_tso4", "guest_tso6", "guest_ecn",
		"mrg_rxbuf", "event_idx", "indirect_desc",
	} {
		e.run(t, testCase{f, func(t *testing.T, e *env) {
			hosts := e.hosts(t)
			b.kill(t)
			e.d.waitState(t, "pending", margin*10*time.Second)
			b.device = "," + f + "=off"
			e.boot(t)
			e.assertBack(t, hosts)
			require.NoError(t, e.fetch(16<<20))
			require.NoError(t, e.send(16<<20))
		}})
	}
	e.run(t, testCase{"Stop", testStop})
}

// TestSuiteTap is a namespace with a tap in it.
func TestSuiteTap(t *testing.T) { testTap(t, "promoted") }

// TestSuiteTapNetstack is TestSuiteTap with gVisor's flows.
func TestSuiteTapNetstack(t *testing.T) { testTap(t, "netstack", byNetstack) }

// byNetstack has a VM's flows be gVisor's.
func byNetstack(vm map[string]any) { vm["tcp"] = "netstack" }

// testTap runs the suite over a tap, where flows are what tcp says.
func testTap(t *testing.T, tcp string, with ...func(vm map[string]any)) {
	needsTime(t)
	if tcp == "promoted" {
		datapathtest.Require(t, "peekoff", promoted.Supported(), "promoted flows take SO_PEEK_OFF for TCP, which Linux has since 6.9")
	}
	b := newTap(t)
	e := start(t, b, with...)
	require.Equal(t, tcp, e.d.vm(t).TCP)
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
func start(t *testing.T, b bed, with ...func(vm map[string]any)) *env {
	t.Helper()
	e := &env{bed: b, base: freePorts(t, hostLen)}
	e.d = newDaemon(t, b.spec(), publishes(e.base), with...)
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
