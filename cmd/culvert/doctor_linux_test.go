package main_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What people break, and what they are told of it: doctor names the step, and ls
// or vms says so within ten seconds. The guests are real ones: the test servers in
// a namespace behind a tap, QEMU, dockerd.

// saidWithin is in what time vms and ls say what has broken, and doctor does.
const saidWithin = 10 * time.Second

// A step is what `culvert doctor -o json` says of one.
type step struct{ VM, Row, Step, State, Detail, Advice string }

// doctor asks and returns the steps, and those that are broken by their names.
func (d *daemon) doctor(t *testing.T, args ...string) (steps []step, broken []string) {
	t.Helper()
	since := time.Now()
	out, code := d.cli(append([]string{"doctor", "-o", "json"}, args...)...)
	assert.Less(t, time.Since(since), margin*saidWithin)
	require.NoError(t, json.Unmarshal([]byte(out), &steps), out)
	for _, s := range steps {
		switch s.State {
		case "broken":
			broken = append(broken, s.Step)
			assert.NotEmpty(t, s.Advice, "%+v", s)
		case "ok", "skipped", "unknown":
			assert.Empty(t, s.Advice, "%+v", s)
		default:
			assert.Fail(t, "no such state", "%+v", s)
		}
		assert.NotEmpty(t, s.Detail, "%+v", s)
	}
	want := 0
	if broken != nil {
		want = 1
	}
	assert.Equal(t, want, code, out)
	return steps, broken
}

// diagnoses asserts that doctor finds one step broken, and says want of it.
func (d *daemon) diagnoses(t *testing.T, name, want string, args ...string) {
	t.Helper()
	steps, broken := d.doctor(t, args...)
	if !assert.Equal(t, []string{name}, broken, "%+v", steps) {
		return
	}
	for _, s := range steps {
		if s.State == "broken" {
			assert.Contains(t, s.Detail, want)
		}
	}
	if table, code := d.cli(append([]string{"doctor"}, args...)...); assert.Equal(t, 1, code) {
		t.Logf("culvert doctor %s\n%s", strings.Join(args, " "), table)
	}
}

// isWell asserts that doctor finds nothing broken, and looks at these steps.
func (d *daemon) isWell(t *testing.T, want []string, args ...string) []step {
	t.Helper()
	steps, broken := d.doctor(t, args...)
	assert.Empty(t, broken, "%+v", steps)
	var names []string
	for _, s := range steps {
		names = append(names, s.Step)
	}
	assert.Equal(t, want, names)
	return steps
}

// says waits until vms, or ls, says something of what has broken.
func (d *daemon) says(t *testing.T, command, want string) {
	t.Helper()
	since := time.Now()
	for {
		out, _ := d.cli(command)
		if strings.Contains(out, want) {
			return
		}
		require.Less(t, time.Since(since), margin*saidWithin, "culvert %s says nothing of %q:\n%s", command, want, out)
		time.Sleep(50 * time.Millisecond)
	}
}

// knock is a client that is refused by the guest; it may be told before it knows
// that it was connected.
func knock(t *testing.T, port string) {
	t.Helper()
	c, err := net.Dial("tcp", "127.0.0.1:"+port)
	if err == nil {
		_, err = io.Copy(io.Discard, c)
		_ = c.Close()
	}
	assert.True(t, isReset(err), "%v", err)
}

