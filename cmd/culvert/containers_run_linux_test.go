package main_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// Containers end to end: real engines publish ports, the real daemon makes them
// appear, real clients use them (C-30 to C-38).
//
//	test ── docker ──────────────────────────────► engine ── containers
//	test ── host ports, DNS ── culvert daemon ── attachment ── node

// A containersEnv is a running daemon with an engine behind it.
type containersEnv struct {
	engineBed
	top          *testing.T // which outlives every case
	d            *daemon
	heard        *engineEvents
	dockerConfig string // a directory that is not the user's

	base, next int // host ports: the first of those that were free, and the next to use
	dns        netip.AddrPort
}

const containerPorts = 900

type containersCase struct {
	name string
	run  func(*testing.T, *containersEnv)
}

// TestContainers is dockerd in a namespace behind a tap.
func TestContainers(t *testing.T) {
	needsTime(t)
	startContainers(t, newTapEngine(t)).run(t,
		containersCase{"Publish", testContainerPublish},
		containersCase{"Pinned", testContainerPinned},
		containersCase{"All", testContainerAll},
		containersCase{"BothProtocols", testContainerBothProtocols},
		containersCase{"Range", testContainerRange},
		containersCase{"Ends", testContainerEnds},
		containersCase{"FB047", testContainerFB047},
		containersCase{"FB068", testContainerFB068},
		containersCase{"FB089", testContainerDynamic},
		containersCase{"Rename", testContainerRename},
		containersCase{"Ls", testContainerLs},
		containersCase{"Names", testContainerNames},
		containersCase{"Resolver", testContainerResolver},
		containersCase{"DaemonRestart", testContainerDaemonRestart},
		containersCase{"EngineRestart", testContainerEngineRestart},
		containersCase{"Burst", testContainerBurst},
		containersCase{"VMKilled", testContainerVMKilled},
		containersCase{"OwnAddresses", testContainerOwnAddresses},
		containersCase{"Alias", testContainerAlias},
		containersCase{"Unreachable", testContainerUnreachable},
		containersCase{"Slow", testContainerSlow},
		containersCase{"Truncated", testContainerTruncated},
		containersCase{"Huge", testContainerHuge},
		containersCase{"Refused", testContainerRefused},
		containersCase{"NoTLS", testContainerNoTLS},
		containersCase{"Old", testContainerOld},
		containersCase{"TakenDNSPort", testContainerTakenDNSPort},
		containersCase{"Stop", testContainerStop},
	)
}

// TestContainersQEMU is dockerd in a real VM, so that nothing of the above is due
// to the namespace. What is left out asks nothing else of the guest, and a
// container takes an emulated one many seconds.
func TestContainersQEMU(t *testing.T) {
	needsTime(t)
	startContainers(t, newVMEngine(t)).run(t,
		containersCase{"Publish", testContainerPublish},
		containersCase{"Pinned", testContainerPinned},
		containersCase{"All", testContainerAll},
		containersCase{"BothProtocols", testContainerBothProtocols},
		containersCase{"Range", testContainerRange},
		containersCase{"Ends", testContainerEnds},
		containersCase{"Names", testContainerNames},
		containersCase{"DaemonRestart", testContainerDaemonRestart},
		containersCase{"EngineRestart", testContainerEngineRestart},
		containersCase{"Burst", testContainerBurst},
		containersCase{"VMKilled", testContainerVMKilled},
		containersCase{"OwnAddresses", testContainerOwnAddresses},
		containersCase{"Stop", testContainerStop},
	)
}

func (e *containersEnv) run(t *testing.T, cases ...containersCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			require.NotNil(t, e.d.cmd, "the daemon has ended")
			c.run(t, e)
		})
	}
}

// startContainers brings up a daemon, then the guest, and waits until both have
// met.
func startContainers(t *testing.T, b engineBed) *containersEnv {
	t.Helper()
	e := &containersEnv{engineBed: b, top: t, base: freePorts(t, containerPorts), dockerConfig: t.TempDir()}
	e.next = e.base
	// An address of this run's own, for port 53 may be taken on others: resolv.conf
	// knows no ports.
	pid := os.Getpid()
	e.dns = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 53, byte(pid >> 8), byte(pid)}), 53)
	e.d = newDaemon(t, b.spec(), nil)
	e.configure(t, settings{})
	e.d.start(t)
	e.boot(t)
	e.heard = e.watch(t, t)
	e.ready(t)
	return e
}

