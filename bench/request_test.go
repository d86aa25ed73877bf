package bench

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// echo starts the echo server of the bed's guest.
func (b *bed) echo(tb testing.TB) { startRole(tb, b.guest, "echo", b.inGuest()) }

// BenchmarkPingPong passes one byte to and fro over one connection, with nothing
// else under way.
func BenchmarkPingPong(b *testing.B) {
	eachPath(b, func(b *testing.B, bed *bed) {
		bed.echo(b)
		measurePingPong(b, bed)
	})
}

// BenchmarkLoadedPingPong does so beside one bulk flow that takes all it can.
func BenchmarkLoadedPingPong(b *testing.B) {
	if withPeers {
		b.Skip("missing from the peers' table: it is in make bench")
	}
	for _, dir := range []string{"host-to-guest", "guest-to-host"} {
		b.Run("dir="+dir, func(b *testing.B) {
			eachPath(b, func(b *testing.B, bed *bed) {
				bed.echo(b)
				bulk := bed.another(b, 1)
				startIperf(b, bulk)
				ended := make(chan error, 1)
				go func() {
					_, _, err := iperf(bulk, dir, 1)
					ended <- err
				}()
				measurePingPong(b, bed)
				require.NoError(b, <-ended)
			})
		})
	}
}

func measurePingPong(b *testing.B, bed *bed) {
	var sums [3]float64
	for b.Loop() {
		var took []float64
		bed.check(b, bed.try(b, func() (err error) {
			took, err = runClient(b, bed, "pingpong", bed.address(), strconv.Itoa(seconds))
			return err
		}))
		for i, v := range took {
			sums[i] += v
		}
	}
	for i, unit := range []string{"p50-µs", "p99-µs", "p99.9-µs"} {
		b.ReportMetric(sums[i]/float64(b.N), unit)
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkConnect opens a connection, passes a byte to and fro and closes. A peer
// is tried again until none failed; of one that never gets there the last try counts,
// failures and all, unless nothing passed: 0 conn/s is nothing to be measured against.
func BenchmarkConnect(b *testing.B) {
	eachPath(b, func(b *testing.B, bed *bed) {
		bed.echo(b)
		for _, clients := range []int{1, 16} {
			b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
				var rate, failed float64
				for b.Loop() {
					var v []float64
					err := bed.try(b, func() (err error) {
						v, err = runClient(b, bed, "connect", bed.address(), strconv.Itoa(clients), strconv.Itoa(seconds))
						if err == nil && bed.peer && (v[0] == 0 || v[1] > 0) {
							err = fmt.Errorf("%.0f conn/s, %.0f failed", v[0], v[1])
						}
						return err
					})
					if v == nil || v[0] == 0 {
						bed.check(b, err)
					}
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

// BenchmarkIdleFlow holds idle connections and reports what each of them adds to the
// relay's resident memory. Tens of thousands need ports of the guest: for one only
// there are not enough of the other side. Peers hold as many as the one that takes
// six descriptors a flow can with the 20 000 that some machines grant.
func BenchmarkIdleFlow(b *testing.B) {
	counts := []int{10_000, 50_000}
	if withPeers {
		counts = []int{3_000}
	}
	eachPath(b, func(b *testing.B, first *bed) {
		if first.relay == nil {
			b.Skip() // the kernel's
		}
		if first.single != "" {
			leaveOut(b, first.single)
		}
		for _, flows := range counts {
			b.Run(fmt.Sprintf("flows=%d", flows), func(b *testing.B) {
				if n := maxFDs(b); n < flows+100 {
					leaveOut(b, fmt.Sprintf("a process may have %d descriptors", n))
				}
				args := []string{strconv.Itoa(flows)}
				for i := range (flows + 12_499) / 12_500 {
					bed := first
					if i > 0 {
						bed = first.another(b, i)
					}
					bed.echo(b)
					args = append(args, bed.address())
				}
				var bytes float64
				for b.Loop() {
					before := first.relay.resident(b) // what a try that failed leaves behind counts
					first.check(b, first.try(b, func() error {
						p, err := startClient(b, first, "hold", args...)
						if err != nil {
							return err
						}
						defer p.stop()
						bytes += float64(first.relay.resident(b)-before) / float64(flows)
						return nil
					}))
				}
				b.ReportMetric(bytes/float64(b.N)/1024, "KiB/flow")
				b.ReportMetric(0, "ns/op")
			})
		}
	})
}
