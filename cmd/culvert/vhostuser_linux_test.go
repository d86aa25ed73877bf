package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/datapath/virtqueue"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// startFrontend starts a VMM with a guest that echoes on port 7, and returns when
// it does.
func startFrontend(t *testing.T, socket string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), frontendSocket+"="+socket)
	cmd.Stderr = t.Output()
	_, err = cmd.StdinPipe() // it ends when we do
	require.NoError(t, err)
	says, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { kill(cmd) })
	line, err := bufio.NewReader(says).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "listening\n", line)
	return cmd
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // killed
}

// awaitVM waits until the VM is in the state, in that life or a later one.
func (d *testDaemon) awaitVM(t *testing.T, name, state string, generation uint64) (vm api.VM) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		var vms []api.VM
		require.NoError(t, json.Unmarshal([]byte(d.cli(t, "vms", "-o", "json")), &vms))
		for _, vm = range vms {
			if vm.Name == name && vm.State == state && vm.Generation >= generation {
				return vm
			}
		}
		require.True(t, time.Now().Before(deadline), "%s is not %s: %+v", name, state, vms)
	}
}

// usage is what this process, and so the daemon in it, holds.
type usage struct{ fds, goroutines, mappings int }

func measure(t *testing.T) (u usage) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return usage{len(fds), runtime.NumGoroutine(), strings.Count(string(maps), "/memfd:guest")}
}

// A load is flows that carry data both ways until they end.
type load struct {
	moved chan struct{} // each flow, when it has moved something
	ends  chan error    // each flow's: what its reader and its writer were told
}

func startLoad(t *testing.T, addr string, flows int) *load {
	t.Helper()
	l := &load{moved: make(chan struct{}, flows), ends: make(chan error, flows)}
	for range flows {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
		// The kernel tells of a reset once: whichever asks first.
		written := make(chan error, 1)
		go func() {
			block := make([]byte, 32<<10)
			for {
				if _, err := c.Write(block); err != nil {
					written <- err
					return
				}
			}
		}()
		go func() {
			block, got := make([]byte, 32<<10), 0
			for {
				n, err := c.Read(block)
				if got < 1<<17 && got+n >= 1<<17 {
					l.moved <- struct{}{}
				}
				got += n
				if err != nil {
					l.ends <- errors.Join(err, <-written)
					_ = c.Close()
					return
				}
			}
		}()
	}
	for range flows {
		select {
		case <-l.moved:
		case err := <-l.ends:
			require.NoError(t, err, "a flow ends before its guest")
		}
	}
	return l
}

// TestFrontendKilled: a VMM that is killed under load, and another one in its
// place, a hundred times. Each time the flows are reset and the ports come back;
// nothing piles up.
func TestFrontendKilled(t *testing.T) {
	times := 100
	if testing.Short() {
		times = 5
	}
	socket := filepath.Join(tempDir(t), "vm.sock")
	d := startDaemon(t, fmt.Sprintf("vms: [{name: vm1, attach: 'vhost-user:%s', publish: ['0:7']}]", socket))
	var bound []string
	var idle, live usage
	mapped := measure(t).mappings // by front-ends of tests before, which played in this process
	endpoints := 0
	for i := range times {
		vmm := startFrontend(t, socket)
		vm := d.awaitVM(t, "vm1", "ready", uint64(i+1))
		rows := d.rows(t)
		require.Equal(t, "forwarded", rows[0].State)
		if i == 0 {
			bound, live, endpoints = rows[0].Bound, measure(t), vm.Endpoints
		}
		require.Equal(t, bound, rows[0].Bound, "the same host ports")
		require.LessOrEqual(t, vm.Endpoints, endpoints)
		l := startLoad(t, bound[i%len(bound)], 8)
		kill(vmm)
		for range cap(l.ends) {
			require.ErrorIs(t, <-l.ends, syscall.ECONNRESET)
		}
		if i > 0 && i%2 == 0 && i < times-1 {
			continue // the next one comes before the daemon has noticed, or while it does
		}
		d.awaitVM(t, "vm1", "gone", uint64(i+1))
		require.Equal(t, "pending", d.rows(t)[0].State)
		portsFree(t, bound)
		if i == 0 {
			idle = settled(t, usage{})
		}
	}
	end := settled(t, idle)
	t.Logf("live %+v; without a VM at first %+v, in the end %+v", live, idle, end)
	assert.LessOrEqual(t, end.fds, idle.fds, "descriptors")
	assert.LessOrEqual(t, end.goroutines, idle.goroutines, "goroutines")
	assert.LessOrEqual(t, end.mappings, mapped, "guest memory that is still mapped")
}

// settled measures until there is no more than want, or it has been waited for
// long enough.
func settled(t *testing.T, want usage) (u usage) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if u = measure(t); u.fds <= want.fds && u.goroutines <= want.goroutines {
			break
		}
	}
	return u
}

// startTwo starts a daemon with two VMs: one is there and good, with a flow; the
// other, at the socket, is the test's.
func startTwo(t *testing.T) (d *testDaemon, bad string, c net.Conn) {
	t.Helper()
	dir := tempDir(t)
	bad, good := filepath.Join(dir, "bad.sock"), filepath.Join(dir, "good.sock")
	d = startDaemon(t, fmt.Sprintf("vms: [{name: bad, attach: 'vhost-user:%s', publish: ['0:7']}, {name: good, attach: 'vhost-user:%s', publish: ['0:7']}]", bad, good))
	startFrontend(t, good)
	d.awaitVM(t, "good", "ready", 1)
	return d, bad, d.flow(t, "good")
}

