package stack

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// mustServe publishes a free loopback port that leads to serve.
func mustServe(tb testing.TB, o Options, serve func(*net.TCPConn)) (*Forwarder, *hostGuest, netip.AddrPort) {
	tb.Helper()
	f, g := mustAttached(tb, o)
	g.serveTCP(tb, 80, serve)
	return f, g, mustPublish(tb, f, "x", "127.0.0.1:0:80")[0]
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7 / 3)
	}
	return b
}

// What passes is seen in the row and the flow while it lives, and in the row
// afterwards.
func TestFlowIsSeen(t *testing.T) {
	f, _, at := mustServe(t, Options{}, echo)
	before := time.Now()
	c := dial(t, at)
	ping(t, c)
	require.Len(t, f.Flows(), 1)
	// Bytes are counted behind their write: the answer may come before the question is.
	eventually(t, "all is counted", func() bool { return only(t, f).ToGuest == 4 && only(t, f).ToHost == 4 })
	flows := f.Flows()
	require.Len(t, flows, 1)
	v := flows[0]
	assert.Equal(t, c.LocalAddr().String(), v.Client.String())
	assert.Equal(t, at, v.Host)
	assert.Equal(t, "198.18.0.2:80", v.Guest.String())
	assert.Equal(t, owner("x"), v.Owner)
	assert.Equal(t, "default", v.VM)
	assert.Equal(t, "open", v.State)
	assert.NotEmpty(t, v.Source)
	assert.EqualValues(t, 4, v.ToGuest)
	assert.EqualValues(t, 4, v.ToHost)
	assert.False(t, v.Started.Before(before))
	assert.False(t, v.LastActive.Before(v.Started))
	row := only(t, f)
	assert.Equal(t, FlowCount{Active: 1, Total: 1}, row.Flows)
	assert.EqualValues(t, 4, row.ToGuest)
	assert.EqualValues(t, 4, row.ToHost)

	require.NoError(t, c.CloseWrite())
	_, err := io.ReadAll(c)
	require.NoError(t, err)
	eventually(t, "the flow has ended", func() bool { return len(f.Flows()) == 0 })
	row = only(t, f)
	assert.Equal(t, FlowCount{Total: 1}, row.Flows)
	assert.EqualValues(t, 4, row.ToGuest)
	assert.EqualValues(t, 4, row.ToHost)
}

// A client of ::1 reaches a guest that has IPv4 only (C-10).
func TestC10Families(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, say("hello"))
	bound := mustPublish(t, f, "x", "0:80")
	require.Len(t, bound, 2)
	assert.Equal(t, bound[0].Port(), bound[1].Port())
	for _, at := range bound {
		assert.Equal(t, "hello", ask(t, at))
	}
}

// A target with an address is dialled there.
func TestTargetAddress(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCPAt(t, netip.MustParseAddrPort("198.18.0.7:80"), say("seven"))
	at := mustPublish(t, f, "x", "127.0.0.1:0:198.18.0.7:80")[0]
	assert.Equal(t, "seven", ask(t, at))
	assert.Equal(t, "198.18.0.7:80", only(t, f).Guest)
}

// allowing publishes text for the clients of prefixes alone.
func allowing(tb testing.TB, f *Forwarder, text string, prefixes ...string) []netip.AddrPort {
	tb.Helper()
	var list []netip.Prefix
	for _, p := range prefixes {
		list = append(list, netip.MustParsePrefix(p))
	}
	spec := mustSpec(tb, text)
	spec.Allow = listener.MakePrefixes(list...)
	out := f.Publish(tb.Context(), owner("x"), []listener.Spec{spec})
	require.Equal(tb, listener.Forwarded, out[0].State, out[0].Detail)
	return out[0].Bound
}

