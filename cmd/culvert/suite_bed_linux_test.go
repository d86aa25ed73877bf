package main_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// The addresses of INTERFACE.md's defaults.
const (
	nodePrefix = "10.0.2.2/24"
	gateway    = "10.0.2.1"
)

// A bed is a kind of guest behind a kind of attachment. The daemon is started
// first: a QEMU whose netdev finds nobody listening gives up.
type bed interface {
	// spec is the daemon's attach spec.
	spec() string
	// boot brings a guest and returns when its servers listen.
	boot(t *testing.T)
	// kill ends the guest at once, as a crash does.
	kill(t *testing.T)
	// slow is by how much times stretch: 1 at native speed, 5 under software
	// emulation (CASES.md).
	slow() int
}

// script runs one of the guest's scripts and returns the line it prints.
func script(name string, args ...string) (string, error) {
	cmd := exec.Command("../../contrib/guest/"+name, args...)
	out, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		return "", fmt.Errorf("%s: %s", name, exit.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

// realGuest makes the VM's kernel and initramfs, and finds out what boots them:
// once, since that means booting one.
var realGuest = sync.OnceValues(func() (g struct{ dir, accel string }, err error) {
	if g.dir, err = script("build.sh"); err != nil {
		return g, err
	}
	g.accel, err = script("accel.sh", g.dir)
	return g, err
})

// A qemuBed is the real VM. nic is boot.sh's arguments for the other end of its
// NIC, device what is added to the NIC's properties.
type qemuBed struct {
	attach string
	nic    []string
	device string
	boots  string   // its script below contrib
	env    []string // what else the script is told

	dir, accel string
	cmd        *exec.Cmd
	serial     *console
	keyboard   io.Writer
	commands   int // typed since it booted
}

// newNetdev is the VM on one of QEMU's own network back-ends.
func newNetdev(t *testing.T, attach, netdev string) *qemuBed {
	t.Helper()
	return newQEMU(t, attach, "-netdev", netdev+",id=n0")
}

func newQEMU(t *testing.T, attach string, nic ...string) *qemuBed {
	t.Helper()
	_, err := exec.LookPath("qemu-system-x86_64")
	datapathtest.Require(t, "qemu", err == nil, "apt-get install qemu-system-x86, or contrib/install-deps.sh test")
	g, err := realGuest()
	datapathtest.Require(t, "qemu", err == nil, fmt.Sprint(err))
	b := &qemuBed{attach: attach, nic: nic, boots: "guest/boot.sh", dir: g.dir, accel: g.accel}
	t.Cleanup(func() {
		if b.cmd != nil {
			b.kill(t)
		}
		if t.Failed() && b.serial != nil {
			t.Logf("the guest's console:\n%s", b.serial.tail(20))
		}
	})
	return b
}

func (b *qemuBed) spec() string { return b.attach }

func (b *qemuBed) slow() int {
	if strings.HasPrefix(b.accel, "kvm") {
		return 1
	}
	return 5
}

func (b *qemuBed) boot(t *testing.T) {
	t.Helper()
	if b.cmd != nil {
		return // it outlived the daemon
	}
	b.power(t)
	b.awaitServers(t)
}

// power starts QEMU, without waiting for what it boots.
func (b *qemuBed) power(t *testing.T) {
	t.Helper()
	require.Nil(t, b.cmd, "the VM runs already")
	b.serial, b.commands = new(console), 0
	b.cmd = exec.Command("../../contrib/"+b.boots, append([]string{b.dir}, b.nic...)...)
	b.cmd.Env = append(append(os.Environ(), "GUEST_ACCEL="+b.accel, "GUEST_DEVICE="+b.device), b.env...)
	var err error
	b.keyboard, err = b.cmd.StdinPipe()
	require.NoError(t, err)
	b.cmd.Stdout, b.cmd.Stderr = b.serial, b.serial
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, b.cmd.Start())
}

func (b *qemuBed) awaitServers(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(b.serial.String(), "guest ready") },
		3*time.Minute, 50*time.Millisecond, "the guest does not boot:\n%s", b.serial)
}

