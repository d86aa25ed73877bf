package bench

import (
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// address returns where the bed's client connects to.
func (b *bed) address() string { return net.JoinHostPort(b.client, strconv.Itoa(b.port)) }

// echo starts the echo server of the bed's guest.
func (b *bed) echo(tb testing.TB) {
	startRole(tb, b.guest, "echo", net.JoinHostPort(b.server, strconv.Itoa(guestPort)))
}

// BenchmarkPingPong passes one byte to and fro over one connection.
func BenchmarkPingPong(b *testing.B) {
	for _, path := range paths {
		b.Run("path="+path.name, func(b *testing.B) {
			bed := path.open(b)
			bed.echo(b)
			var p50, p99 float64
			for b.Loop() {
				p := startRole(b, bed.host, "pingpong", bed.address(), "20000")
				v := p.line(b)
				p50 += v[0]
				p99 += v[1]
				p.stop()
			}
			b.ReportMetric(p50/float64(b.N), "p50-µs")
			b.ReportMetric(p99/float64(b.N), "p99-µs")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkConnect opens a connection, passes a byte to and fro and closes.
func BenchmarkConnect(b *testing.B) {
	for _, path := range paths {
		for _, clients := range []int{1, 16} {
			b.Run(fmt.Sprintf("path=%s/clients=%d", path.name, clients), func(b *testing.B) {
				bed := path.open(b)
				bed.echo(b)
				var rate, failed float64
				for b.Loop() {
					p := startRole(b, bed.host, "connect", bed.address(), strconv.Itoa(clients), strconv.Itoa(seconds))
					v := p.line(b)
					rate += v[0]
					failed += v[1]
					p.stop()
				}
				b.ReportMetric(rate/float64(b.N), "conn/s")
				b.ReportMetric(failed/float64(b.N), "failed")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkIdleFlow holds 10000 idle connections and reports what each of them
// adds to this process's resident memory.
func BenchmarkIdleFlow(b *testing.B) {
	const flows = 10000
	require.NoError(b, raiseFDs())
	for _, path := range paths {
		if !path.relays {
			continue
		}
		b.Run(fmt.Sprintf("path=%s/flows=%d", path.name, flows), func(b *testing.B) {
			bed := path.open(b)
			bed.echo(b)
			var bytes float64
			for b.Loop() {
				before := resident(b)
				p := startRole(b, bed.host, "hold", bed.address(), strconv.Itoa(flows))
				bytes += float64(resident(b)-before) / flows
				p.stop()
				for bed.forwarder.Rows()[0].Flows.Active > 0 {
					time.Sleep(10 * time.Millisecond)
				}
			}
			b.ReportMetric(bytes/float64(b.N)/1024, "KiB/flow")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// resident returns this process's resident memory in bytes, garbage not counted.
func resident(tb testing.TB) int64 {
	tb.Helper()
	debug.FreeOSMemory()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(tb, err)
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			require.NoError(tb, err)
			return kb << 10
		}
	}
	tb.Fatal("no VmRSS in /proc/self/status")
	return 0
}