// A client outside the prefixes is reset, and the guest never hears of it
// (C-45, FB-113); the prefixes of an edit hold for those that come after it.
func TestC45FB113Allow(t *testing.T) {
	f, g := mustAttached(t, Options{})
	served := make(chan struct{}, 100)
	g.serveTCP(t, 80, func(c *net.TCPConn) {
		served <- struct{}{}
		_, _ = io.WriteString(c, "hello")
	})
	from := func(client string, at netip.AddrPort) (string, error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(client), 0))}
		c, err := d.DialContext(t.Context(), "tcp", at.String())
		if err != nil {
			return "", err // the reset may be there before connect returns
		}
		defer c.Close()
		require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
		b, err := io.ReadAll(c)
		return string(b), err
	}
	text := fmt.Sprintf("%d:80", freePort(t))
	bound := allowing(t, f, text, "127.9.0.0/16")
	require.Len(t, bound, 2)
	for _, tt := range []struct {
		client string
		at     netip.AddrPort
		served bool
	}{
		{"127.9.0.2", bound[0], true}, {"127.9.255.255", bound[0], true}, {"127.8.0.2", bound[0], false},
		{"127.0.0.1", bound[0], false}, {"::1", bound[1], false},
	} {
		got, err := from(tt.client, tt.at)
		if tt.served {
			require.NoError(t, err, tt.client)
			assert.Equal(t, "hello", got, tt.client)
			<-served
		} else {
			assert.ErrorIs(t, err, syscall.ECONNRESET, tt.client)
		}
	}
	assert.Empty(t, served)
	row := only(t, f)
	assert.Equal(t, map[string]uint64{refusedRange: 3}, row.Flows.Refused)
	assert.EqualValues(t, 2, row.Flows.Total, "who is refused has no flow")

	bound = allowing(t, f, text, "127.0.0.1/32", "::1/128")
	for _, at := range bound {
		got, err := from(at.Addr().String(), at)
		require.NoError(t, err)
		assert.Equal(t, "hello", got)
	}
	_, err := from("127.9.0.2", bound[0])
	assert.ErrorIs(t, err, syscall.ECONNRESET)
}

func TestTransfer(t *testing.T) {
	f, _, at := mustServe(t, Options{}, echo)
	const size = 16 << 20
	sent := pattern(size)
	c := dial(t, at)
	go func() {
		_, _ = c.Write(sent)
		_ = c.CloseWrite()
	}()
	sum := sha256.New()
	n, err := io.Copy(sum, c)
	require.NoError(t, err)
	assert.EqualValues(t, size, n)
	assert.Equal(t, sha256.Sum256(sent), [32]byte(sum.Sum(nil)))
	eventually(t, "all is counted", func() bool { return only(t, f).ToHost == size && only(t, f).ToGuest == size })
}

// The server's end reaches a client that only reads and keeps its side open.
func TestFB001FB007ServerEnds(t *testing.T) {
	f, g, at := mustServe(t, Options{}, say("a line"))
	for range 20 {
		assert.Equal(t, "a line", ask(t, at))
	}
	eventually(t, "nothing is left", func() bool { return len(f.Flows()) == 0 && g.endpoint.Load() == 0 })
}

// A client that ends its stream first, with and without having sent something,
// gets the whole answer and an end.
func TestFB002FB003ClientEnds(t *testing.T) {
	answer := pattern(64 << 10)
	_, _, at := mustServe(t, Options{}, func(c *net.TCPConn) {
		got, _ := io.ReadAll(c)
		time.Sleep(20 * time.Millisecond)
		_, _ = c.Write(answer)
		fmt.Fprintf(c, "OK %d", len(got))
	})
	for _, sent := range []string{"", "hello"} {
		for range 20 {
			c := dial(t, at)
			_, err := io.WriteString(c, sent)
			require.NoError(t, err)
			require.NoError(t, c.CloseWrite())
			got, err := io.ReadAll(c)
			require.NoError(t, err)
			require.Equal(t, string(answer)+fmt.Sprintf("OK %d", len(sent)), string(got))
		}
	}
}

// The guest ends its stream first and goes on to read.
func TestFB005GuestEnds(t *testing.T) {
	type result struct {
		sum [32]byte
		err error
	}
	results := make(chan result, 1)
	f, _, at := mustServe(t, Options{}, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "banner")
		_ = c.CloseWrite()
		sum := sha256.New()
		_, err := io.Copy(sum, c)
		results <- result{[32]byte(sum.Sum(nil)), err}
	})
	upload := pattern(1 << 20)
	for range 50 {
		c := dial(t, at)
		banner, err := io.ReadAll(c)
		require.NoError(t, err)
		assert.Equal(t, "banner", string(banner))
		assert.Equal(t, "half-closed-guest", f.Flows()[0].State)
		_, err = c.Write(upload)
		require.NoError(t, err)
		require.NoError(t, c.Close())
		r := <-results
		require.NoError(t, r.err)
		require.Equal(t, sha256.Sum256(upload), r.sum)
	}
	eventually(t, "nothing is left", func() bool { return len(f.Flows()) == 0 })
}

