package guesttest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"golang.org/x/sys/unix"
)

// The bed:
//
//	the test's process ── stdin ──► init: sh, pid 1 of its own pid and mount namespaces,
//	                                 │    in the guest's network namespace
//	    nsenter ── dockerd ──────────┤ containerd, shims, containers
//
// Whatever the engine starts, detaches or orphans is in init's pid namespace and
// dies with it; whatever it mounts is in init's mount namespace. init ends when
// its standard input does, so also when the test's process is killed. What else
// dockerd makes, bridges, rules and veths, is in the network namespace; its
// cgroups are below one of the bed's own.

// Image is the only image that a Dockerd has: static busybox, with a link for
// each of the usual commands ("sh", "httpd", "nc", "sleep", "echo", "cat").
const Image = "busybox"

var commands = []string{"sh", "httpd", "nc", "sleep", "echo", "cat", "ip", "kill", "true", "false", "tail", "dd"}

// needed are the programs of a Dockerd; Debian's packages are docker.io (with
// containerd and runc), docker.io or docker-cli, util-linux, iptables and
// busybox-static.
var needed = []string{"dockerd", "containerd", "runc", "docker", "nsenter", "iptables", "busybox"}

// DockerdOptions say where an engine runs. The zero value is an engine by
// itself.
type DockerdOptions struct {
	// NS is the guest's network namespace; a new one if nil.
	NS *datapathtest.NetNS
	// TCP is a further address to listen at, in NS: "10.0.2.2:2375". It is there
	// from the first Start on, so the address must be.
	TCP string
	// Args are further arguments for dockerd.
	Args []string
}

// A Dockerd is a real Docker engine that runs in a network namespace, with
// Image, userland-proxy off, and live-restore off as is the default. Its methods
// are called from the test's goroutine; they fail the test.
type Dockerd struct {
	tb     testing.TB
	o      DockerdOptions
	dir    string
	cgroup string
	init   *exec.Cmd
	alive  io.Closer // init's standard input
	daemon *exec.Cmd // nsenter, dockerd's parent; nil while there is none
}

var beds atomic.Int32

// NewDockerd starts an engine, and returns when it answers. The test's end ends
// it, its containers, and all else that it left. Without root or one of the
// programs the test is skipped (Require "dockerd").
func NewDockerd(tb testing.TB, o DockerdOptions) *Dockerd {
	tb.Helper()
	datapathtest.Require(tb, "dockerd", os.Geteuid() == 0, "run as root")
	for _, p := range needed {
		_, err := exec.LookPath(p)
		datapathtest.Require(tb, "dockerd", err == nil,
			p+" is not installed; apt-get install docker.io iptables util-linux busybox-static")
	}
	if o.NS == nil {
		o.NS = datapathtest.NewNetNS(tb)
	}
	// Not tb.TempDir: a socket's path has at most 107 bytes, and a test's name may
	// be long.
	dir, err := os.MkdirTemp("", "dockerd")
	if err != nil {
		tb.Fatalf("make dockerd's directory: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "daemon.json"), []byte("{}"), 0o600); err != nil {
		tb.Fatalf("write dockerd's configuration: %v", err)
	}
	d := &Dockerd{tb: tb, o: o, dir: dir, cgroup: fmt.Sprintf("culvert-test-%d-%d", os.Getpid(), beds.Add(1))}
	tb.Cleanup(d.remove)
	d.startInit()
	d.Start()
	d.importImage()
	return d
}

// startInit starts the first process of the bed's namespaces. Its mounts are
// private, and its /proc shows its own processes.
func (d *Dockerd) startInit() {
	d.tb.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		d.tb.Fatalf("find busybox: %v", err)
	}
	// wait reaps the orphans that are handed to pid 1, until cat ends.
	d.init = exec.Command(busybox, "sh", "-c",
		`exec 3<&0; mount -t proc proc /proc || exit 1; echo ready; cat <&3 >/dev/null & wait $!`)
	d.init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Unshareflags: unix.CLONE_NEWNS}
	d.init.Stderr = os.Stderr
	in, err := d.init.StdinPipe()
	if err != nil {
		d.tb.Fatalf("start the bed's init: %v", err)
	}
	out, err := d.init.StdoutPipe()
	if err != nil {
		d.tb.Fatalf("start the bed's init: %v", err)
	}
	if err := d.o.NS.Do(d.init.Start); err != nil {
		d.init = nil
		d.tb.Fatalf("start the bed's init: %v", err)
	}
	d.alive = in
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		d.tb.Fatalf("wait for the bed's init: %v", err)
	}
}

// inside is a command in the bed's namespaces.
func (d *Dockerd) inside(name string, args ...string) *exec.Cmd {
	target := fmt.Sprint(d.init.Process.Pid)
	return exec.Command("nsenter", append([]string{"--target", target, "--mount", "--pid", "--net", "--", name}, args...)...)
}

// Start starts dockerd, and returns when it answers. Containers with a restart policy come back by
// themselves.
func (d *Dockerd) Start() {
	d.tb.Helper()
	log, err := os.OpenFile(d.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.tb.Fatalf("open dockerd's log: %v", err)
	}
	defer func() { _ = log.Close() }()
	args := []string{
		"--data-root", d.path("data"), "--exec-root", d.path("exec"), "--pidfile", d.path("pid"),
		"--host", "unix://" + d.Socket(), "--cgroup-parent", "/" + d.cgroup,
		"--exec-opt", "native.cgroupdriver=cgroupfs", "--userland-proxy=false",
		"--config-file", d.path("daemon.json"), // not the machine's
	}
	if d.o.TCP != "" {
		args = append(args, "--host", "tcp://"+d.o.TCP, "--tls=false")
	}
	d.daemon = d.inside("dockerd", append(args, d.o.Args...)...)
	d.daemon.Stdout, d.daemon.Stderr = log, log
	if err := d.daemon.Start(); err != nil {
		d.daemon = nil
		d.tb.Fatalf("start dockerd: %v", err)
	}
	deadline := time.Now().Add(time.Minute)
	for {
		_, err := d.TryDocker("version")
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			d.tb.Fatalf("dockerd does not answer: %v", err)
		}
		time.Sleep(50 * time.Millisecond) // it says when it is ready to systemd only
	}
}

