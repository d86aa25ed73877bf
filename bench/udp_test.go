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
	var arrived, perSecond, sent, jitter float64
	var cpu time.Duration
	for b.Loop() {
		var gone float64
		var v []float64
		var spent time.Duration
		bed.check(b, bed.try(b, func() (err error) {
			before := bed.relay.cpu(b)
			gone, v, err = sendUDP(b, bed, replies, size, rate)
			spent = bed.relay.cpu(b) - before
			return err
		}))
		sent += gone
		arrived += v[0]
		perSecond += v[0] / v[1]
		jitter += v[2]
		cpu += spent
	}
	n := float64(b.N)
	if rate == 0 {
		b.ReportMetric(perSecond/n/1e3, "kpkt/s")
	} else {
		b.ReportMetric(jitter/n, "jitter-µs")
	}
	b.ReportMetric(100*(sent-arrived)/sent, "loss-%")
	if bed.relay != nil {
		b.ReportMetric(cpu.Seconds()/arrived*1e6, "cpu-µs/pkt")
	}
	b.ReportMetric(0, "ns/op")
}

// sendUDP sends datagrams for a run's seconds and returns how many, and what the
// sink says of them.
func sendUDP(b *testing.B, bed *bed, replies bool, size, rate int) (sent float64, arrived []float64, err error) {
	work := []string{strconv.Itoa(size), strconv.Itoa(rate), strconv.Itoa(seconds)}
	var from, to *role
	if replies {
		from = startRole(b, bed.guest, "answer", append([]string{bed.inGuest()}, work...)...)
		defer from.stop()
		to, err = startClient(b, bed, "ask", bed.address())
		defer to.stop()
	} else {
		to = startRole(b, bed.guest, "sink", bed.inGuest())
		defer to.stop()
		from, err = startClient(b, bed, "blast", append([]string{bed.address()}, work...)...)
		defer from.stop()
	}
	if err != nil {
		return 0, nil, err
	}
	sent = from.line(b)[0]
	from.stop()
	time.Sleep(100 * time.Millisecond) // for what is still under way
	_ = to.in.Close()
	if arrived = to.line(b); arrived[0] < 2 {
		return 0, nil, fmt.Errorf("%v datagrams arrived", arrived[0])
	}
	return sent, arrived, nil
}
