package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/require"
)

// startIperf starts an iperf3 server in the bed's guest and waits until it listens.
// It takes one test after the other until the benchmark ends, or stop is called.
func startIperf(b *testing.B, bed *bed) (stop func()) {
	b.Helper()
	path, err := exec.LookPath("iperf3")
	datapathtest.Require(b, "iperf3", err == nil, "apt-get install iperf3, or contrib/install-deps.sh bench")
	cmd := exec.Command(path, "--server", "--bind", bed.server, "--port", strconv.Itoa(bed.serverPort))
	require.NoError(b, startIn(bed.guest, cmd))
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	b.Cleanup(stop)
	awaitBound(b, bed.guest, "tcp", bed.serverPort)
	return stop
}

// iperf runs one iperf3 client and returns what the receiving side counted, in
// Gbit/s: all flows of a direction together, and the slowest of them. It ends in
// the run's own seconds or, with a connection that stands still, never: a peer,
// which may be tried again three times, is given up sooner than ours.
func iperf(bed *bed, dir string, flows int, more ...string) (total, slowest float64, err error) {
	grace := patience
	if bed.peer {
		grace = 2 * time.Second
	}
	limit := time.Duration(seconds)*time.Second + grace
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	args := []string{
		"--client", bed.client, "--port", strconv.Itoa(bed.port), "--json",
		"--time", strconv.Itoa(seconds), "--parallel", strconv.Itoa(flows),
	}
	args = append(args, more...)
	switch dir {
	case "guest-to-host":
		args = append(args, "--reverse")
	case "both":
		args = append(args, "--bidir")
	}
	cmd := exec.CommandContext(ctx, "iperf3", args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := startIn(bed.host, cmd); err != nil {
		return 0, 0, err
	}
	ended := cmd.Wait()
	var report struct {
		Error string
		End   struct {
			Streams []struct {
				Receiver iperfRate
			}
			Received iperfRate `json:"sum_received"`
			Back     iperfRate `json:"sum_received_bidir_reverse"`
		}
	}
	err = json.Unmarshal(out.Bytes(), &report)
	switch {
	case ctx.Err() != nil:
		return 0, 0, fmt.Errorf("iperf3 %v has not ended after %v", args, limit)
	case report.Error != "": // some leave its status 0
		return 0, 0, fmt.Errorf("iperf3 %v: %s", args, report.Error)
	case ended != nil || err != nil || report.End.Received.Bits == 0:
		return 0, 0, fmt.Errorf("iperf3 %v: %w: %s", args, errors.Join(ended, err), out.String())
	}
	slowest = report.End.Streams[0].Receiver.Bits
	for _, s := range report.End.Streams {
		slowest = min(slowest, s.Receiver.Bits)
	}
	return (report.End.Received.Bits + report.End.Back.Bits) / 1e9, slowest / 1e9, nil
}

// An iperfRate is a part of iperf3's report.
type iperfRate struct {
	Bits float64 `json:"bits_per_second"`
}

// serveIperf is iperf with what the bed's server needs for it. A peer has a new one
// for each try: one that has lost its client may wait for it for good.
func serveIperf(b *testing.B, bed *bed, dir string, flows int, more ...string) (total, slowest float64, err error) {
	switch {
	case bed.serve != nil:
		bed.serve(b)
	case bed.peer:
		defer startIperf(b, bed)()
	}
	return iperf(bed, dir, flows, more...)
}

// measureStream reports what iperf3 moves through the bed in one direction, or in
// both at once.
func measureStream(b *testing.B, bed *bed, dir string, flows int) {
	var total, slowest float64
	var cpu time.Duration
	for b.Loop() {
		var t, s float64
		var spent time.Duration
		bed.check(b, bed.try(b, func() (err error) {
			before := bed.relay.cpu(b)
			t, s, err = serveIperf(b, bed, dir, flows)
			spent = bed.relay.cpu(b) - before
			return err
		}))
		total += t
		slowest += s
		cpu += spent
	}
	n := float64(b.N)
	b.ReportMetric(total/n, "Gbit/s")
	if flows > 1 {
		b.ReportMetric(slowest/n, "slowest-Gbit/s")
	}
	if bed.relay != nil {
		gigabytes := total * float64(seconds) / 8
		b.ReportMetric(cpu.Seconds()/gigabytes, "cpu-s/GB")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkTCPStream moves bulk data through a published port.
func BenchmarkTCPStream(b *testing.B) {
	if withPeers {
		eachPath(b, streams([]string{"host-to-guest", "guest-to-host"}, 1, 8, 64))
		eachOf(b, []path{gvproxyHuge}, streams([]string{"host-to-guest", "guest-to-host"}, 1, 8))
		return
	}
	eachPath(b, func(b *testing.B, bed *bed) {
		streams([]string{"host-to-guest", "guest-to-host"}, 1, 2, 4, 8, 16, 64)(b, bed)
		streams([]string{"both"}, 1, 8, 64)(b, bed)
	})
	eachOf(b, framePaths, streams([]string{"host-to-guest", "guest-to-host"}, 1, 8))
}

// streams measures so many flows in each direction.
func streams(dirs []string, flows ...int) func(*testing.B, *bed) {
	return func(b *testing.B, bed *bed) {
		for _, dir := range dirs {
			b.Run("dir="+dir, func(b *testing.B) {
				if !bed.peer {
					startIperf(b, bed)
				}
				for _, n := range flows {
					// What does not pass at all, with one flow, does not with more.
					ok := b.Run(fmt.Sprintf("flows=%d", n), func(b *testing.B) { measureStream(b, bed, dir, n) })
					if !ok || bed.failed {
						bed.failed = false
						break
					}
				}
			})
		}
	}
}

// BenchmarkSmallWrites has a client write a little at a time, with one flow.
func BenchmarkSmallWrites(b *testing.B) {
	eachPath(b, func(b *testing.B, bed *bed) {
		if !bed.peer {
			startIperf(b, bed)
		}
		for _, size := range []int{64, 1024} {
			b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
				var total float64
				for b.Loop() {
					var t float64
					bed.check(b, bed.try(b, func() (err error) {
						t, _, err = serveIperf(b, bed, "host-to-guest", 1, "--length", strconv.Itoa(size), "--no-delay")
						return err
					}))
					total += t
				}
				b.ReportMetric(total/float64(b.N)*1e9/8/float64(size)/1e3, "kwrites/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	})
}
