package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/require"
)

// seconds is how long one iperf3 run lasts.
const seconds = 3

// startIn starts cmd in ns, or where this process is without one.
func startIn(ns *datapathtest.NetNS, cmd *exec.Cmd) error {
	if ns == nil {
		return cmd.Start()
	}
	return ns.Do(cmd.Start)
}

// startIperf starts an iperf3 server in ns and waits until it listens. It takes
// one test after the other until the benchmark ends.
func startIperf(b *testing.B, ns *datapathtest.NetNS, addr string, port int) {
	b.Helper()
	path, err := exec.LookPath("iperf3")
	datapathtest.Require(b, "iperf3", err == nil, "apt-get install iperf3")
	cmd := exec.Command(path, "--server", "--bind", addr, "--port", strconv.Itoa(port))
	require.NoError(b, startIn(ns, cmd))
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	time.Sleep(200 * time.Millisecond) // iperf3 says nothing when it is ready
}

// iperf runs one iperf3 client and returns what the receiving side counted, in
// Gbit/s: all flows together, and the slowest of them.
func iperf(b *testing.B, ns *datapathtest.NetNS, addr string, port int, dir string, flows int) (total, slowest float64) {
	b.Helper()
	args := []string{
		"--client", addr, "--port", strconv.Itoa(port), "--json",
		"--time", strconv.Itoa(seconds), "--parallel", strconv.Itoa(flows),
	}
	if dir == "guest-to-host" {
		args = append(args, "--reverse")
	}
	cmd := exec.Command("iperf3", args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(b, startIn(ns, cmd))
	require.NoError(b, cmd.Wait(), "iperf3 %v: %s", args, out.String())
	var report struct {
		End struct {
			Streams []struct {
				Receiver struct {
					BitsPerSecond float64 `json:"bits_per_second"`
				} `json:"receiver"`
			} `json:"streams"`
			SumReceived struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	require.NoError(b, json.Unmarshal(out.Bytes(), &report), "iperf3: %s", out.String())
	require.Positive(b, report.End.SumReceived.BitsPerSecond, "iperf3: %s", out.String()) // some errors leave its status 0
	slowest = -1
	for _, s := range report.End.Streams {
		if v := s.Receiver.BitsPerSecond; slowest < 0 || v < slowest {
			slowest = v
		}
	}
	return report.End.SumReceived.BitsPerSecond / 1e9, slowest / 1e9
}

// measureStream reports what iperf3 moves through the bed in one direction.
func measureStream(b *testing.B, bed *bed, dir string, flows int, relays bool) {
	cpu := processCPU(b)
	var total, slowest float64
	for b.Loop() {
		if bed.serve != nil {
			bed.serve(b)
		}
		t, s := iperf(b, bed.host, bed.client, bed.port, dir, flows)
		total += t
		slowest += s
	}
	n := float64(b.N)
	b.ReportMetric(total/n, "Gbit/s")
	if flows > 1 {
		b.ReportMetric(slowest/n, "slowest-Gbit/s")
	}
	if relays {
		gigabytes := total * seconds / 8
		b.ReportMetric((processCPU(b)-cpu).Seconds()/gigabytes, "cpu-s/GB")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkTCPStream moves bulk data through a published port.
func BenchmarkTCPStream(b *testing.B) {
	for _, path := range paths {
		for _, dir := range []string{"host-to-guest", "guest-to-host"} {
			for _, flows := range []int{1, 4, 8} {
				b.Run(fmt.Sprintf("path=%s/dir=%s/flows=%d", path.name, dir, flows), func(b *testing.B) {
					bed := path.open(b)
					startIperf(b, bed.guest, bed.server, guestPort)
					measureStream(b, bed, dir, flows, path.relays)
				})
			}
		}
	}
}
