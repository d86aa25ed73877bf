package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/guesttest"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

// BenchmarkContainers has an engine with 1 000 containers of one port each: from
// the event that has them listed to the last open port, what they cost the
// daemon, a process of its own, in memory above its empty self, and in processor
// time over a comparison's period once nothing happens.
func BenchmarkContainers(b *testing.B) {
	const containers = 1000
	b.Run(fmt.Sprintf("path=culvert/containers=%d", containers), func(b *testing.B) {
		var first, memory, cpu float64
		for b.Loop() {
			f, m, c := followContainers(b, containers)
			first += f
			memory += m
			cpu += c
		}
		b.ReportMetric(first/float64(b.N), "first-ms")
		b.ReportMetric(memory/float64(b.N), "MB")
		b.ReportMetric(cpu/float64(b.N), "cpu-%")
		b.ReportMetric(0, "ns/op")
	})
}

// steadyFor is long enough for one comparison, every 30 s.
const steadyFor = 31 * time.Second

// followContainers returns the time to the last open port, the growth of the
// daemon's resident memory, and its processor time in percent of one core.
func followContainers(b *testing.B, containers int) (firstMS, megabytes, cpuPercent float64) {
	engine := guesttest.NewUnixEngine(b)
	d := startDaemon(b, fmt.Sprintf(", docker: '%s'", engine.Endpoint()))
	d.await(b, "vms", 1, `"reachable": true`)
	time.Sleep(time.Second) // what starting took is given back
	empty := processes{d.pid}.resident(b)

	list := make([]guesttest.FakeContainer, containers)
	for i := range list {
		list[i] = guesttest.Published(i, uint16(20000+i), 80)
	}
	engine.Set(list...)
	start := time.Now()
	engine.Emit("container", "start", list[containers-1].ID)
	d.await(b, "ls", containers, `"state": "forwarded"`)
	firstMS = ms(time.Since(start))

	before := processes{d.pid}.cpu(b)
	time.Sleep(steadyFor)
	cpuPercent = 100 * (processes{d.pid}.cpu(b) - before).Seconds() / steadyFor.Seconds()
	return firstMS, float64(processes{d.pid}.resident(b)-empty) / 1e6, cpuPercent
}

// A daemon is a culvert daemon of its own with one VM, a network namespace.
type daemon struct {
	binary, api string
	pid         int
}

// startDaemon starts one whose VM has more keys in its config, ", key: value".
func startDaemon(b *testing.B, keys string) *daemon {
	b.Helper()
	dir, err := os.MkdirTemp("", "culvert") // t.TempDir's are too long for a socket
	require.NoError(b, err)
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	d := &daemon{binary: filepath.Join(dir, "culvert"), api: filepath.Join(dir, "api")}
	out, err := exec.Command("go", "build", "-o", d.binary, "../cmd/culvert").CombinedOutput()
	require.NoError(b, err, "%s", out)

	guest := datapathtest.NewNetNS(b)
	config := filepath.Join(dir, "culvert.yaml")
	text := fmt.Sprintf("api: %s\nnames: {listen: ''}\nvms: [{attach: 'tap:tap0,netns=%s', node: %s, gateway: %s%s}]\n",
		d.api, guest.Path(), node, gateway, keys)
	require.NoError(b, os.WriteFile(config, []byte(text), 0o600))
	cmd := exec.Command(d.binary, "daemon", "--config", config)
	log, err := cmd.StderrPipe()
	require.NoError(b, err)
	ns := datapathtest.NewNetNS(b) // where every port is free
	require.NoError(b, ns.Do(cmd.Start))
	d.pid = cmd.Process.Pid
	ready := make(chan bool, 2)
	var reading sync.WaitGroup
	reading.Go(func() {
		for lines := bufio.NewScanner(log); lines.Scan(); {
			if strings.Contains(lines.Text(), "msg=ready") {
				ready <- true
			}
		}
		ready <- false // it has ended
	})
	b.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		reading.Wait()
		_ = cmd.Wait()
	})
	require.True(b, <-ready, "the daemon does not start")
	require.Eventually(b, func() bool { // the daemon makes it when it is ready itself
		return guest.Do(func() error { _, err := netlink.LinkByName("tap0"); return err }) == nil
	}, 10*time.Second, 10*time.Millisecond, "no tap0")
	setUp(b, guest, "tap0", node+"/24")
	return d
}

// await waits until a listing of the daemon's has n entries and says what as
// often.
func (d *daemon) await(b *testing.B, command string, n int, what string) {
	b.Helper()
	require.Eventually(b, func() bool {
		out, err := exec.Command(d.binary, "--api", d.api, command, "-o", "json").Output()
		var list []any
		return err == nil && json.Unmarshal(out, &list) == nil && len(list) == n && bytes.Count(out, []byte(what)) == n
	}, time.Minute, 20*time.Millisecond, "%s never has %d × %s", command, n, what)
}
