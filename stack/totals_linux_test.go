package stack

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var tcpTotals, udpTotals = TotalsKey{"default", listener.TCP}, TotalsKey{"default", listener.UDP}

func TestTotals(t *testing.T) {
	f, g := mustAttached(t, Options{Timeouts: Timeouts{UDPIdle: time.Hour}})
	passed, rows := f.Totals()
	assert.Empty(t, passed)
	assert.Empty(t, rows)

	g.serveTCP(t, 80, echo)
	g.serveUDP(t, 53, echoUDP)
	at := mustPublish(t, f, "a", "0:80")[0]
	refusing := mustPublish(t, f, "b", "0:81")[0]
	udp := mustPublish(t, f, "c", "0:53/udp")[0]
	publish(t, f, "d", "[::1]:0:[fd00::1]:80") // skipped
	c := dial(t, at)
	ping(t, c)
	requireRefused(t, refusing)
	u, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(udp))
	require.NoError(t, err)
	defer u.Close()
	require.NoError(t, u.SetDeadline(time.Now().Add(patience)))
	_, err = u.Write([]byte("12345"))
	require.NoError(t, err)
	_, err = u.Read(make([]byte, 16))
	require.NoError(t, err)

	want := func(key TotalsKey) Totals {
		sum := *NewTotals()
		for _, r := range f.Rows() {
			if r.Outcome.Spec.Proto == key.Proto {
				sum.Active += r.Flows.Active
				sum.Flows += r.Flows.Total
				sum.ToGuest += r.ToGuest
				sum.ToHost += r.ToHost
			}
		}
		return sum
	}
	eventually(t, "the refused flow has ended", func() bool { return want(tcpTotals).Active == 1 })
	// Bytes are counted behind their write: an answer may come before its question is.
	eventually(t, "bytes are counted", func() bool {
		u, c := want(udpTotals), want(tcpTotals)
		return u.ToGuest == 5 && u.ToHost == 5 && c.ToGuest == 4 && c.ToHost == 4
	})
	tcp := want(tcpTotals)
	tcp.Refused[refusedByGuest] = 1
	passed, rows = f.Totals()
	assert.Equal(t, map[TotalsKey]*Totals{tcpTotals: &tcp, udpTotals: {Active: 1, Flows: 1, Refused: want(udpTotals).Refused, Ended: NewTotals().Ended, ToGuest: 5, ToHost: 5}}, passed)
	assert.EqualValues(t, 2, tcp.Flows)
	assert.NotZero(t, tcp.ToGuest)
	assert.Equal(t, map[RowsKey]int{
		{"default", listener.KindCLI, listener.Forwarded}: 3, {"default", listener.KindCLI, listener.Skipped}: 1,
	}, rows)

	// Rows leave, what they counted stays; rows that come count on.
	for _, id := range []string{"a", "b", "c", "d"} {
		f.Withdraw(ctx, owner(id))
	}
	passed, rows = f.Totals()
	tcp.Active = 0
	tcp.Ended["aborted"] = 1
	assert.Equal(t, &tcp, passed[tcpTotals])
	assert.Equal(t, &Totals{Flows: 1, Refused: want(udpTotals).Refused, Ended: NewTotals().Ended, ToGuest: 5, ToHost: 5}, passed[udpTotals])
	assert.Empty(t, rows)
	c = dial(t, mustPublish(t, f, "a", "0:80")[0])
	ping(t, c)
	eventually(t, "its bytes are counted", func() bool {
		passed, _ = f.Totals()
		return passed[tcpTotals].ToGuest == tcp.ToGuest+4 && passed[tcpTotals].ToHost == tcp.ToHost+4
	})
	assert.Equal(t, tcp.Flows+1, passed[tcpTotals].Flows)
	assert.Equal(t, 1, passed[tcpTotals].Active)

	f.DetachVM("default")
	passed, rows = f.Totals()
	assert.Equal(t, tcp.Flows+1, passed[tcpTotals].Flows)
	assert.Zero(t, passed[tcpTotals].Active)
	assert.Equal(t, map[RowsKey]int{{"default", listener.KindCLI, listener.Pending}: 1}, rows)
}

