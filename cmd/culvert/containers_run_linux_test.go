package main_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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

	next int // host port that no test uses yet
	dns  netip.AddrPort
}

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
	e := &containersEnv{engineBed: b, top: t, next: b.base(), dockerConfig: t.TempDir()}
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
	require.LessOrEqual(t, e.next, e.base()+containerPorts, "raise containerPorts")
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
