package bench

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkPublish publishes single ports, one after the other, and withdraws them:
// how long all of them take, how long one does, and what they cost the relay in
// memory. Nothing passes.
func BenchmarkPublish(b *testing.B) {
	const ports, from = 10_000, 20_000
	eachPath(b, func(b *testing.B, bed *bed) {
		if bed.relay == nil {
			b.Skip() // the kernel's
		}
		if bed.publish == nil {
			leaveOut(b, "takes no port while it runs")
		}
		b.Run(fmt.Sprintf("ports=%d", ports), func(b *testing.B) {
			b.ReportMetric(0, "ns/op")
			took := make([]time.Duration, ports)
			before := bed.relay.resident(b)
			all := time.Now()
			bed.check(b, bed.host.Do(func() error {
				for i := range took {
					start := time.Now()
					if err := bed.publish(from + i); err != nil {
						return err
					}
					took[i] = time.Since(start)
				}
				return nil
			}))
			b.ReportMetric(ms(time.Since(all)), "publish-ms")
			b.ReportMetric(median(took), "publish-p50-µs")
			b.ReportMetric(float64(bed.relay.resident(b)-before)/1e6, "MB")
			if bed.forwarder == nil {
				return
			}
			all = time.Now()
			for i := range took {
				start := time.Now()
				bed.take(own(from + i))
				took[i] = time.Since(start)
			}
			b.ReportMetric(ms(time.Since(all)), "withdraw-ms")
			b.ReportMetric(median(took), "withdraw-p50-µs")
			require.Len(b, bed.forwarder.Rows(), 2, "ports are left")
		})
	})
}

// median returns the median in microseconds, and sorts.
func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2]) / float64(time.Microsecond)
}
