package bench

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/attach"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/require"
)

// bootPatience is how long an emulated guest may take to do anything.
const bootPatience = time.Minute

// The VM's addresses, which its init gives it.
const (
	vmNode    = "10.0.2.2"
	vmGateway = "10.0.2.1/24"
)

// vmPaths are the ways to one and the same VM: QEMU's own first.
var vmPaths = []path{
	{"qemu-user", true, openQEMUUser},
	{"culvert-stream", false, openStream},
	{"culvert-unixgram", false, openUnixgram},
	{"culvert-vhost-user", false, openVhostUser},
}

// BenchmarkVM moves bulk data through a published port of a VM, which runs under
// software emulation: what differs between paths is what the guest's side of each
// costs, not the host's.
func BenchmarkVM(b *testing.B) {
	_, err := exec.LookPath("iperf3")
	datapathtest.Require(b, "iperf3", err == nil, "apt-get install iperf3, or contrib/install-deps.sh bench")
	for _, path := range vmPaths {
		b.Run("path="+path.name, func(b *testing.B) {
			bed := path.open(b)
			for _, dir := range []string{"host-to-guest", "guest-to-host"} {
				b.Run("dir="+dir, func(b *testing.B) { measureStream(b, bed, dir, 1) })
			}
		})
	}
}

// openQEMUUser is what every QEMU can do without us.
//
//	client ── QEMU's hostfwd ── slirp ── virtio-net of QEMU ── server
func openQEMUUser(tb testing.TB) *bed {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(tb, l.Close())
	vm := mustBoot(tb, "-netdev", fmt.Sprintf("user,id=n0,restrict=on,net=10.0.2.0/24,host=10.0.2.1,hostfwd=tcp:127.0.0.1:%d-%s:%d", port, vmNode, guestPort))
	return &bed{client: "127.0.0.1", port: port, serve: vm.serve}
}

// openStream is culvert behind QEMU's stream netdev.
//
//	client ── listener ── netstack ── socket ── virtio-net of QEMU ── server
//	          this process
func openStream(tb testing.TB) *bed {
	tb.Helper()
	sock := socketPath(tb)
	return openVM(tb, "qemu:unix:"+sock, "-netdev", "stream,id=n0,server=off,addr.type=unix,addr.path="+sock)
}

// openUnixgram is culvert behind QEMU's dgram netdev.
//
//	client ── listener ── netstack ── a datagram a frame ── virtio-net of QEMU ── server
//	          this process
func openUnixgram(tb testing.TB) *bed {
	tb.Helper()
	ours, theirs := socketPath(tb), socketPath(tb)
	return openVM(tb, "unixgram:"+ours,
		"-netdev", "dgram,id=n0,local.type=unix,local.path="+theirs+",remote.type=unix,remote.path="+ours)
}

// openVhostUser is culvert as the VM's NIC.
//
//	client ── listener ── netstack ── virtio-net ── server
//	          this process
func openVhostUser(tb testing.TB) *bed {
	tb.Helper()
	spec := "vhost-user:" + socketPath(tb)
	return openVM(tb, spec, spec)
}

// openVM boots the VM with nic, boot.sh's arguments, on what text attaches to.
func openVM(tb testing.TB, text string, nic ...string) *bed {
	tb.Helper()
	spec, err := attach.ParseSpec(text)
	require.NoError(tb, err)
	l, err := attach.Listen(spec, attach.Options{})
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = l.Close() })
	vm := mustBoot(tb, nic...)
	ctx, cancel := context.WithTimeout(context.Background(), bootPatience)
	defer cancel()
	att, err := l.Accept(ctx)
	require.NoError(tb, err, vm.said.String())
	b := mustRelay(tb, att, vmNode, vmGateway, bootPatience)
	b.serve = vm.serve
	return b
}

// A machine is the test guest under QEMU.
type machine struct {
	keyboard io.Writer
	said     *console
	served   int // runs
}

// A console is what the guest has said so far.
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

func mustBoot(tb testing.TB, nic ...string) *machine {
	tb.Helper()
	_, err := exec.LookPath("qemu-system-x86_64")
	datapathtest.Require(tb, "qemu", err == nil, "apt-get install qemu-system-x86, or contrib/install-deps.sh bench")
	dir, err := exec.Command("../contrib/guest/build.sh").Output()
	datapathtest.Require(tb, "qemu", err == nil, "contrib/guest/build.sh says what is missing")
	m := &machine{said: new(console)}
	cmd := exec.Command("../contrib/guest/boot.sh", append([]string{strings.TrimSpace(string(dir))}, nic...)...)
	// The same everywhere: under KVM the figures would be other figures.
	cmd.Env = append(cmd.Environ(), "GUEST_ACCEL=tcg,thread=multi")
	cmd.Stdout, cmd.Stderr = m.said, m.said
	m.keyboard, err = cmd.StdinPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	return m
}

// serve starts an iperf3 in the guest for one run and waits until it listens. One
// for all runs would not listen for a moment after each.
func (m *machine) serve(tb testing.TB) {
	tb.Helper()
	m.await(tb, "guest ready", 1)
	_, err := fmt.Fprintf(m.keyboard, "while pidof iperf3; do sleep 0.1; done; iperf3 -s -1 -p %d -D && until netstat -ltn | grep -q :%d; do sleep 0.1; done\n", guestPort, guestPort)
	require.NoError(tb, err)
	m.served++
	m.await(tb, "guest ran it: 0", m.served)
}

// await waits until the guest has said something so often.
func (m *machine) await(tb testing.TB, what string, times int) {
	tb.Helper()
	require.Eventually(tb, func() bool { return strings.Count(m.said.String(), what) >= times },
		bootPatience, 50*time.Millisecond, "%s\n%s", what, m.said)
}