// Settings are what tests change in the daemon's config.
type settings struct {
	endpoint any    // of the engine; the node's port 2375 without
	address  string // names.address
}

// configure writes the daemon's config, for its next start.
func (e *containersEnv) configure(t *testing.T, s settings) {
	t.Helper()
	if s.endpoint == nil {
		s.endpoint = "tcp://10.0.2.2:2375"
	}
	if s.address == "" {
		s.address = "host"
	}
	yaml, err := json.Marshal(map[string]any{ // which is YAML
		"timeouts": map[string]any{"udpIdle": udpIdle.String()},
		"vms":      []any{map[string]any{"name": "default", "attach": e.spec(), "docker": s.endpoint}},
		"names":    map[string]any{"listen": e.dns.String(), "address": s.address},
	})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(e.d.args[2], yaml, 0o600))
}

// restart starts the daemon with other settings, and puts those of the bed back
// when the test ends.
func (e *containersEnv) restart(t *testing.T, s settings) {
	t.Helper()
	again := func(s settings) {
		if e.d.cmd != nil {
			e.d.stop(t)
		}
		e.configure(t, s)
		e.d.start(t)
		e.reboot(t)
	}
	again(s)
	t.Cleanup(func() { again(settings{}) })
}

// reboot sets up what went with the daemon: a tap's interface does, a VM stays.
func (e *containersEnv) reboot(t *testing.T) {
	t.Helper()
	if tap, ok := e.engineBed.(*tapEngine); ok {
		tap.boot(t)
	}
	e.ready(t)
}

func (e *containersEnv) ready(t *testing.T) {
	t.Helper()
	out, code := e.d.cli("wait", "--timeout", "60s")
	require.Zero(t, code, "culvert wait: %s\n%s", out, e.d.logs.tail(20))
}

// ports returns the first of n host ports in a row that no other test uses.
func (e *containersEnv) ports(t *testing.T, n int) int {
	t.Helper()
	first := e.next
	e.next += n
	require.LessOrEqual(t, e.next, e.base+containerPorts, "raise containerPorts")
	return first
}

// bound stretches a time for the guest's speed.
func (e *containersEnv) bound(d time.Duration) time.Duration { return time.Duration(e.slow()) * d }

// container runs one in the background until the test ends, and returns its ID and
// when the engine said that it had started.
func (e *containersEnv) container(t *testing.T, args ...string) (id string, started time.Time) {
	t.Helper()
	id = e.docker(t, append([]string{"run", "-d"}, args...)...)
	t.Cleanup(func() { _, _ = e.tryDocker("rm", "-f", id) })
	return id, e.heard.at(t, "start", id)
}

// within waits until f has nothing to complain about, and asserts that this is so
// within limit of since, at the guest's speed.
func (e *containersEnv) within(t *testing.T, since time.Time, limit time.Duration, what string, f func() error) {
	t.Helper()
	e.withinNative(t, since, e.bound(limit), what, f)
}

// withinNative is within for what the guest takes no part in.
func (e *containersEnv) withinNative(t *testing.T, since time.Time, limit time.Duration, what string, f func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(limit + 20*time.Second); ; time.Sleep(10 * time.Millisecond) {
		if err = f(); err == nil {
			break
		}
		require.True(t, time.Now().Before(deadline), "%s: %v\n%s", what, err, e.d.logs.tail(20))
	}
	took := time.Since(since)
	t.Logf("%s: %v", what, took)
	assert.Less(t, took, margin*limit, what)
}

// rows returns the rows of a container, or of every one.
func (e *containersEnv) rows(t *testing.T, id string) (rows []row) {
	t.Helper()
	for _, r := range e.d.ls(t) {
		if r.Owner.Kind == "docker" && (id == "" || r.Owner.ID == id) {
			rows = append(rows, r)
		}
	}
	return rows
}

// allForwarded complains about the rows of a container unless there are n, all
// forwarded.
func (e *containersEnv) allForwarded(t *testing.T, id string, n int) error {
	rows := e.rows(t, id)
	for _, r := range rows {
		if r.State != "forwarded" {
			return fmt.Errorf("%s/%s is %s: %s", r.Host, r.Protocol, r.State, r.Detail)
		}
	}
	if len(rows) != n {
		return fmt.Errorf("%d rows, want %d", len(rows), n)
	}
	return nil
}

