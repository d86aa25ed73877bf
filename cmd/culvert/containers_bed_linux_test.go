package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/guesttest"
)

// An engineBed is a guest with a real Docker engine that listens on the node's
// port 2375, and has the image of contrib/engine/image.sh as "guestd".
type engineBed interface {
	bed
	// base is the first of hostPorts host ports that are free.
	base() int
	// host is where the test reaches the engine without culvert, as DOCKER_HOST.
	host() string
	stopEngine(t *testing.T)
	killEngine(t *testing.T) // SIGKILL; its containers run on without it
	startEngine(t *testing.T)
	// unplug ends the VM as culvert sees it, at once. After the next boot the
	// containers with a restart policy run, of those that were there at settle.
	unplug(t *testing.T)
	settle(t *testing.T)
}

// What the host ports from a bed's base on are for. The engine picks from a range
// of its own where it is asked to pick, as it else would not know what is free on
// the host (FB-071).
const (
	containerPorts = 250 // for the tests to name
	enginePorts    = 40  // for the engine to pick
	hostPorts      = containerPorts + enginePorts + 1
)

// A tapEngine is Debian's dockerd in a network namespace into which the daemon
// puts a tap.
//
//	host ── daemon ══ tap's file side │ cengPID 10.0.2.2/24 ── dockerd, docker0 ── containers
//	                                  │ a namespace of the test's own
type tapEngine struct {
	ns     *datapathtest.NetNS
	ifname string
	docker *guesttest.Dockerd
	spare  net.Listener // at spareEndpoint, for engines that a test makes up
	first  int
}

const spareEndpoint = "tcp://10.0.2.2:2376"

func newTapEngine(t *testing.T) *tapEngine {
	t.Helper()
	_, err := exec.LookPath("ip")
	datapathtest.Require(t, "netns", err == nil, "apt-get install iproute2, or contrib/install-deps.sh test")
	datapathtest.Require(t, "netns", os.Geteuid() == 0, "run as root")
	_, err = os.Stat("/dev/net/tun")
	datapathtest.Require(t, "tun", err == nil, "modprobe tun")
	_, err = exec.LookPath("dockerd")
	datapathtest.Require(t, "dockerd", err == nil, "apt-get install docker.io, or contrib/install-deps.sh test")
	image := filepath.Join(t.TempDir(), "image.tar")
	out, err := exec.Command("../../contrib/engine/image.sh", image).CombinedOutput()
	require.NoError(t, err, "%s", out)

	// All that enters the namespace does so now, before there is a daemon: a thread
	// that was inside ends, and what it had started before with Pdeathsig would end
	// with it.
	b := &tapEngine{ns: datapathtest.NewNetNS(t), ifname: fmt.Sprintf("ceng%d", os.Getpid()), first: freePorts(t, hostPorts)} // 4 + 7 of 15 bytes
	require.NoError(t, b.ns.Do(func() (err error) {
		picks := fmt.Sprint(b.first+containerPorts, b.first+containerPorts+enginePorts-1)
		err = os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(picks), 0o644)
		if err != nil {
			return err
		}
		b.spare, err = net.Listen("tcp", "0.0.0.0:2376")
		return err
	}))
	t.Cleanup(func() { _ = b.spare.Close() })
	b.docker = guesttest.NewDockerd(t, guesttest.DockerdOptions{NS: b.ns, TCP: "0.0.0.0:2375"})
	b.docker.Docker("import", "--change", "ENV PATH=/bin", "--change", `CMD ["guestd"]`, image, "guestd")
	return b
}

func (b *tapEngine) spec() string { return "tap:" + b.ifname + ",netns=" + b.ns.Path() }
func (b *tapEngine) slow() int    { return 1 }
func (b *tapEngine) base() int    { return b.first }
func (b *tapEngine) host() string { return b.docker.Endpoint() }

func (b *tapEngine) ip(args ...string) error {
	out, err := exec.Command("nsenter", append([]string{"--net=" + b.ns.Path(), "ip"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// boot sets the interface up, once the daemon has put it there.
func (b *tapEngine) boot(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return b.ip("link", "show", b.ifname) == nil },
		20*time.Second, 20*time.Millisecond, "the daemon puts no %s into the namespace", b.ifname)
	require.NoError(t, b.ip("addr", "add", nodePrefix, "dev", b.ifname))
	require.NoError(t, b.ip("link", "set", b.ifname, "up"))
	require.NoError(t, b.ip("route", "add", "default", "via", gateway))
}

func (b *tapEngine) kill(*testing.T)        {} // the test's end does
func (b *tapEngine) stopEngine(*testing.T)  { b.docker.Stop() }
func (b *tapEngine) killEngine(*testing.T)  { b.docker.Kill() }
func (b *tapEngine) startEngine(*testing.T) { b.docker.Start() }
func (b *tapEngine) settle(*testing.T)      {}
func (b *tapEngine) unplug(t *testing.T)    { require.NoError(t, b.ip("link", "del", b.ifname)) }

// A vmEngine is dockerd in the VM of contrib/engine. Its QEMU listens, so that the
// daemon may go and return.
//
//	daemon ══ stream ── eth0 10.0.2.2/24 │
//	test ── QEMU's user network ── eth1  │ dockerd, docker0 ── containers
type vmEngine struct {
	*qemuBed
	first int
	port  int // of the test's way to the engine
}

// engineDir is the VM's directory, made before the tests begin: it takes minutes.
var engineDir = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("../../contrib/engine/build.sh", "-n").Output()
	if exit, ok := err.(*exec.ExitError); ok {
		return "", fmt.Errorf("build.sh: %s", exit.Stderr)
	}
	return strings.TrimSpace(string(out)), err
})

