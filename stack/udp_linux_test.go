package stack

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// dialUDP returns a connected client: the kernel gives it answers from at only.
func dialUDP(tb testing.TB, at netip.AddrPort) *net.UDPConn {
	tb.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(at))
	require.NoError(tb, err)
	tb.Cleanup(func() { c.Close() })
	require.NoError(tb, c.SetDeadline(time.Now().Add(patience)))
	return c
}

// exchange sends one datagram and returns the next that comes.
func exchange(tb testing.TB, c *net.UDPConn, text string) string {
	tb.Helper()
	_, err := c.Write([]byte(text))
	require.NoError(tb, err)
	b := make([]byte, 65536)
	n, err := c.Read(b)
	require.NoError(tb, err)
	return string(b[:n])
}

// mustServeUDP publishes text, which leads to port 53 of the node, where serve is.
func mustServeUDP(tb testing.TB, o Options, text string, serve func(*net.UDPConn, netip.AddrPort, []byte)) (*Forwarder, *hostGuest, []netip.AddrPort) {
	tb.Helper()
	f, g := mustAttached(tb, o)
	g.serveUDP(tb, 53, serve)
	return f, g, mustPublish(tb, f, "x", text)
}

// Datagrams of any length pass both ways whole (C-21).
func TestC21FB039Sizes(t *testing.T) {
	f, _, at := mustServeUDP(t, Options{}, "127.0.0.1:0:53/udp", echoUDP)
	c := dialUDP(t, at[0])
	total := 0
	for _, n := range []int{0, 1, 1472, 1473, 2944, 9000, 65507} {
		sent := pattern(n)
		got := exchange(t, c, string(sent))
		require.Equal(t, sha256.Sum256(sent), sha256.Sum256([]byte(got)), n)
		total += n
	}
	row := only(t, f)
	assert.Equal(t, FlowCount{Active: 1, Total: 1}, row.Flows)
	eventually(t, "all is counted", func() bool {
		row := only(t, f)
		return row.ToGuest == uint64(total) && row.ToHost == uint64(total)
	})
	v := f.Flows()[0]
	assert.Equal(t, listener.UDP, v.Proto)
	assert.Equal(t, c.LocalAddr().String(), v.Client.String())
	assert.Equal(t, at[0], v.Host)
	assert.Equal(t, "open", v.State)
	assert.NotEmpty(t, v.Source)
}

// Each client has one guest-side port of its own, and gets its own answers
// (C-20).
func TestC20OneFlowPerClient(t *testing.T) {
	_, _, at := mustServeUDP(t, Options{}, "127.0.0.1:0:53/udp", func(c *net.UDPConn, from netip.AddrPort, b []byte) {
		_, _ = c.WriteToUDPAddrPort(fmt.Appendf(nil, "%s %s", from, b), from)
	})
	sources := make(map[string]int)
	for i := range 20 {
		c := dialUDP(t, at[0])
		for range 3 {
			text := fmt.Sprint("client ", i)
			source, got, _ := strings.Cut(exchange(t, c, text), " ")
			assert.Equal(t, text, got)
			sources[source]++
		}
	}
	assert.Len(t, sources, 20)
}

// A client outside the prefixes gets no flow, and its datagrams go nowhere
// (C-45, FB-113).
func TestC45FB113AllowUDP(t *testing.T) {
	f, g := mustAttached(t, Options{})
	asked := make(chan string, 100)
	g.serveUDP(t, 53, func(c *net.UDPConn, from netip.AddrPort, b []byte) {
		asked <- string(b)
		echoUDP(c, from, b)
	})
	at := allowing(t, f, "127.0.0.1:0:53/udp", "127.9.0.0/16")[0]
	from := func(client string) *net.UDPConn {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(client)}, net.UDPAddrFromAddrPort(at))
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
		return c
	}
	outside := from("127.8.0.2")
	for range 3 {
		_, err := outside.Write([]byte("outside"))
		require.NoError(t, err)
	}
	eventually(t, "they are counted", func() bool { return only(t, f).Flows.Refused[refusedRange] == 3 })
	assert.Equal(t, "inside", exchange(t, from("127.9.0.2"), "inside"))
	assert.Equal(t, "inside", <-asked, "the first that the guest hears of")
	assert.Equal(t, FlowCount{Active: 1, Total: 1, Refused: map[string]uint64{refusedRange: 3}}, only(t, f).Flows)
}