// noRows complains about rows that a container has.
func (e *containersEnv) noRows(t *testing.T, id string) error {
	if rows := e.rows(t, id); len(rows) > 0 {
		return fmt.Errorf("%s is %s: %s", rows[0].Host, rows[0].State, rows[0].Detail)
	}
	return nil
}

func onLoopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// echoes asks an echo server something of its own.
func echoes(network, addr string) error {
	c, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	patience := 2 * time.Second
	if network == "udp" {
		patience = 200 * time.Millisecond // what was lost is not sent again
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	sent := fmt.Sprintf("hello at %d\n", time.Now().UnixNano())
	if _, err := io.WriteString(c, sent); err != nil {
		return err
	}
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != sent {
		return fmt.Errorf("%q came back as %q", sent, got)
	}
	return nil
}

// A kept flow is one that has to outlive what a test does.
type keptFlow struct {
	*net.TCPConn
	addr  string
	inode uint64 // of the listener it came through
}

func keep(t *testing.T, port int) *keptFlow {
	t.Helper()
	addr := onLoopback(port)
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(5*time.Minute)))
	mustEcho(t, c, "kept")
	return &keptFlow{c.(*net.TCPConn), addr, listenInode(t, addr)}
}

// assertKept asserts that the flow lives and that its listener is the one it was.
func (k *keptFlow) assertKept(t *testing.T) {
	t.Helper()
	mustEcho(t, k, "still here")
	assert.Equal(t, k.inode, listenInode(t, k.addr), "the listener at %s was closed and opened again", k.addr)
}

// listenInode returns the inode of the socket that listens at addr, as
// proc_pid_net(5) has it: this thread's, for the main one may be elsewhere (see
// tapEngine).
func listenInode(t *testing.T, addr string) uint64 {
	t.Helper()
	ap := netip.MustParseAddrPort(addr)
	ip := ap.Addr().As4()
	local := fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(ip[:]), ap.Port())
	f, err := os.Open("/proc/thread-self/net/tcp")
	require.NoError(t, err)
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) > 9 && fields[1] == local && fields[3] == "0A" {
			inode, err := strconv.ParseUint(fields[9], 10, 64)
			require.NoError(t, err)
			return inode
		}
	}
	require.FailNow(t, "nobody listens at "+addr)
	return 0
}

// background runs f over and over until stop is called, which waits for it, or the
// test ends.
func background(t *testing.T, f func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for ctx.Err() == nil {
			f()
		}
	}()
	stop = func() {
		cancel()
		<-stopped
	}
	t.Cleanup(stop)
	return stop
}

// bindable complains unless a server can have each of n host ports.
func bindable(first, n int) func() error {
	return func() error { return portsFree(first, n) }
}

// assertReset asserts that the flow's end is told as what it is.
func (k *keptFlow) assertReset(t *testing.T) {
	t.Helper()
	err := k.end(t)
	assert.True(t, isReset(err), "the client saw %v", err)
}

// assertEnds asserts that the flow ends, in whatever way.
func (k *keptFlow) assertEnds(t *testing.T) {
	t.Helper()
	assert.NotErrorIs(t, k.end(t), os.ErrDeadlineExceeded)
}

func (k *keptFlow) end(t *testing.T) error {
	t.Helper()
	require.NoError(t, k.SetDeadline(time.Now().Add(20*time.Second)))
	_, err := io.Copy(io.Discard, k)
	return err
}

// dig asks the daemon's DNS server, and returns the status and the answers, sorted.
func (e *containersEnv) dig(t *testing.T, args ...string) (status string, answers []string) {
	t.Helper()
	_, err := exec.LookPath("dig")
	datapathtest.Require(t, "dig", err == nil, "apt-get install bind9-dnsutils, or contrib/install-deps.sh test")
	args = append([]string{"@" + e.dns.Addr().String(), "-p", strconv.Itoa(int(e.dns.Port())), "+tries=1", "+time=5"}, args...)
	out, err := exec.Command("dig", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for line := range strings.Lines(string(out)) {
		if _, after, ok := strings.Cut(line, "status: "); ok {
			status, _, _ = strings.Cut(after, ",")
		}
		if fields := strings.Fields(line); len(fields) == 5 && !strings.HasPrefix(line, ";") && fields[3] != "SOA" {
			answers = append(answers, fields[4])
		}
	}
	slices.Sort(answers)
	return status, answers
}