// flow connects to a VM's first publish.
func (d *testDaemon) flow(t *testing.T, vm string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", d.rows(t, "--vm", vm)[0].Bound[0])
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(2*time.Minute)))
	return c
}

func mustEcho(t *testing.T, c net.Conn, s string) {
	t.Helper()
	_, err := io.WriteString(c, s)
	require.NoError(t, err)
	got := make([]byte, len(s))
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, s, string(got))
}

// TestBadFrontend: what speaks wrongly is cut off with one line of the log that
// says which message and why; the other VM's flow does not notice, and the next
// front-end that speaks rightly is served.
func TestBadFrontend(t *testing.T) {
	d, bad, c := startTwo(t)
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	fd := int(null.Fd())
	for name, test := range map[string]struct {
		speak func(f *frontend) error
		want  string
	}{
		"another version": {func(f *frontend) error { _, err := f.conn.Write(make([]byte, 12)); return err }, "not a message of version 1"},
		"a wrong size":    {func(f *frontend) error { return f.tell(setFeatures, make([]byte, 7)) }, "SET_FEATURES"},
		"no descriptor":   {func(f *frontend) error { return f.tell(setMemTable, u64s(1, 0, 4096, frontendBase, 0)) }, "SET_MEM_TABLE"},
		"too many":        {func(f *frontend) error { return f.tell(setOwner, nil, fd, fd, fd, fd, fd, fd, fd, fd, fd) }, "more than 8"},
		"unknown":         {func(f *frontend) error { return f.tell(4711, nil) }, "request 4711"},
		"no memory":       {func(f *frontend) error { return f.tell(setMemTable, u64s(1, 0, 4096, frontendBase, 0), fd) }, "SET_MEM_TABLE"},
		"memory not shared": {func(f *frontend) error {
			return errors.Join(f.tell(setVringNum, u64s(ringSize<<32)), f.tell(setVringAddr, u64s(0, 1<<40, 1<<41, 1<<42, 0)),
				f.tell(setVringKick, u64s(1<<8))) // no descriptor: polled
		}, "SET_VRING_KICK"},
		"out of order": {func(f *frontend) error { return f.tell(setVringKick, u64s(1<<8)) }, "SET_VRING_KICK"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: bad})
			require.NoError(t, err)
			defer conn.Close()
			f := &frontend{conn: conn}
			_ = test.speak(f) // it may be cut off in the middle
			require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
			_, err = conn.Read(make([]byte, 1))
			require.Error(t, err)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
			d.logs(t, test.want)
			mustEcho(t, c, name)
		})
	}
	startFrontend(t, bad)
	d.awaitVM(t, "bad", "ready", 1)
	mustEcho(t, d.flow(t, "bad"), "as it should be")
	mustEcho(t, c, "all along")
}

// TestHostileDriver: what a guest's driver does to its rings is counted, or ends
// that VM's attachment; the other VM's flow does not notice, and the next driver
// that behaves is served.
func TestHostileDriver(t *testing.T) {
	d, bad, c := startTwo(t)
	type hostility struct {
		ends, counted bool
		do            func(f *frontend)
	}
	all := map[string]hostility{
		"moved while it runs": {true, false, func(f *frontend) {
			f.tx.Move()
			f.tx.KickStorm(1)
		}},
		"memory cut short": {true, false, func(f *frontend) {
			_ = unix.Ftruncate(f.memfd, 0)
			f.tx.KickStorm(1)
		}},
		"kick storm":  {false, false, func(f *frontend) { f.tx.KickStorm(10_000); f.rx.KickStorm(10_000) }},
		"never kicks": {false, false, func(f *frontend) { f.tx.Kick = nil; _ = f.tx.Add(virtio.NetHdr{}, make([]byte, 60)); f.tx.Publish() }},
	}
	for _, a := range datapathtest.Attacks(virtqueue.Features{EventIdx: true, Indirect: true}) {
		ends := errors.Is(a.Want, virtqueue.ErrCorrupt)
		all[a.Name] = hostility{ends, !ends, func(f *frontend) { a.Run(f.tx.Driver) }}
	}
	life := uint64(0)
	for name, h := range all {
		t.Run(name, func(t *testing.T) {
			life++
			f, err := dialFrontend(bad)
			require.NoError(t, err)
			defer f.Close()
			d.awaitVM(t, "bad", "stalled", life) // there is no guest to answer
			h.do(f)
			if h.ends {
				d.awaitVM(t, "bad", "gone", life)
			}
			for h.counted {
				drops := d.awaitVM(t, "bad", "stalled", life).Drops
				h.counted = drops["rejected"]+drops["too-short"] == 0
			}
			mustEcho(t, c, name)
			_ = f.Close()
			d.awaitVM(t, "bad", "gone", life)
		})
	}
	startFrontend(t, bad)
	d.awaitVM(t, "bad", "ready", life+1)
	mustEcho(t, d.flow(t, "bad"), "as it should be")
	mustEcho(t, c, "all along")
}