// TestDoctor is what breaks at a guest in a namespace.
func TestDoctor(t *testing.T) {
	needsTime(t)
	b := newTap(t)
	base := freePorts(t, 5)
	port := func(i int) string { return fmt.Sprint(base + i) }
	taken, err := net.Listen("tcp", "127.0.0.1:"+port(3))
	require.NoError(t, err)
	defer taken.Close()
	d := newDaemon(t, b.spec(), []string{
		fmt.Sprintf("%d:%d", base, portEcho), fmt.Sprintf("%d:%d", base+1, portClosed), fmt.Sprintf("%d:%d/udp", base+1, portClosed),
		fmt.Sprintf("%d:%d/udp", base+2, portEcho), fmt.Sprintf("%d:%d", base+3, portEcho),
	})
	d.start(t)
	d.waitVM(t, "stalled")
	d.diagnoses(t, "node", "does not answer ARP", port(0)) // it has no address yet
	b.boot(t)
	out, code := d.cli("wait", "--timeout", "60s")
	require.Zero(t, code, out)

	way := []string{"host socket", "listener", "vm", "link", "node", "guest port"}
	inside := func(args ...string) { ip(t, append([]string{"netns", "exec", b.netns}, args...)...) }
	t.Run("Well", func(t *testing.T) {
		for _, of := range []string{port(0), port(0) + "/tcp", "127.0.0.1:" + port(0), "[::1]:" + port(0), port(0) + ":7"} {
			steps := d.isWell(t, way, of)
			for _, s := range steps {
				assert.Equal(t, "ok", s.State, "%+v", s)
			}
		}
		assert.Empty(t, d.flows(t), "what doctor opens is no client's flow")
		_, broken := d.doctor(t) // of everything: the port that is taken, the two that are closed
		assert.Equal(t, []string{"guest port", "guest port", "host socket"}, broken)
		out, code := d.cli("doctor", "--vm", "nobody")
		assert.Equal(t, 1, code)
		assert.Contains(t, out, `no VM named "nobody"`)
	})
	t.Run("HostPortTaken", func(t *testing.T) {
		d.says(t, "ls", fmt.Sprintf("(pid %d)", os.Getpid()))
		d.diagnoses(t, "host socket", fmt.Sprintf("(pid %d)", os.Getpid()), port(3))
	})
	t.Run("NobodyAsked", func(t *testing.T) {
		d.diagnoses(t, "listener", "nobody asks for host port "+port(4), port(4))
		other, err := net.Listen("tcp", "127.0.0.1:"+port(4))
		require.NoError(t, err)
		defer other.Close()
		d.diagnoses(t, "listener", fmt.Sprintf("(pid %d) has 127.0.0.1:%s/tcp", os.Getpid(), port(4)), port(4))
		d.diagnoses(t, "listener", `nothing with a host port is called "nobody"`, "nobody")
	})
	t.Run("GuestPortClosed", func(t *testing.T) {
		d.diagnoses(t, "guest port", "refuses", port(1)+"/tcp")
		d.diagnoses(t, "guest port", "refuses", port(1)+"/udp")
		knock(t, port(1))
		d.says(t, "ls", "1 refused (refused 1)")
	})
	t.Run("UDP", func(t *testing.T) {
		steps := d.isWell(t, way, port(2))
		last := steps[len(steps)-1]
		assert.Equal(t, "ok", last.State, "guestd answers every datagram: %+v", last)
		inside("iptables", "-I", "INPUT", "-p", "udp", "-j", "DROP")
		defer inside("iptables", "-F", "INPUT")
		steps = d.isWell(t, way, port(2))
		assert.Equal(t, "unknown", steps[len(steps)-1].State, "silence says nothing of UDP")
	})
	t.Run("FirewallDrops", func(t *testing.T) {
		inside("iptables", "-I", "INPUT", "-p", "tcp", "-j", "DROP")
		defer inside("iptables", "-F", "INPUT")
		d.diagnoses(t, "guest port", "firewall drops", port(0))
		knock(t, port(0))
		d.says(t, "ls", "1 refused (timeout 1)")
	})
	t.Run("FirewallRejects", func(t *testing.T) {
		inside("iptables", "-I", "INPUT", "-p", "tcp", "-j", "REJECT", "--reject-with", "icmp-admin-prohibited")
		defer inside("iptables", "-F", "INPUT")
		d.diagnoses(t, "guest port", "cannot be reached", port(0))
	})
	t.Run("NoARP", func(t *testing.T) {
		inside("ip", "link", "set", b.ifname, "arp", "off")
		d.says(t, "vms", "the node does not answer")
		d.diagnoses(t, "node", "does not answer ARP", port(0))
		inside("ip", "link", "set", b.ifname, "arp", "on")
		d.waitVM(t, "ready")
	})
	t.Run("InterfaceDown", func(t *testing.T) {
		inside("ip", "link", "set", b.ifname, "down")
		d.says(t, "vms", "the node does not answer")
		d.diagnoses(t, "link", "interface is down", port(0))
		inside("ip", "link", "set", b.ifname, "up")
		d.waitVM(t, "ready")
		d.isWell(t, way, port(0))
	})
	t.Run("InterfaceDeleted", func(t *testing.T) {
		before := len(d.ls(t))
		b.unplug(t)
		d.says(t, "ls", "pending") // and made again at once, which nobody sets up yet
		assert.Len(t, d.ls(t), before)
		d.diagnoses(t, "node", "does not answer ARP", port(0))
		b.boot(t)
		d.waitVM(t, "ready")
		d.isWell(t, way, port(0))
	})
	d.stop(t)
}