// Clients that close first leave nothing behind, though the server would keep
// the connection (FB-008).
func TestFB008ClientCloses(t *testing.T) {
	f, g, at := mustServe(t, Options{}, echo)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 50 {
				c, err := net.Dial("tcp", at.String())
				if !assert.NoError(t, err) {
					return
				}
				b := []byte("ping")
				_, _ = c.Write(b)
				_, err = io.ReadFull(c, b)
				assert.NoError(t, err)
				c.Close()
			}
		})
	}
	wg.Wait()
	eventually(t, "nothing is left", func() bool { return len(f.Flows()) == 0 && g.endpoint.Load() == 0 })
	assert.EqualValues(t, 1000, only(t, f).Flows.Total)
}

// What the guest sent before it closed arrives at a slow reader that has ended
// its own stream.
func TestFB011SlowReader(t *testing.T) {
	sent := pattern(16 << 20) // more than the kernel's buffers hold
	_, _, at := mustServe(t, Options{}, func(c *net.TCPConn) { _, _ = c.Write(sent) })
	c := dial(t, at)
	require.NoError(t, c.CloseWrite())
	sum := sha256.New()
	for i := 0; ; i++ {
		n, err := io.CopyN(sum, c, 256<<10)
		if n == 0 {
			require.ErrorIs(t, err, io.EOF)
			break
		}
		time.Sleep(time.Millisecond)
	}
	assert.Equal(t, sha256.Sum256(sent), [32]byte(sum.Sum(nil)))
}

// A reset is a reset on the other side, in both directions and in the middle of
// whatever.
func TestFB013Reset(t *testing.T) {
	t.Run("by a guest that closes without reading", func(t *testing.T) {
		_, _, at := mustServe(t, Options{}, func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 1)) })
		for range 20 {
			c := dial(t, at)
			_, err := c.Write(pattern(100_000))
			if err == nil {
				requireReset(t, c)
			} else {
				require.True(t, isReset(err), err)
			}
			c.Close()
		}
	})
	t.Run("by the client", func(t *testing.T) {
		for _, state := range []string{"idle", "half-closed", "sending", "receiving"} {
			t.Run(state, func(t *testing.T) {
				saw := make(chan error, 1)
				ready := make(chan struct{}, 1)
				f, g, at := mustServe(t, Options{}, func(c *net.TCPConn) {
					ready <- struct{}{}
					var err error
					switch state {
					case "receiving":
						_, err = io.Copy(struct{ io.Writer }{c}, endless{})
					case "half-closed":
						_, _ = io.ReadAll(c)
						ready <- struct{}{}
						for err == nil { // its stream has ended; only writing shows more
							time.Sleep(time.Millisecond)
							_, err = c.Write([]byte("x"))
						}
					default:
						_, err = io.Copy(io.Discard, c)
					}
					saw <- err
				})
				c := dial(t, at)
				<-ready
				switch state {
				case "sending":
					_, err := c.Write(pattern(1 << 20))
					require.NoError(t, err)
				case "half-closed":
					require.NoError(t, c.CloseWrite())
					<-ready
				}
				require.NoError(t, c.SetLinger(0))
				require.NoError(t, c.Close())
				assert.True(t, isReset(<-saw))
				eventually(t, "nothing is left", func() bool { return len(f.Flows()) == 0 && g.endpoint.Load() == 0 })
			})
		}
	})
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// A client that resets after its end, while the guest says nothing, is noticed
// (C-14): nobody reads it, nobody writes to it.
func TestC14ClientDiesHalfClosed(t *testing.T) {
	release := make(chan struct{})
	f, _, at := mustServe(t, Options{}, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "unread")
		<-release
	})
	t.Cleanup(func() { close(release) })
	c := dial(t, at)
	require.NoError(t, c.CloseWrite())
	eventually(t, "half-closed", func() bool {
		flows := f.Flows()
		return len(flows) == 1 && flows[0].State == "half-closed-client" && flows[0].ToHost > 0
	})
	require.NoError(t, c.Close()) // with something unread: a reset
	start := time.Now()
	eventually(t, "noticed", func() bool { return len(f.Flows()) == 0 })
	t.Logf("after %s", time.Since(start))
}

// A client that leaves while the guest takes nothing is found by the sweep: the
// copy to the guest waits for room and reads nobody.
func TestClientDiesBehindAStuckGuest(t *testing.T) {
	release := make(chan struct{})
	f, _, at := mustServe(t, Options{}, func(c *net.TCPConn) { <-release })
	t.Cleanup(func() { close(release) })
	stuck := dial(t, at)
	fill(t, stuck)
	f.killGone()
	require.Len(t, f.Flows(), 1, "its client is there")
	require.NoError(t, stuck.SetLinger(0))
	require.NoError(t, stuck.Close())
	eventually(t, "found", func() bool {
		f.killGone()
		return len(f.Flows()) == 0
	})
}

