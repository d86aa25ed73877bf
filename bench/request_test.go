package bench

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// echo starts the echo server of the bed's guest.
func (b *bed) echo(tb testing.TB) { startRole(tb, b.guest, "echo", b.inGuest()) }

// BenchmarkPingPong passes one byte to and fro over one connection.
func BenchmarkPingPong(b *testing.B) {
	eachPath(b, func(b *testing.B, bed *bed) {
		bed.echo(b)
		var sums [3]float64
		for b.Loop() {
			for i, v := range runRole(b, bed, "pingpong", bed.address(), strconv.Itoa(seconds)) {
				sums[i] += v
			}
		}
		for i, unit := range []string{"p50-µs", "p99-µs", "p99.9-µs"} {
			b.ReportMetric(sums[i]/float64(b.N), unit)
		}
		b.ReportMetric(0, "ns/op")
	})
}

// BenchmarkConnect opens a connection, passes a byte to and fro and closes.
func BenchmarkConnect(b *testing.B) {
	eachPath(b, func(b *testing.B, bed *bed) {
		bed.echo(b)
		for _, clients := range []int{1, 16} {
			b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
				var rate, failed float64
				for b.Loop() {
					v := runRole(b, bed, "connect", bed.address(), strconv.Itoa(clients), strconv.Itoa(seconds))
					rate += v[0]
					failed += v[1]
				}
				b.ReportMetric(rate/float64(b.N), "conn/s")
				b.ReportMetric(failed/float64(b.N), "failed")
				b.ReportMetric(0, "ns/op")
			})
		}
	})
}

// BenchmarkIdleFlow holds 10000 idle connections and reports what each of them
// adds to this process's resident memory.
func BenchmarkIdleFlow(b *testing.B) {
	const flows = 10000
	require.NoError(b, raiseFDs())
	b.Run(fmt.Sprintf("path=culvert-tap/flows=%d", flows), func(b *testing.B) {
		bed := openTap(b)
		bed.echo(b)
		var bytes float64
		for b.Loop() {
			before := bed.relay.resident(b)
			p := startRole(b, bed.host, "hold", bed.address(), strconv.Itoa(flows))
			bytes += float64(bed.relay.resident(b)-before) / flows
			p.stop()
			for bed.forwarder.Rows()[0].Flows.Active > 0 {
				time.Sleep(10 * time.Millisecond)
			}
		}
		b.ReportMetric(bytes/float64(b.N)/1024, "KiB/flow")
		b.ReportMetric(0, "ns/op")
	})
}