// The answer comes from the very address that was asked, on a wildcard listener
// too.
func TestFB037FB038ReplySource(t *testing.T) {
	_, _, bound := mustServeUDP(t, Options{Policy: listener.Policy{ExposeToLAN: true}}, "0:53/udp", echoUDP)
	port := bound[0].Port()
	for _, host := range []string{"127.0.0.1", "127.0.0.2", "127.1.2.3", "::1"} {
		c := dialUDP(t, netip.AddrPortFrom(netip.MustParseAddr(host), port))
		assert.Equal(t, host, exchange(t, c, host))
	}
}

// An idle flow's endpoint goes, and the same client is served again.
func TestFB033SameClientAfterIdle(t *testing.T) {
	// Longer than a busy machine takes to answer: nobody has the answer of a flow that has gone.
	f, g, at := mustServeUDP(t, Options{Timeouts: Timeouts{UDPIdle: 300 * time.Millisecond}}, "127.0.0.1:0:53/udp", echoUDP)
	c := dialUDP(t, at[0])
	for i := range 5 {
		assert.Equal(t, "x", exchange(t, c, "x"))
		eventually(t, "the flow has gone", func() bool { return g.endpoint.Load() == 0 && only(t, f).Flows.Active == 0 })
		assert.EqualValues(t, i+1, only(t, f).Flows.Total)
	}
}

// A flood of clients stays within the table and takes nothing from others.
func TestFB031FB034Bounded(t *testing.T) {
	const limit = 16
	f, g, at := mustServeUDP(t, Options{Limits: Limits{UDPFlows: limit}}, "127.0.0.1:0:53/udp", echoUDP)
	g.serveTCP(t, 80, echo)
	tcp := dial(t, mustPublish(t, f, "tcp", "127.0.0.1:0:80")[0])
	for range 300 {
		c := dialUDP(t, at[0]) // stays open, so that no two have one port
		require.Equal(t, "x", exchange(t, c, "x"))
		require.LessOrEqual(t, f.Rows()[0].Flows.Active, limit)
	}
	ping(t, tcp)
	row := f.Rows()[0]
	assert.EqualValues(t, 300, row.Flows.Total)
	assert.EqualValues(t, 300-limit, row.Flows.Refused[refusedEvicted])
	eventually(t, "the bytes of those that ended are kept", func() bool { return f.Rows()[0].ToGuest == 300 })
}

// A client that is gone makes nobody spin and disturbs no other.
func TestFB036ClientGone(t *testing.T) {
	var sent atomic.Int64
	f, _, at := mustServeUDP(t, Options{}, "127.0.0.1:0:53/udp", func(c *net.UDPConn, from netip.AddrPort, b []byte) {
		if string(b) != "flood" {
			echoUDP(c, from, b)
			return
		}
		for range 1000 {
			_, _ = c.WriteToUDPAddrPort([]byte("anybody?"), from)
			sent.Add(1)
		}
	})
	gone, stays := dialUDP(t, at[0]), dialUDP(t, at[0])
	require.Equal(t, "x", exchange(t, stays, "x"))
	_, err := gone.Write([]byte("flood"))
	require.NoError(t, err)
	gone.Close()
	eventually(t, "all are sent", func() bool { return sent.Load() == 1000 })
	for range 10 {
		require.Equal(t, "x", exchange(t, stays, "x"))
	}
	assert.LessOrEqual(t, only(t, f).Flows.Active, 2)
}

// Odd datagrams end nothing.
func TestFB041OddDatagrams(t *testing.T) {
	_, _, at := mustServeUDP(t, Options{}, "127.0.0.1:0:53/udp", func(c *net.UDPConn, from netip.AddrPort, b []byte) {
		if len(b) == 1 {
			echoUDP(c, from, b)
		}
	})
	c := dialUDP(t, at[0])
	for _, n := range []int{0, 65507, 0, 40000} {
		_, err := c.Write(make([]byte, n))
		require.NoError(t, err)
	}
	assert.Equal(t, "y", exchange(t, c, "y"))
}

// Another target takes over at once, for a client that never pauses.
func TestFB047TargetChanges(t *testing.T) {
	f, g := mustAttached(t, Options{})
	for _, port := range []uint16{53, 54} {
		g.serveUDP(t, port, func(c *net.UDPConn, from netip.AddrPort, b []byte) {
			_, _ = c.WriteToUDPAddrPort(fmt.Append(nil, port), from)
		})
	}
	p := freePort(t)
	mustPublish(t, f, "x", fmt.Sprintf("127.0.0.1:%d:53/udp", p))
	c := dialUDP(t, at4(p))
	assert.Equal(t, "53", exchange(t, c, "?"))
	mustPublish(t, f, "x", fmt.Sprintf("127.0.0.1:%d:54/udp", p))
	assert.Equal(t, "54", exchange(t, c, "?"))
	assert.EqualValues(t, 1, g.endpoint.Load())

	second := newHostGuest()
	second.serveUDP(t, 54, func(c *net.UDPConn, from netip.AddrPort, b []byte) {
		_, _ = c.WriteToUDPAddrPort([]byte("second life"), from)
	})
	f.AttachVM("default", VM{Guest: second, Node: node})
	assert.Equal(t, "second life", exchange(t, c, "?"))
	assert.Zero(t, g.endpoint.Load())
	f.DetachVM("default")
	assert.Zero(t, second.endpoint.Load())
	assert.True(t, free(p))
}