// fill writes until nothing moves.
func fill(tb testing.TB, c *net.TCPConn) {
	tb.Helper()
	chunk := make([]byte, 1<<20)
	for {
		require.NoError(tb, c.SetWriteDeadline(time.Now().Add(100*time.Millisecond)))
		if _, err := c.Write(chunk); err != nil {
			require.ErrorIs(tb, err, os.ErrDeadlineExceeded)
			return
		}
	}
}

// Once we have ended the stream to a client, one that has ended its own looks
// dead to poll(2); what it sent must still reach a slow guest.
func TestSweepSparesPendingBytes(t *testing.T) {
	release := make(chan struct{})
	got := make(chan int64, 1)
	f, _, at := mustServe(t, Options{}, func(c *net.TCPConn) {
		_ = c.CloseWrite()
		<-release
		n, _ := io.Copy(io.Discard, c)
		got <- n
	})
	c := dial(t, at)
	_, err := io.ReadAll(c)
	require.NoError(t, err)
	const size = 16 << 20
	go func() {
		_, _ = c.Write(make([]byte, size))
		_ = c.Close()
	}()
	for range 50 {
		f.killGone()
		time.Sleep(time.Millisecond)
	}
	close(release)
	for range 50 {
		f.killGone()
		time.Sleep(time.Millisecond)
	}
	assert.EqualValues(t, size, <-got)
}

// A guest that does not take the connection: the client sees a reset, never an
// end, and the row says why.
func TestC15FB017Refused(t *testing.T) {
	const n = 100
	for _, c := range []struct {
		port   uint16
		reason string
		n      int
	}{
		{80, refusedByGuest, n},
		{portUnreachable, refusedUnreachable, n},
		{portNoSource, refusedNoPort, n},
		{portSilent, refusedTimeout, 3},
	} {
		t.Run(c.reason, func(t *testing.T) {
			// Short for the guest alone that says nothing: another's answer may take as long.
			connect := time.Hour
			if c.port == portSilent {
				connect = 50 * time.Millisecond
			}
			f, _ := mustAttached(t, Options{Timeouts: Timeouts{Connect: connect}})
			at := mustPublish(t, f, "x", fmt.Sprintf("127.0.0.1:0:%d", c.port))[0]
			for range c.n {
				requireRefused(t, at)
			}
			eventually(t, "nothing is left", func() bool { return len(f.Flows()) == 0 })
			assert.Equal(t, map[string]uint64{c.reason: uint64(c.n)}, only(t, f).Flows.Refused)
		})
	}
}

// requireRefused connects and wants a reset, which may come so fast that the
// connect tells of it.
func requireRefused(tb testing.TB, at netip.AddrPort) {
	tb.Helper()
	c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(at))
	if err == nil {
		defer c.Close()
		require.NoError(tb, c.SetDeadline(time.Now().Add(patience)))
		_, err = io.Copy(io.Discard, c)
	}
	require.True(tb, isReset(err), "want a reset, got %v", err)
}

// A client that leaves during the guest's handshake ends it (C-16, FB-014).
func TestC16FB014LeavesEarly(t *testing.T) {
	f, g := mustAttached(t, Options{Timeouts: Timeouts{Connect: time.Hour}})
	at := mustPublish(t, f, "x", fmt.Sprintf("127.0.0.1:0:%d", portSilent))[0]
	for i := range 20 {
		c := dial(t, at)
		eventually(t, "the dial", func() bool { return g.dialing.Load() == 1 })
		assert.Equal(t, "connecting", f.Flows()[0].State)
		time.Sleep(time.Duration(i) * 3 * time.Millisecond) // around leaveWatch
		require.NoError(t, c.SetLinger(0))
		require.NoError(t, c.Close())
		eventually(t, "the dial has ended", func() bool { return g.dialing.Load() == 0 && len(f.Flows()) == 0 })
	}
	assert.Equal(t, map[string]uint64{refusedLeft: 20}, only(t, f).Flows.Refused)
}

// A client that has only ended its stream waits for the guest like any other.
func TestC16HalfClosedDoesNotLeave(t *testing.T) {
	f, g := mustAttached(t, Options{})
	slow := &slowGuest{hostGuest: g, delay: 5 * leaveWatch}
	f.AttachVM("default", VM{Guest: slow, Node: node})
	g.serveTCP(t, 80, say("worth it"))
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	c := dial(t, at)
	require.NoError(t, c.CloseWrite())
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	assert.Equal(t, "worth it", string(got))
}