// waitVM waits until the only VM is in a state.
func (d *daemon) waitVM(t *testing.T, state string) {
	t.Helper()
	require.Eventually(t, func() bool { return d.vm(t).State == state }, time.Minute, 20*time.Millisecond, "it is not %s", state)
}

// TestDoctorQEMU is what a VMM does to its guest.
func TestDoctorQEMU(t *testing.T) {
	needsTime(t)
	link := filepath.Join(shortTempDir(t), "vm.sock")
	e := newQMP(t, "qemu:unix:"+link, []string{"-netdev", "stream,id=n0,server=off,addr.type=unix,addr.path=" + link})
	_, host, err := net.SplitHostPort(e.addr("127.0.0.1", "tcp", portEcho))
	require.NoError(t, err)
	e.d.diagnoses(t, "vm", "waiting: nothing has attached yet", host)
	e.up(t)
	e.d.isWell(t, []string{"host socket", "listener", "vm", "link", "node", "guest port"}, host)

	e.qmp.run(t, "stop")
	e.d.says(t, "vms", "its VMM paused it")
	e.d.diagnoses(t, "vm", "paused: its VMM paused it", host)
	e.qmp.run(t, "cont")
	e.d.waitVM(t, "ready")
	e.d.isWell(t, []string{"host socket", "listener", "vm", "link", "node", "guest port"}, host)

	e.vmm.kill(t)
	e.d.says(t, "vms", "gone")
	e.d.says(t, "ls", "pending")
	e.d.diagnoses(t, "vm", "gone: ", host)
	e.d.stop(t)
}

// TestDoctorContainers is what happens to a container and its engine.
func TestDoctorContainers(t *testing.T) {
	needsTime(t)
	e := startContainers(t, newTapEngine(t))
	port := e.ports(t, 1)
	host := fmt.Sprint(port)
	id, _ := e.container(t, "--name", "web", "-p", host+":7", "guestd")
	require.Eventually(t, func() bool { return e.allForwarded(t, id, 1) == nil }, time.Minute, 50*time.Millisecond)
	way := []string{"host socket", "listener", "vm", "link", "node", "engine", "guest port", "container"}
	for _, of := range []string{host, "web", id[:12]} {
		for _, s := range e.d.isWell(t, way, of) {
			assert.Equal(t, "ok", s.State, "%+v", s)
		}
	}

	// The container runs on without its engine, and its port serves.
	e.killEngine(t)
	e.d.says(t, "vms", "engine")
	e.d.diagnoses(t, "engine", "refused the connection", host)
	steps, _ := e.d.doctor(t, host)
	assert.Equal(t, "skipped", steps[len(steps)-1].State, "what runs is not known")
	e.startEngine(t)
	require.Eventually(t, func() bool { _, broken := e.d.doctor(t); return broken == nil }, time.Minute, 100*time.Millisecond)

	e.docker(t, "rm", "-f", "web")
	require.Eventually(t, func() bool { return len(e.d.ls(t)) == 0 }, margin*saidWithin, 50*time.Millisecond, "ls says that it has gone")
	e.d.diagnoses(t, "listener", "nobody asks for host port "+host, host)
	e.d.diagnoses(t, "listener", `"web"`, "web")
	e.d.stop(t)
}
