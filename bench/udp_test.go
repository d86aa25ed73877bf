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
func BenchmarkUDP(b *testing.B) { benchUDP(b, false) }

// BenchmarkUDPReplies has the guest send them, to a client that asked with one.
func BenchmarkUDPReplies(b *testing.B) { benchUDP(b, true) }

func benchUDP(b *testing.B, replies bool) {
	eachPath(b, func(b *testing.B, bed *bed) {
		for _, size := range []int{64, 1400} {
			b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
				b.Run("rate=full", func(b *testing.B) { measureUDP(b, bed, replies, size, 0) })
				b.Run(fmt.Sprintf("rate=%d", moderateRate), func(b *testing.B) { measureUDP(b, bed, replies, size, moderateRate) })
			})
		}
	})
}

func measureUDP(b *testing.B, bed *bed, replies bool, size, rate int) {
	cpu := bed.relay.cpu(b)
	work := []string{strconv.Itoa(size), strconv.Itoa(rate), strconv.Itoa(seconds)}
	var arrived, perSecond, sent, jitter float64
	for b.Loop() {
		var from, to *role
		if replies {
			from = startRole(b, bed.guest, "answer", append([]string{bed.inGuest()}, work...)...)
			to = startClient(b, bed, "ask", bed.address())
		} else {
			to = startRole(b, bed.guest, "sink", bed.inGuest())
			from = startClient(b, bed, "blast", append([]string{bed.address()}, work...)...)
		}
		sent += from.line(b)[0]
		from.stop()
		time.Sleep(100 * time.Millisecond) // for what is still under way
		_ = to.in.Close()
		v := to.line(b)
		to.stop()
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