// Nobody at the guest's port: a connected client is told (C-23).
func TestC23FB049PortUnreachable(t *testing.T) {
	requireRaw(t)
	f, g := mustAttached(t, Options{})
	g.closedUDP(t, 53)
	bound := mustPublish(t, f, "x", "0:53/udp")
	require.Len(t, bound, 2)
	for _, at := range bound {
		c := dialUDP(t, at)
		_, err := c.Write([]byte("anybody?"))
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNREFUSED, at)
	}
	eventually(t, "the flows have gone", func() bool { return g.endpoint.Load() == 0 })
	assert.Equal(t, map[string]uint64{refusedByGuest: 2}, only(t, f).Flows.Refused)
}

// Without the right to say so it is counted all the same.
func TestC23WithoutRawSocket(t *testing.T) {
	f, g := mustAttached(t, Options{})
	f.icmp.close()
	g.closedUDP(t, 53)
	at := mustPublish(t, f, "x", "127.0.0.1:0:53/udp")[0]
	c := dialUDP(t, at)
	_, err := c.Write([]byte("anybody?"))
	require.NoError(t, err)
	eventually(t, "counted", func() bool { return only(t, f).Flows.Refused[refusedByGuest] == 1 })
}

func requireRaw(tb testing.TB) {
	tb.Helper()
	c, err := net.ListenPacket("ip4:icmp", "127.0.0.1")
	if err == nil {
		c.Close()
	}
	datapathtest.Require(tb, "rawsocket", err == nil, "CAP_NET_RAW, as root has it")
}

// A guest that cannot be dialled costs the datagram and is counted.
func TestUDPDialFails(t *testing.T) {
	f, _ := mustAttached(t, Options{})
	at := mustPublish(t, f, "x", fmt.Sprintf("127.0.0.1:0:%d/udp", portNoSource))[0]
	c := dialUDP(t, at)
	_, err := c.Write([]byte("x"))
	require.NoError(t, err)
	eventually(t, "counted", func() bool { return only(t, f).Flows.Refused[refusedNoPort] == 1 })
	assert.Zero(t, only(t, f).Flows.Active)
	assert.Zero(t, f.flows.udp.Load())
}

// Publishes and VMs that flap under traffic, for the race detector (FB-052).
func TestFB052Flapping(t *testing.T) {
	f, g := mustAttached(t, Options{Timeouts: Timeouts{UDPIdle: time.Millisecond}})
	g.serveUDP(t, 53, echoUDP)
	g.serveTCP(t, 80, echo)
	p := freePort(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if c, err := net.Dial("udp", at4(p).String()); err == nil {
					_, _ = c.Write([]byte("x"))
					_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
					_, _ = c.Read(make([]byte, 1))
					c.Close()
				}
				if c, err := net.Dial("tcp", at4(p).String()); err == nil {
					_, _ = c.Write(bytes.Repeat([]byte("x"), 100))
					c.Close()
				}
			}
		})
	}
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				f.Rows()
				f.Flows()
				time.Sleep(time.Millisecond)
			}
		}
	})
	for i := range 60 {
		switch i % 4 {
		case 0:
			publish(t, f, "x", fmt.Sprintf("127.0.0.1:%d:53/udp", p), fmt.Sprintf("127.0.0.1:%d:80", p))
		case 1:
			f.DetachVM("default")
		case 2:
			f.AttachVM("default", VM{Guest: g, Node: node})
		case 3:
			f.Withdraw(ctx, owner("x"))
		}
		time.Sleep(5 * time.Millisecond)
	}
	close(stop)
	wg.Wait()
	f.Withdraw(ctx, owner("x"))
	assert.Zero(t, f.flows.tcp.Load())
	assert.Zero(t, f.flows.udp.Load())
	assert.Zero(t, f.flows.dials.Load())
	eventually(t, "no endpoint is left", func() bool { return g.endpoint.Load() == 0 })
}