func newVMEngine(t *testing.T) *vmEngine {
	t.Helper()
	dir, err := engineDir()
	datapathtest.Require(t, "engine", err == nil, fmt.Sprint(err))
	_, err = exec.LookPath("docker")
	datapathtest.Require(t, "dockerd", err == nil, "apt-get install docker.io, or contrib/install-deps.sh test")
	tmp := shortTempDir(t)
	sock, disk := filepath.Join(tmp, "vm.sock"), filepath.Join(tmp, "disk.img")
	b := newNetdev(t, "qemu:unix:"+sock+",dial", "stream,server=on,addr.type=unix,addr.path="+sock)
	out, err := exec.Command("cp", "--sparse=always", filepath.Join(dir, "disk.img"), disk).CombinedOutput()
	require.NoError(t, err, "%s", out)
	// The copy has no name, so that not even a test that is killed leaves it behind.
	f, err := os.OpenFile(disk, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	require.NoError(t, os.Remove(disk))
	disk = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
	first := freePorts(t, hostPorts)
	picks, port := first+containerPorts, first+hostPorts-1
	b.boots, b.dir = "engine/boot.sh", dir
	b.env = []string{"ENGINE_DISK=" + disk, fmt.Sprintf("ENGINE_APPEND=engine.ports=%d-%d", picks, port-1)}
	b.nic = append(b.nic, "-netdev", fmt.Sprintf("user,id=n1,net=10.0.3.0/24,restrict=on,hostfwd=tcp:127.0.0.1:%d-10.0.3.15:2375", port))
	return &vmEngine{qemuBed: b, first: first, port: port}
}

func (b *vmEngine) base() int    { return b.first }
func (b *vmEngine) host() string { return fmt.Sprintf("tcp://127.0.0.1:%d", b.port) }

func (b *vmEngine) stopEngine(t *testing.T)  { b.sh(t, "kill $dockerd; wait $dockerd; true") }
func (b *vmEngine) killEngine(t *testing.T)  { b.sh(t, "kill -9 $dockerd; wait $dockerd; true") }
func (b *vmEngine) startEngine(t *testing.T) { b.sh(t, "engine") }

// settle has the guest write what it knows to its disk.
func (b *vmEngine) settle(t *testing.T) { b.sh(t, "sync") }
func (b *vmEngine) unplug(t *testing.T) { b.kill(t) }

// docker runs the command with the bed's engine, which has to succeed, and
// returns what it prints.
func (e *containersEnv) docker(t *testing.T, args ...string) string {
	t.Helper()
	out, err := e.tryDocker(args...)
	require.NoError(t, err)
	return out
}

// dockerMeanwhile is docker for what happens before the command has ended.
func (e *containersEnv) dockerMeanwhile(args ...string) <-chan error {
	ended := make(chan error, 1)
	go func() {
		_, err := e.tryDocker(args...)
		ended <- err
	}()
	return ended
}

func (e *containersEnv) tryDocker(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", append([]string{"--host", e.host()}, args...)...)
	cmd.Env = append(os.Environ(), "DOCKER_CONFIG="+e.dockerConfig)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// engineEvents are what the engine has said of its containers, with the times at
// which the test heard it.
type engineEvents struct {
	mu    sync.Mutex
	heard []engineEvent
	body  interface{ Close() error }
	ended chan struct{}
}

type engineEvent struct {
	Action string
	Actor  struct{ ID string }
	at     time.Time
}

// engineClient is a client of the test's own way to the engine.
func (e *containersEnv) engineClient() *http.Client {
	network, addr, _ := strings.Cut(e.host(), "://")
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		},
	}}
}

// watch follows the engine's events, at most until life ends.
func (e *containersEnv) watch(t, life *testing.T) *engineEvents {
	t.Helper()
	resp, err := e.engineClient().Get("http://engine/v1.41/events?filters=" + url.QueryEscape(`{"type":["container"]}`))
	require.NoError(t, err)
	w := &engineEvents{body: resp.Body, ended: make(chan struct{})}
	go func() {
		defer close(w.ended)
		for dec := json.NewDecoder(resp.Body); ; {
			var ev engineEvent
			if dec.Decode(&ev) != nil {
				return
			}
			ev.at = time.Now()
			w.mu.Lock()
			w.heard = append(w.heard, ev)
			w.mu.Unlock()
		}
	}()
	life.Cleanup(w.stop)
	return w
}

func (w *engineEvents) stop() {
	_ = w.body.Close()
	<-w.ended
}

// at waits for the last event of a kind about a container, and returns when it was
// heard.
func (w *engineEvents) at(t *testing.T, action, id string) (at time.Time) {
	t.Helper()
	require.Eventually(t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, ev := range w.heard {
			if ev.Action == action && ev.Actor.ID == id {
				at = ev.at
			}
		}
		return !at.IsZero()
	}, time.Minute, 5*time.Millisecond, "the engine says nothing of %s's %s", id, action)
	return at
}
