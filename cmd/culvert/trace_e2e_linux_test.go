package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// traceInto runs `culvert trace -w` while what runs, and until the file holds last,
// and returns what it said.
func traceInto(t *testing.T, d *testDaemon, file, last string, what func()) (stderr string) {
	t.Helper()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var out, errs bytes.Buffer
	code := -1
	var tracing sync.WaitGroup
	tracing.Go(func() { code = run(ctx, nil, []string{"--api", d.socket, "trace", "-w", file}, &out, &errs) })
	holds := func(text string) func() bool {
		return func() bool {
			b, err := os.ReadFile(file)
			return err == nil && bytes.Contains(b, []byte(text))
		}
	}
	require.Eventually(t, holds("vm1/q0"), 20*time.Second, time.Millisecond, "the trace has begun")
	what()
	assert.Eventually(t, holds(last), 20*time.Second, 10*time.Millisecond)
	interrupt()
	tracing.Wait()
	assert.Zero(t, code, errs.String())
	assert.Empty(t, out.String())
	return errs.String()
}

// echoed sends n bytes to an echo server and reads them back.
func echoed(t *testing.T, network, addr string, n int) {
	t.Helper()
	echoedBytes(t, network, addr, make([]byte, n))
}

func echoedBytes(t *testing.T, network, addr string, b []byte) {
	t.Helper()
	c, err := net.Dial(network, addr)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() { _, _ = c.Write(b) })
	_, err = io.ReadFull(c, make([]byte, len(b)))
	require.NoError(t, err)
}

// TestTrace: a whole daemon's traffic over a link with offloads, TCP and UDP, into
// a file that tshark finds nothing wrong with: no bad checksum, each frame with
// its direction and its flow's owner (C-50).
func TestTrace(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	datapathtest.Require(t, "tshark", err == nil, "apt-get install tshark")
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['127.0.0.1:0:7', '127.0.0.1:0:7/udp']}]")
	d.attachEcho(t)
	_, errs, code := cli(t, "--api", d.socket, "wait", "--timeout", "20s")
	require.Zero(t, code, errs)
	rows := d.rows(t)
	file := filepath.Join(t.TempDir(), "vm1.pcapng")
	errs = traceInto(t, d, file, "this is the end", func() {
		echoed(t, "tcp", rows[0].Bound[0], 4<<20)
		for _, n := range []int{1, 1472, 1473, 20000} {
			echoed(t, "udp", rows[1].Bound[0], n)
		}
		echoedBytes(t, "udp", rows[1].Bound[0], []byte("this is the end"))
	})
	assert.Contains(t, errs, " 0 lost")

	cmd := exec.Command(tshark, "-n", "-r", file, "-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE",
		"-o", "ip.defragment:TRUE", "-T", "fields", "-E", "separator=|", "-e", "frame.interface_name", "-e", "frame.packet_flags_direction", "-e", "ip.proto",
		"-e", "tcp.checksum.status", "-e", "udp.checksum.status", "-e", "ip.checksum.status", "-e", "_ws.malformed", "-e", "frame.len", "-e", "frame.comment")
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	require.NoError(t, err, complaints.String())
	for line := range strings.Lines(complaints.String()) {
		assert.Contains(t, line, "Running as user")
	}
	directions, protocols, longest, owned := map[string]int{}, map[string]int{}, 0, 0
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSpace(line), "|")
		assert.Equal(t, "vm1/q0", f[0])
		directions[f[1]]++
		protocols[f[2]]++
		assert.NotContains(t, f[3]+f[4]+f[5], "0", "a checksum is bad: %s", line)
		assert.Empty(t, f[6])
		n := 0
		_, _ = fmt.Sscan(f[7], &n)
		longest = max(longest, n)
		if strings.Contains(f[8], "owner config 127.0.0.1:0:7") {
			owned++
		} else {
			assert.NotEqual(t, "6", f[2], line)
		}
	}
	assert.Len(t, directions, 2, "%v", directions)
	assert.Greater(t, protocols["6"], 20)
	assert.Greater(t, protocols["17"], 6)
	assert.Greater(t, longest, 20000, "super-frames are whole")
	assert.Greater(t, owned, 30)
}