// sh runs a command on the guest's console, which has to succeed, and returns
// what the console has shown since.
func (b *qemuBed) sh(t *testing.T, command string) string {
	t.Helper()
	const done = "guest ran it: "
	before := len(b.serial.String())
	_, err := io.WriteString(b.keyboard, command+"\n")
	require.NoError(t, err)
	b.commands++
	require.Eventually(t, func() bool { return strings.Count(b.serial.String(), done) == b.commands },
		3*time.Minute, 20*time.Millisecond, "%s\n%s", command, b.serial)
	said := b.serial.String()[before:]
	require.Contains(t, said, done+"0", command)
	return said
}

func (b *qemuBed) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	require.NoError(t, b.cmd.Process.Signal(s))
}

func (b *qemuBed) kill(*testing.T) {
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait()
	b.cmd = nil
}

// A tapBed is a guest at native speed: the test servers in a network namespace
// into which the daemon puts a tap.
//
//	host ── daemon ══ tap's file side │ culvPID 10.0.2.2/24 ── guestd
//	                                  │ namespace culvert-PID
type tapBed struct {
	netns  string // its name for ip-netns(8)
	ifname string // which passes through our own namespace
	guestd string
	cmd    *exec.Cmd
}

func newTap(t *testing.T) *tapBed {
	t.Helper()
	_, err := exec.LookPath("ip")
	datapathtest.Require(t, "netns", err == nil, "apt-get install iproute2, or contrib/install-deps.sh test")
	datapathtest.Require(t, "netns", os.Geteuid() == 0, "run as root")
	_, err = os.Stat("/dev/net/tun")
	datapathtest.Require(t, "tun", err == nil, "modprobe tun")

	b := &tapBed{
		netns:  fmt.Sprintf("culvert-%d", os.Getpid()),
		ifname: fmt.Sprintf("culv%d", os.Getpid()), // 4 + 7 of 15 bytes
		guestd: filepath.Join(t.TempDir(), "guestd"),
	}
	build := exec.Command("go", "build", "-o", b.guestd, "../../contrib/guest/guestd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	b.addNetNS(t)
	t.Cleanup(func() { b.kill(t) })
	return b
}

func (b *tapBed) addNetNS(t *testing.T) {
	t.Helper()
	ip(t, "netns", "add", b.netns)
	ip(t, "-n", b.netns, "link", "set", "lo", "up")
}

func (b *tapBed) spec() string { return "tap:" + b.ifname + ",netns=/run/netns/" + b.netns }
func (b *tapBed) slow() int    { return 1 }

// boot sets the interface up once the daemon has put it there, as whatever
// prepares a container or a VMM's namespace does, and starts the servers.
func (b *tapBed) boot(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/run/netns/" + b.netns); err != nil {
		b.addNetNS(t)
	}
	require.Eventually(t, func() bool { return exec.Command("ip", "-n", b.netns, "link", "show", b.ifname).Run() == nil },
		20*time.Second, 20*time.Millisecond, "the daemon puts no %s into the namespace", b.ifname)
	ip(t, "-n", b.netns, "addr", "add", nodePrefix, "dev", b.ifname)
	ip(t, "-n", b.netns, "link", "set", b.ifname, "up")
	ip(t, "-n", b.netns, "route", "add", "default", "via", gateway)
	if b.cmd != nil {
		return // the interface alone was replaced
	}
	ready := filepath.Join(t.TempDir(), "ready")
	b.cmd = exec.Command("ip", "netns", "exec", b.netns, b.guestd, "-ready", ready)
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, b.cmd.Start())
	require.Eventually(t, func() bool { _, err := os.Stat(ready); return err == nil },
		10*time.Second, 10*time.Millisecond, "guestd does not start")
}

// kill deletes the namespace, after what would keep it alive: its processes,
// and the connections that its kernel still has something to send on.
func (b *tapBed) kill(t *testing.T) {
	t.Helper()
	if b.cmd != nil {
		ip(t, "netns", "exec", b.netns, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/tcp_orphan_retries")
		_ = b.cmd.Process.Kill()
		_ = b.cmd.Wait()
		b.cmd = nil
	}
	if _, err := os.Stat("/run/netns/" + b.netns); err == nil {
		ip(t, "netns", "del", b.netns)
	}
}

// unplug deletes the interface alone; the servers live on.
func (b *tapBed) unplug(t *testing.T) {
	t.Helper()
	ip(t, "-n", b.netns, "link", "del", b.ifname)
}

func ip(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	require.NoError(t, err, "ip %s: %s", strings.Join(args, " "), out)
}