// Stop ends dockerd as systemd does, by SIGTERM: containers are stopped first.
// It returns when dockerd has ended.
func (d *Dockerd) Stop() {
	d.tb.Helper()
	d.signal("TERM")
}

// Kill ends dockerd by SIGKILL. Its containers, and the rules that publish their
// ports, stay until the next Start ends them.
func (d *Dockerd) Kill() {
	d.tb.Helper()
	d.signal("KILL")
}

// Restart is Stop and Start.
func (d *Dockerd) Restart() {
	d.tb.Helper()
	d.Stop()
	d.Start()
}

func (d *Dockerd) signal(name string) {
	d.tb.Helper()
	if d.daemon == nil {
		d.tb.Fatalf("dockerd does not run")
	}
	pid, err := os.ReadFile(d.path("pid")) // as its own namespace counts
	if err != nil {
		d.tb.Fatalf("read dockerd's pid: %v", err)
	}
	if out, err := d.inside("busybox", "kill", "-"+name, strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
		d.tb.Fatalf("send SIG%s to dockerd: %v: %s", name, err, out)
	}
	_ = d.daemon.Wait() // it was ended: an error is to be expected
	d.daemon = nil
}

// Socket returns the path of its unix socket, on the test's side of the
// namespaces too.
func (d *Dockerd) Socket() string { return d.path("docker.sock") }

// Endpoint returns that socket as package docker takes it.
func (d *Dockerd) Endpoint() string { return "unix://" + d.Socket() }

// Docker runs the docker command with this engine and returns what it printed,
// trimmed: Docker("run", "-d", "-p", "8080:80", guesttest.Image, "httpd", "-f")
// returns the container's ID. Image's commands ignore SIGTERM as pid 1 of a
// container: "--stop-timeout", "1" spares 10 s where one is stopped.
func (d *Dockerd) Docker(args ...string) string {
	d.tb.Helper()
	out, err := d.TryDocker(args...)
	if err != nil {
		d.tb.Fatal(err)
	}
	return out
}

// TryDocker is Docker for a command that may fail; the error has what it said.
func (d *Dockerd) TryDocker(args ...string) (string, error) {
	return d.docker(nil, args...)
}

func (d *Dockerd) docker(stdin io.Reader, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", append([]string{"--host", d.Endpoint()}, args...)...)
	cmd.Env = append(os.Environ(), "DOCKER_CONFIG="+d.dir) // not the user's
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSpace(stdout.String()), nil
}

func (d *Dockerd) path(name string) string { return filepath.Join(d.dir, name) }

// importImage makes Image of the machine's own busybox.
func (d *Dockerd) importImage() {
	d.tb.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		d.tb.Fatalf("find busybox: %v", err)
	}
	binary, err := os.ReadFile(path)
	if err != nil {
		d.tb.Fatalf("read busybox: %v", err)
	}
	var image bytes.Buffer
	w := tar.NewWriter(&image)
	err = w.WriteHeader(&tar.Header{Name: "bin/busybox", Mode: 0o755, Size: int64(len(binary))})
	if err == nil {
		_, err = w.Write(binary)
	}
	for _, c := range commands {
		if err == nil {
			err = w.WriteHeader(&tar.Header{Name: "bin/" + c, Typeflag: tar.TypeSymlink, Linkname: "busybox"})
		}
	}
	if err = errors.Join(err, w.Close()); err != nil {
		d.tb.Fatalf("make the image: %v", err)
	}
	if _, err := d.docker(&image, "import", "-", Image); err != nil {
		d.tb.Fatal(err)
	}
}

// remove ends everything and takes away what is left: the engine's directory and
// its cgroups.
func (d *Dockerd) remove() {
	if d.tb.Failed() {
		if log, err := os.ReadFile(d.path("log")); err == nil {
			d.tb.Logf("the end of dockerd's log:\n%s", log[max(0, len(log)-8<<10):])
		}
	}
	if d.init != nil {
		_ = d.init.Process.Kill() // and with it, all of its namespace
		_ = d.init.Wait()         // after the last of them
		_ = d.alive.Close()
	}
	if d.daemon != nil {
		_ = d.daemon.Wait()
	}
	if err := os.RemoveAll(d.dir); err != nil {
		d.tb.Errorf("remove dockerd's directory: %v", err)
	}
	// cgroup v2 has one hierarchy, v1 several; rmdir(2) takes a group without
	// processes, its files and all.
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		groups, _ := filepath.Glob(pattern + d.cgroup) // the pattern is a good one
		for _, g := range groups {
			if err := removeGroup(g); err != nil {
				d.tb.Errorf("remove dockerd's cgroup: %v", err)
			}
		}
	}
}

// removeGroup removes a cgroup and those below it. The kernel may need a moment
// to see that a process that was waited for has left its group.
func removeGroup(root string) error {
	var groups []string
	err := filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			groups = append(groups, path)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, g := range slices.Backward(groups) {
		for try := 0; ; try++ {
			err := unix.Rmdir(g)
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			if !errors.Is(err, unix.EBUSY) || try == 100 {
				return fmt.Errorf("%s: %w", g, err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	return nil
}