// The datapath goes under established flows: their clients are reset.
func TestFB019DatapathGoes(t *testing.T) {
	f, g, at := mustServe(t, Options{}, hold)
	var clients []*net.TCPConn
	for range 200 {
		clients = append(clients, dial(t, at))
	}
	eventually(t, "all flows", func() bool { return g.endpoint.Load() == 200 })
	g.lose()
	for _, c := range clients {
		requireReset(t, c)
	}
	eventually(t, "nothing is left", func() bool { return len(f.Flows()) == 0 && g.endpoint.Load() == 0 })
}

// At the limit of flows a client is refused and counted, publishing goes on, and
// the next client is served when one has left (C-53).
func TestC53FB161Limit(t *testing.T) {
	f, g, at := mustServe(t, Options{Limits: Limits{Flows: 3}}, echo)
	var clients []*net.TCPConn
	for range 3 {
		c := dial(t, at)
		ping(t, c)
		clients = append(clients, c)
	}
	for range 5 {
		requireRefused(t, at)
	}
	g.serveTCP(t, 81, echo)
	g.serveUDP(t, 82, echoUDP)
	mustPublish(t, f, "y", "127.0.0.1:0:81")
	udp := mustPublish(t, f, "z", "127.0.0.1:0:82/udp")[0]
	assert.Equal(t, "u", exchange(t, dialUDP(t, udp), "u"))
	assert.Equal(t, map[string]uint64{refusedLimit: 5}, f.Rows()[0].Flows.Refused)

	require.NoError(t, clients[0].CloseWrite())
	_, err := io.ReadAll(clients[0])
	require.NoError(t, err)
	eventually(t, "a place is free", func() bool { return f.flows.tcp.Load() == 2 })
	ping(t, dial(t, at))
}

func TestDialLimit(t *testing.T) {
	f, g := mustAttached(t, Options{Limits: Limits{Dials: 2}, Timeouts: Timeouts{Connect: time.Hour}})
	at := mustPublish(t, f, "x", fmt.Sprintf("127.0.0.1:0:%d", portSilent))[0]
	dial(t, at)
	dial(t, at)
	eventually(t, "two dials", func() bool { return g.dialing.Load() == 2 })
	requireRefused(t, at)
	assert.Equal(t, map[string]uint64{refusedLimit: 1}, only(t, f).Flows.Refused)
	assert.EqualValues(t, 2, f.flows.dials.Load())
}

// The bound of a half-closed flow, on real sockets.
func TestFB010HalfCloseBound(t *testing.T) {
	release := make(chan struct{})
	f, g, at := mustServe(t, Options{Timeouts: Timeouts{HalfClose: 300 * time.Millisecond}}, func(*net.TCPConn) { <-release })
	t.Cleanup(func() { close(release) })
	var clients []*net.TCPConn
	for range 100 {
		c := dial(t, at)
		require.NoError(t, c.CloseWrite())
		clients = append(clients, c)
	}
	for _, c := range clients {
		requireReset(t, c)
	}
	eventually(t, "nothing is left", func() bool { return len(f.Flows()) == 0 && g.endpoint.Load() == 0 })
}

// 10 000 connections and 200 transfers that are cut off leave nothing.
func TestLeak(t *testing.T) {
	connects := 10_000
	if testing.Short() {
		connects = 1000
	}
	f, g, at := mustServe(t, Options{}, echo)
	ping(t, dial(t, at))
	eventually(t, "one flow", func() bool { return len(f.Flows()) == 1 })
	fds, goroutines := openFDs(), runtime.NumGoroutine()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range connects / 10 {
				c, err := net.Dial("tcp", at.String())
				if !assert.NoError(t, err) {
					return
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	for i := range 200 {
		c := dial(t, at)
		go func() { _, _ = c.Write(make([]byte, 1<<20)) }()
		_, _ = io.CopyN(io.Discard, c, rand.Int64N(1<<19))
		if i%2 == 0 {
			_ = c.SetLinger(0)
		}
		_ = c.Close()
	}
	eventually(t, "nothing is left", func() bool { return g.endpoint.Load() == 1 && len(f.Flows()) == 1 })
	assert.True(t, settled(fds+5, goroutines+5), "%d descriptors, were %d; %d goroutines, were %d",
		openFDs(), fds, runtime.NumGoroutine(), goroutines)
	assert.EqualValues(t, 1, f.flows.tcp.Load())
	assert.Zero(t, f.flows.dials.Load())
}

var (
	_ relay.GuestConn = (*hostConn)(nil)
	_ relay.Watcher   = (*hostConn)(nil)
	_ relay.Watcher   = (*listener.Conn)(nil)
)
