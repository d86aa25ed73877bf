package bench

import (
	"fmt"
	"strconv"
	"testing"
	"time"
)

// moderateRate is of what every path can carry, in datagrams a second: there loss
// and jitter can be compared. At full speed the sender is faster than any relay,
// and what arrives can be.
const moderateRate = 20_000

// BenchmarkUDP sends datagrams through a published port to a guest that counts them.
func BenchmarkUDP(b *testing.B) {
	eachPath(b, func(b *testing.B, bed *bed) {
		for _, size := range []int{64, 1400} {
			for _, rate := range []int{0, moderateRate} {
				name := fmt.Sprintf("size=%d/rate=%d", size, rate)
				if rate == 0 {
					name = fmt.Sprintf("size=%d/rate=full", size)
				}
				b.Run(name, func(b *testing.B) { measureUDP(b, bed, size, rate) })
			}
		}
	})
}

func measureUDP(b *testing.B, bed *bed, size, rate int) {
	cpu := bed.relay.cpu(b)
	var arrived, perSecond, sent, jitter float64
	for b.Loop() {
		sink := startRole(b, bed.guest, "sink", bed.inGuest())
		sent += runClient(b, bed, "blast", bed.address(), strconv.Itoa(size), strconv.Itoa(rate), strconv.Itoa(seconds))[0]
		time.Sleep(100 * time.Millisecond) // for what is still under way
		_ = sink.in.Close()
		v := sink.line(b)
		sink.stop()
		if v[0] < 2 {
			bed.check(b, fmt.Errorf("%v datagrams arrived", v[0]))
		}
		arrived += v[0]
		perSecond += v[0] / v[1]
		jitter += v[2]
	}
	n := float64(b.N)
	if rate == 0 {
		b.ReportMetric(perSecond/n/1e3, "kpkt/s")
	} else {
		b.ReportMetric(jitter/n, "jitter-µs")
	}
	b.ReportMetric(100*(sent-arrived)/sent, "loss-%")
	if bed.relay != nil {
		b.ReportMetric((bed.relay.cpu(b)-cpu).Seconds()/arrived*1e6, "cpu-µs/pkt")
	}
	b.ReportMetric(0, "ns/op")
}