// TestEnds: each flow that the guest has taken is counted once, under what ended
// it; one that it has refused is not.
func TestEnds(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, echo)
	g.serveTCP(t, 81, func(c *net.TCPConn) {
		_, _ = c.Read(make([]byte, 1))
		_ = c.SetLinger(0)
		_ = c.Close()
	})
	echoes, resets := mustPublish(t, f, "a", "0:80")[0], mustPublish(t, f, "b", "0:81")[0]
	want := NewTotals().Ended
	ended := func(why string) {
		want[why]++
		eventually(t, why, func() bool {
			passed, _ := f.Totals()
			return passed[tcpTotals].Ended[why] == want[why] && passed[tcpTotals].Active == 0
		})
		passed, _ := f.Totals()
		assert.Equal(t, want, passed[tcpTotals].Ended)
	}

	requireRefused(t, mustPublish(t, f, "d", "0:83")[0])
	c := dial(t, echoes)
	ping(t, c)
	require.NoError(t, c.CloseWrite())
	_, err := io.Copy(io.Discard, c)
	require.NoError(t, err)
	ended("closed")

	c = dial(t, echoes)
	ping(t, c)
	require.NoError(t, c.SetLinger(0))
	require.NoError(t, c.Close())
	ended("client-reset")

	c = dial(t, resets)
	_, err = c.Write([]byte("x"))
	require.NoError(t, err)
	requireReset(t, c)
	ended("guest-reset")

	ping(t, dial(t, echoes))
	f.Withdraw(ctx, owner("a"))
	ended("aborted")

	// With a bound so short that an end of those above might take as long.
	f, g = mustAttached(t, Options{Timeouts: Timeouts{HalfClose: 300 * time.Millisecond}})
	want = NewTotals().Ended
	release := make(chan struct{})
	g.serveTCP(t, 82, func(*net.TCPConn) { <-release })
	t.Cleanup(func() { close(release) }) // before the server is waited for
	c = dial(t, mustPublish(t, f, "c", "0:82")[0])
	require.NoError(t, c.CloseWrite())
	requireReset(t, c)
	ended("idle")
}

// No total falls, whatever comes and goes while it is read.
func TestTotalsNeverFall(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, say("hello"))
	stop := make(chan struct{})
	var churning sync.WaitGroup
	for i := range 3 {
		id := fmt.Sprint("churn", i)
		guest := []string{"0:80", "0:81", "0:80"}[i]
		churning.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				out := publish(t, f, id, guest)
				if out[0].State != listener.Forwarded {
					continue
				}
				for range 3 {
					if c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(out[0].Bound[0])); err == nil {
						_, _ = c.Read(make([]byte, 16))
						c.Close()
					}
				}
				f.Withdraw(ctx, owner(id))
			}
		})
	}
	var last Totals
	looks := 0
	for deadline := time.Now().Add(patience); looks < 2000 || last.Flows < 60 || last.Refused[refusedByGuest] < 10; looks++ {
		require.True(t, time.Now().Before(deadline), "%d looks, %+v", looks, last)
		passed, _ := f.Totals()
		now := passed[tcpTotals]
		if now == nil {
			continue
		}
		if now.Flows < last.Flows || now.ToHost < last.ToHost || now.ToGuest < last.ToGuest {
			assert.Failf(t, "a total fell", "%+v after %+v", now, last)
			break
		}
		for reason, n := range last.Refused {
			assert.GreaterOrEqual(t, now.Refused[reason], n, reason)
		}
		last = *now
	}
	close(stop)
	churning.Wait()
}

// What a scrape costs with 10 000 rows and a flow in each; nothing may be made
// for one of them.
func BenchmarkTotals(b *testing.B) {
	f := mustForwarder(b, Options{})
	fillRows(f, 10_000)
	b.ReportAllocs()
	for b.Loop() {
		passed, _ := f.Totals()
		if passed[tcpTotals].Active != 10_000 {
			b.Fatal("not all flows are there")
		}
	}
	endFlows(f)
}

func TestTotalsAllocateNothingPerRow(t *testing.T) {
	f := mustForwarder(t, Options{})
	fillRows(f, 10)
	few := testing.AllocsPerRun(5, func() { f.Totals() })
	fillRows(f, 3000)
	many := testing.AllocsPerRun(5, func() { f.Totals() })
	assert.LessOrEqual(t, many, few+2)
	endFlows(f)
}

// fillRows makes rows without sockets, with one flow each that has no end.
func fillRows(f *Forwarder, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range n {
		o := owner(fmt.Sprint(i))
		r := &row{owner: o, spec: listener.Spec{Proto: listener.TCP, Target: listener.Target{VM: "default"}}, outcome: outcome{State: listener.Forwarded}}
		r.refuse(refusedByGuest)
		r.admit(&flow{row: r, proto: listener.TCP, client: netip.AddrPortFrom(node, uint16(i))})
		f.owners[o] = listener.Set[*row]{r}
	}
}

// endFlows ends the flows of fillRows.
func endFlows(f *Forwarder) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for r := range f.rows() {
		for _, fl := range r.live() {
			r.dismiss(fl)
		}
	}
	clear(f.owners)
}