// TestTraceLines: a filter, a count, and what a person sees of drops.
func TestTraceLines(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['127.0.0.1:0:7']}]")
	d.attachEcho(t)
	_, errs, code := cli(t, "--api", d.socket, "wait", "--timeout", "20s")
	require.Zero(t, code, errs)
	at := d.rows(t)[0].Bound[0]
	_, errs, code = cli(t, "--api", d.socket, "trace", "--vm", "vm2")
	assert.Equal(t, 1, code)
	assert.Contains(t, errs, `there is no VM named "vm2"`)

	ctx, cancel := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	asking.Go(func() {
		for ctx.Err() == nil {
			echoed(t, "tcp", at, 1000)
		}
	})
	out, errs, code := cli(t, "--api", d.socket, "trace", "--vm", "vm1", "-c", "3", "-f", "tcp dst port 7 and greater 1000")
	piped, pipedErrs, pipedCode := cli(t, "--api", d.socket, "trace", "-w", "-", "-c", "2", "-s", "60")
	cancel()
	asking.Wait()
	assert.Zero(t, pipedCode, pipedErrs)
	assert.Contains(t, pipedErrs, "2 frames, 0 lost")
	r := trace.NewBlockReader(strings.NewReader(piped))
	for packets := 0; packets < 2; {
		b, err := r.Next()
		require.NoError(t, err)
		if p, err := b.Packet(); err == nil {
			packets++
			assert.LessOrEqual(t, len(p.Data), 60)
		}
	}
	assert.Zero(t, code, errs)
	assert.Contains(t, errs, "3 frames, 0 lost")
	assert.Equal(t, 3, strings.Count(out, "\n"), out)
	for line := range strings.Lines(out) {
		assert.Regexp(t, `^\d\d:\d\d:\d\d\.\d{6} vm1/q0 Out IP 10\.0\.2\.1\.\d+ > 10\.0\.2\.2\.7: Flags \[P?\.\], seq \d+:\d+, ack \d+, win \d+, length 1000, owner config 127.0.0.1:0:7/tcp`, line)
	}
}

// TestTraceDaemonEnds: a daemon that ends ends its traces in order.
func TestTraceDaemonEnds(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory}]")
	d.attachEcho(t)
	_, errs, code := cli(t, "--api", d.socket, "wait", "--timeout", "20s")
	require.Zero(t, code, errs)
	file := filepath.Join(t.TempDir(), "vm1.pcapng")
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, errs, code = cli(t, "--api", d.socket, "trace", "-w", file)
	}()
	require.Eventually(t, func() bool {
		info, err := os.Stat(file)
		return err == nil && info.Size() > 0
	}, 20*time.Second, time.Millisecond)
	d.stop(t)
	<-done
	assert.Equal(t, 1, code)
	assert.Contains(t, errs, " 0 lost\nculvert: the daemon has ended\n")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	kinds := map[uint32]int{}
	r := trace.NewBlockReader(bytes.NewReader(b))
	for {
		block, err := r.Next()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		kinds[block.Kind]++
	}
	assert.Equal(t, 1, kinds[trace.BlockSection])
	assert.Equal(t, 1, kinds[trace.BlockInterface])
	assert.Equal(t, 1, kinds[trace.BlockStatistics])
}

// TestTraceDrops: a frame that was dropped is shown with the reason.
func TestTraceDrops(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory}]")
	ours, guest := memory.Pair(memory.Options{})
	defer guest.Close()
	d.guests <- ours
	c := api.NewClient(d.socket)
	defer c.Close()
	require.Eventually(t, func() bool {
		vms, err := c.VMs(t.Context())
		return err == nil && vms[0].Queues == 1
	}, 20*time.Second, 5*time.Millisecond)
	frame := append([]byte{2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 7, 0x88, 0xb5}, make([]byte, 46)...)
	ctx, cancel := context.WithCancel(t.Context())
	var sending sync.WaitGroup
	sending.Go(func() { // until it is seen: when the trace begins is not told
		for ctx.Err() == nil {
			_, _ = guest.QueuePairs()[0].WriteBatch([]datapath.Frame{{Segs: [][]byte{frame}, N: len(frame)}})
			runtime.Gosched()
		}
	})
	out, errs, code := cli(t, "--api", d.socket, "trace", "--drops", "-c", "2")
	cancel()
	sending.Wait()
	require.Zero(t, code, errs)
	for line := range strings.Lines(out) {
		assert.Contains(t, line, "vm1/q0 In  02:00:00:00:00:07 > 02:00:00:00:00:09, unknown (0x88b5), length 46, drop unwanted")
	}
}

// TestTraceLast: the flight recorder is read with no daemon there, in lines and
// as pcapng.
func TestTraceLast(t *testing.T) {
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['127.0.0.1:0:7']}]\ntrace: {flightRecorder: 1000}")
	d.attachEcho(t)
	_, errs, code := cli(t, "--api", d.socket, "wait", "--timeout", "20s")
	require.Zero(t, code, errs)
	echoed(t, "tcp", d.rows(t)[0].Bound[0], 100)
	d.stop(t)
	out, errs, code := cli(t, "--api", d.socket, "trace", "--last", "-f", "tcp")
	require.Zero(t, code, errs)
	assert.Contains(t, out, "vm1/q0 Out IP 10.0.2.1.")
	assert.Contains(t, out, "length 100")
	assert.NotContains(t, out, "ARP")
	file := filepath.Join(t.TempDir(), "last.pcapng")
	_, errs, code = cli(t, "--api", d.socket, "trace", "--last", "--vm", "vm1", "-w", file)
	require.Zero(t, code, errs)
	info, err := os.Stat(file)
	require.NoError(t, err)
	assert.Greater(t, info.Size(), int64(500))
	_, _, code = cli(t, "--api", d.socket, "trace", "--last", "--vm", "vm2")
	assert.Equal(t, 3, code)
}
