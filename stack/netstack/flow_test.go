package netstack

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// less returns n, or a part of it for who is in a hurry.
func less(n, hurry int) int {
	if testing.Short() {
		return hurry
	}
	return n
}

// unraced is less for what the race detector makes many times slower.
func unraced(n, raced int) int {
	if raceEnabled {
		return raced
	}
	return n
}

// bothWays sends a stream each way at once, to their ends, and asserts that both
// come whole.
func bothWays(t testing.TB, client, server flowConn, toClient, toServer pace, size int) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() { pace{}.mustSend(t, "client", client, 1, size) })
	wg.Go(func() { pace{}.mustSend(t, "guest", server, 2, size) })
	wg.Go(func() { toClient.mustReceive(t, "client", client, 2, size) })
	wg.Go(func() { toServer.mustReceive(t, "guest", server, 1, size) })
	wg.Wait()
}

// Bytes of both directions at once come whole, in whatever pieces they are written
// and read, and with readers that dawdle.
func TestFlowWhole(t *testing.T) {
	size := less(6<<20, 1<<20)
	slow := pace{most: 30_000, stops: size / 8, stop: 40 * time.Millisecond}
	for name, c := range map[string]struct {
		client, server pace // as readers
		depth          int
	}{
		"fast":        {pace{}, pace{}, 256},
		"slow client": {slow, pace{}, 256},
		"slow guest":  {pace{}, slow, 256},
		"both slow":   {slow, slow, 256},
		"shallow":     {pace{}, slow, 2},
	} {
		t.Run(name, func(t *testing.T) {
			eachBed(t, c.depth, func(t *testing.T, b *flowBed) {
				client, server := b.pairs(7)()
				bothWays(t, client, server, c.client, c.server, size)
				b.mustEnd(relay.EndClosed)
			})
		})
	}
}

// A gate is a reader that stops where it is told.
type gate struct {
	flowConn
	mu     sync.Mutex
	opened sync.Cond
	left   int // bytes that may be read; without a bound if negative
}

func newGate(c flowConn) *gate {
	g := &gate{flowConn: c}
	g.opened.L = &g.mu
	return g
}

// open lets so many more bytes through; all of them if n is negative.
func (g *gate) open(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left += n; n < 0 {
		g.left = -1
	}
	g.opened.Broadcast()
}

func (g *gate) Read(p []byte) (int, error) {
	g.mu.Lock()
	for g.left == 0 {
		g.opened.Wait()
	}
	if g.left > 0 {
		p = p[:min(len(p), g.left)]
	}
	g.mu.Unlock()
	n, err := g.flowConn.Read(p)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left > 0 {
		g.left -= n
	}
	return n, err
}

// A counter counts what was written.
type counter struct {
	flowConn
	n atomic.Int64
}

func (c *counter) Write(p []byte) (total int, err error) {
	for len(p) > 0 && err == nil { // in pieces, so that it shows where it stops
		var n int
		n, err = c.flowConn.Write(p[:min(len(p), 1000)])
		c.n.Add(int64(n))
		total, p = total+n, p[n:]
	}
	return total, err
}

// stopped waits until the writer has come to a stop.
func (c *counter) stopped() {
	for last := int64(-1); last != c.n.Load(); time.Sleep(60 * time.Millisecond) {
		last = c.n.Load()
	}
}

// A reader that stops for long stops the writer, in either direction; each time it
// goes on so does the writer, and nothing is lost.
func TestFlowWindowsCloseAndOpen(t *testing.T) {
	const small = 64 << 10
	// More than what lies between: a share of 8 MiB, and three sockets with up to 4 MiB
	// (tcp(7), tcp_wmem). Of ours a third has to become free before it is written to.
	const size, more = 32 << 20, 6 << 20
	for _, toGuest := range []bool{true, false} {
		t.Run(fmt.Sprintf("to guest=%t", toGuest), func(t *testing.T) {
			eachBed(t, 256, func(t *testing.T, b *flowBed) {
				client, server := b.pairs(7)()
				from, to := client, server
				if !toGuest {
					from, to = server, client
				}
				buffer := small
				if !toGuest {
					buffer = 8 * small // of loopback's long segments less than this would wait for timers
				}
				require.NoError(t, to.SetReadBuffer(buffer))
				writer, reader := &counter{flowConn: from}, newGate(to)
				var wg sync.WaitGroup
				wg.Go(func() { pace{}.mustSend(t, "writer", writer, 1, size) })
				wg.Go(func() { pace{}.mustReceive(t, "reader", reader, 1, size) })
				for _, n := range []int{1, 100, small / 2, small, more} {
					writer.stopped()
					before := writer.n.Load()
					assert.Less(t, before, int64(size), "the writer was not stopped")
					reader.open(n)
					if n == more {
						b.eventually("the writer goes on", func() bool { return writer.n.Load() > before })
					}
				}
				writer.stopped()
				reader.open(-1)
				wg.Wait()
				_ = to.CloseWrite()
				_, _ = io.Copy(io.Discard, from)
				b.mustEnd(relay.EndClosed)
			})
		})
	}
}

// A guest that takes back room it had promised (its buffer shrinks) gets everything.
func TestFlowShrinkingWindow(t *testing.T) {
	size := less(4<<20, 1<<20)
	eachBed(t, 256, func(t *testing.T, b *flowBed) {
		client, server := b.pairs(7)()
		reader := newGate(server)
		var wg sync.WaitGroup
		wg.Go(func() { pace{}.mustSend(t, "client", client, 1, size) })
		wg.Go(func() { pace{}.mustReceive(t, "guest", reader, 1, size) })
		for _, buffer := range []int{400_000, 100_000, 20_000, 4_000, 200_000, 8_000} {
			require.NoError(t, server.SetReadBuffer(buffer))
			reader.open(50_000)
			time.Sleep(5 * time.Millisecond)
		}
		require.NoError(t, server.SetReadBuffer(1<<20))
		reader.open(-1)
		wg.Wait()
	})
}

// Frames that come twice or late, and a link that has no room now and then, change
// nothing; nor do those that are lost, which takes longer.
func TestFlowOverBadLink(t *testing.T) {
	for name, c := range map[string]struct {
		faults  datapathtest.Faults
		full    bool
		flows   int
		size    int
		hurried bool // is for who is in a hurry, too
	}{
		"twice":         {datapathtest.Faults{Duplicate: 0.3}, false, 4, 2 << 20, true},
		"late":          {datapathtest.Faults{Reorder: 0.1}, false, 8, 150_000, false},
		"full":          {datapathtest.Faults{}, true, 4, 2 << 20, false},
		"lost":          {datapathtest.Faults{Drop: 0.015}, false, 16, 100_000, false},
		"all of it":     {datapathtest.Faults{Drop: 0.01, Duplicate: 0.02, Reorder: 0.02, Hold: 5}, true, 16, 100_000, false},
		"lost, in bulk": {datapathtest.Faults{Drop: 0.01}, false, 2, 1 << 20, false},
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && !c.hurried {
				t.Skip("takes seconds: run without -short")
			}
			eachBed(t, 16, func(t *testing.T, b *flowBed) {
				next := b.pairs(7)
				b.setFaults(c.faults)
				b.link.SetFull(false)
				stop := make(chan struct{})
				var filling sync.WaitGroup
				if c.full {
					filling.Go(func() {
						defer b.link.SetFull(false)
						for full := true; ; full = !full {
							select {
							case <-stop:
								return
							case <-time.After(3 * time.Millisecond):
								b.link.SetFull(full)
							}
						}
					})
				}
				flows := less(c.flows, 4)
				var wg sync.WaitGroup
				for range flows {
					client, server := next()
					wg.Go(func() { bothWays(t, client, server, pace{most: 20_000}, pace{most: 20_000}, c.size) })
				}
				wg.Wait()
				close(stop)
				filling.Wait()
				for range flows {
					b.mustEnd(relay.EndClosed)
				}
				to, from := b.link.Counts()
				t.Logf("to guest %+v, from guest %+v, %d retransmitted", to, from, b.host.Stats().Retransmits)
			})
		})
	}
}

// A link that loses everything for a while loses no flow.
func TestFlowOverDeadLink(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds: run without -short")
	}
	eachBed(t, 256, func(t *testing.T, b *flowBed) {
		next := b.pairs(7)
		var wg sync.WaitGroup
		for range 8 {
			client, server := next()
			wg.Go(func() {
				bothWays(t, client, server, pace{stops: 100_000, stop: 100 * time.Millisecond}, pace{stops: 100_000, stop: 100 * time.Millisecond}, 500_000)
			})
		}
		time.Sleep(20 * time.Millisecond)
		b.setFaults(datapathtest.Faults{Drop: 1})
		time.Sleep(1500 * time.Millisecond) // past the first retransmission
		b.setFaults(datapathtest.Faults{})
		wg.Wait()
	})
}

// Messages of a few bytes, each after the answer to the last, on a good link and on
// a bad one.
func TestFlowPingPong(t *testing.T) {
	for name, c := range map[string]struct {
		faults datapathtest.Faults
		flows  int
		rounds int
	}{
		"good": {datapathtest.Faults{}, 4, 1000},
		"bad":  {datapathtest.Faults{Drop: 0.02, Duplicate: 0.05, Reorder: 0.02}, 32, 10},
	} {
		t.Run(name, func(t *testing.T) {
			eachBed(t, 256, func(t *testing.T, b *flowBed) {
				at := b.serve(7, func(c flowConn) { _, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) })
				b.setFaults(c.faults)
				var wg sync.WaitGroup
				for i := range less(c.flows, 4) {
					client := b.dial(at)
					wg.Go(func() {
						w, from := pace{most: 100}.walk(uint64(i), 1), bytesOf(uint64(i))
						for range c.rounds {
							out, in := make([]byte, w.size()), make([]byte, 0, 200)
							_, _ = io.ReadFull(from, out)
							if _, err := client.Write(out); !assert.NoError(t, err) {
								return
							}
							in = in[:len(out)]
							if _, err := io.ReadFull(client, in); !assert.NoError(t, err) || !assert.Equal(t, out, in) {
								return
							}
						}
						assert.NoError(t, client.CloseWrite())
						_, err := io.ReadAll(client)
						assert.NoError(t, err)
					})
				}
				wg.Wait()
			})
		})
	}
}

// After the end of one stream the other goes on for as long as it likes, whichever
// was first.
func TestFlowHalfClose(t *testing.T) {
	size := less(2<<20, 300_000)
	for _, first := range []string{"client", "guest"} {
		t.Run(first, func(t *testing.T) {
			eachBed(t, 256, func(t *testing.T, b *flowBed) {
				client, server := b.pairs(7)()
				a, z := client, server
				if first == "guest" {
					a, z = server, client
				}
				go func() { _ = pace{}.send(a, 1, size); _ = a.CloseWrite() }()
				pace{}.mustReceive(t, "reader of the first", z, 1, size)
				time.Sleep(150 * time.Millisecond) // the relay looks after it now
				go func() { _ = pace{}.send(z, 2, size); _ = z.CloseWrite() }()
				pace{stops: size / 4, stop: 50 * time.Millisecond}.mustReceive(t, "reader of the second", a, 2, size)
				b.mustEnd(relay.EndClosed)
			})
		})
	}
}

// Both ends close at once, also with bytes under way.
func TestFlowCloseAtOnce(t *testing.T) {
	eachBed(t, 256, func(t *testing.T, b *flowBed) {
		next := b.pairs(7)
		for i := range less(60, 15) {
			client, server := next()
			size := []int{0, 1, 3000, 100_000}[i%4]
			start := make(chan struct{})
			var wg sync.WaitGroup
			for k, c := range []flowConn{client, server} {
				wg.Go(func() {
					<-start
					pace{}.mustSend(t, "either", c, uint64(k), size)
				})
				wg.Go(func() { pace{}.mustReceive(t, "either", c, uint64(1-k), size) })
			}
			close(start)
			wg.Wait()
			b.mustEnd(relay.EndClosed)
		}
	})
}

// What was written before a close comes, however slow the reader is and though the
// writer has gone.
func TestFlowCloseBehindData(t *testing.T) {
	size := less(1<<20, 400_000)
	dawdling := pace{most: 40_000, stops: size / 10, stop: 30 * time.Millisecond}
	for _, c := range []struct {
		name   string
		client bool // writes
		end    bool // its stream before it closes
	}{
		{"client ends and closes", true, true}, {"client closes", true, false},
		{"guest ends and closes", false, true}, {"guest closes", false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachBed(t, 256, func(t *testing.T, b *flowBed) {
				client, server := b.pairs(7)()
				writer, reader := client, server
				if !c.client {
					writer, reader = server, client
				}
				gated := newGate(reader)
				go func() {
					_ = pace{}.send(writer, 1, size)
					if c.end {
						_ = writer.CloseWrite()
					}
					_ = writer.Close()
				}()
				time.Sleep(50 * time.Millisecond)
				gated.open(-1)
				dawdling.mustReceive(t, "reader", gated, 1, size)
				require.NoError(t, reader.Close())
				b.mustEnd(relay.EndClosed, relay.EndClientReset, relay.EndGuestReset)
			})
		})
	}
}

// mustBeReset asserts that c's reader gets a reset, and not an end of stream.
func mustBeReset(t testing.TB, who string, c flowConn) {
	t.Helper()
	_, err := io.Copy(io.Discard, struct{ io.Reader }{c})
	if assert.Error(t, err, "%s: the reset read as an end of stream", who) {
		assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, who)
		var timeout net.Error
		assert.False(t, errors.As(err, &timeout) && timeout.Timeout(), "%s: no reset came", who)
	}
}

// A state is what a flow is at.
type flowState struct {
	name  string
	over  string // whose stream has ended, and was read to its end
	reach func(t testing.TB, client, server flowConn)
}

func put(t testing.TB, c flowConn, n int) {
	_, err := c.Write(make([]byte, n))
	assert.NoError(t, err)
}

func drained(t testing.TB, c flowConn, n int) {
	_, err := io.ReadFull(c, make([]byte, n))
	assert.NoError(t, err)
}

func endedBy(t testing.TB, a, z flowConn) {
	assert.NoError(t, a.CloseWrite())
	n, err := z.Read(make([]byte, 1))
	assert.Zero(t, n)
	assert.ErrorIs(t, err, io.EOF)
}

// fill writes until nothing goes any more, or nearly so.
func fill(t testing.TB, c flowConn) {
	assert.NoError(t, c.SetDeadline(time.Now().Add(40*time.Millisecond)))
	_, err := c.Write(make([]byte, 64<<20))
	assert.Error(t, err)
	assert.NoError(t, c.SetDeadline(time.Now().Add(flowPatience)))
}

// flowStates are those in which both ends still are.
var flowStates = []flowState{
	{"new", "", func(testing.TB, flowConn, flowConn) {}},
	{"used", "", func(t testing.TB, client, server flowConn) {
		put(t, client, 1000)
		drained(t, server, 1000)
		put(t, server, 1000)
		drained(t, client, 1000)
	}},
	{"client has ended", "client", func(t testing.TB, client, server flowConn) { endedBy(t, client, server) }},
	{"guest has ended", "guest", func(t testing.TB, client, server flowConn) { endedBy(t, server, client) }},
	{"full to guest", "", func(t testing.TB, client, _ flowConn) { fill(t, client) }},
	{"full to client", "", func(t testing.TB, _, server flowConn) { fill(t, server) }},
	{"full both ways", "", func(t testing.TB, client, server flowConn) { fill(t, client); fill(t, server) }},
	{"client has ended, full to client", "client", func(t testing.TB, client, server flowConn) {
		endedBy(t, client, server)
		fill(t, server)
	}},
	{"guest has ended, full to guest", "guest", func(t testing.TB, client, server flowConn) {
		endedBy(t, server, client)
		fill(t, client)
	}},
}

// A reset of one end is the other's reset, never its end (C-13), in every state.
func TestFlowReset(t *testing.T) {
	for _, by := range []string{"client", "guest"} {
		for _, s := range flowStates {
			t.Run(by+"/"+s.name, func(t *testing.T) {
				eachBed(t, 256, func(t *testing.T, b *flowBed) {
					client, server := b.pairs(7)()
					b.ours(client) // a reset before that is a refusal
					s.reach(t, client, server)
					one, other, end := client, server, relay.EndClientReset
					if by == "guest" {
						one, other, end = server, client, relay.EndGuestReset
					}
					one.reset()
					if s.over != by { // else it has read to the end already
						mustBeReset(t, "the other", other)
					}
					b.mustEnd(end)
				})
			})
		}
	}
}

// Our own abort ends a flow in every state: both ends are reset and everything is
// given back.
func TestFlowAbort(t *testing.T) {
	for _, by := range []string{"client", "guest", "both"} {
		for _, s := range flowStates {
			t.Run(by+"/"+s.name, func(t *testing.T) {
				eachBed(t, 256, func(t *testing.T, b *flowBed) {
					client, server := b.pairs(7)()
					u := b.ours(client)
					s.reach(t, client, server)
					if by != "client" {
						u.guest.Abort()
					}
					if by != "guest" {
						u.client.Abort()
					}
					b.mustEnd(relay.EndAborted)
					b.eventually("the flow is given back", func() bool { return b.host.Stats().Flows == 0 })
					if s.over != "guest" {
						mustBeReset(t, "client", client)
					}
					if s.over != "client" {
						mustBeReset(t, "guest", server)
					}
				})
			})
		}
	}
}

// A dial is given up in each of its states: the guest has not heard of it, or its
// answer has not come, or it has just come.
func TestFlowAbortedDial(t *testing.T) {
	lost := datapathtest.Faults{Drop: 1}
	for name, faults := range map[string][2]datapathtest.Faults{
		"not heard":    {lost, {}},
		"not answered": {{}, lost},
		"under way":    {},
	} {
		t.Run(name, func(t *testing.T) {
			eachBed(t, 256, func(t *testing.T, b *flowBed) {
				at := b.serve(7, func(c flowConn) { _, _ = io.Copy(io.Discard, struct{ io.Reader }{c}) })
				b.dialErr = func(err error) { assert.ErrorIs(t, err, net.ErrClosed) }
				b.link.SetFaults(faults[0], faults[1])
				for range 20 {
					client := b.dial(at)
					key := client.LocalAddr().(*net.TCPAddr).AddrPort()
					var u underWay
					b.eventually("a dial under way", func() bool {
						b.mu.Lock()
						defer b.mu.Unlock()
						if b.under[key] == nil {
							return false
						}
						u = *b.under[key]
						return u.cancel != nil
					})
					if u.guest == nil && len(b.ended) == 0 {
						u.cancel()
					}
					u.client.Abort()
					mustBeReset(t, "client", client)
				}
				b.link.SetFaults(datapathtest.Faults{}, datapathtest.Faults{})
				b.eventually("no flow is left", func() bool { return b.host.Stats().Flows == 0 && b.live() == 0 })
			})
		})
	}
}

// A stack that is closed resets its flows, in every state: no client takes that for
// an end.
func TestFlowStackClosed(t *testing.T) {
	for _, gone := range []bool{false, true} {
		t.Run(fmt.Sprintf("link lost=%t", gone), func(t *testing.T) {
			eachBed(t, 256, func(t *testing.T, b *flowBed) {
				next := b.pairs(7)
				clients, servers := make([]flowConn, len(flowStates)), make([]flowConn, len(flowStates))
				for i, s := range flowStates {
					clients[i], servers[i] = next()
					s.reach(t, clients[i], servers[i])
				}
				if gone {
					b.setFaults(datapathtest.Faults{Drop: 1})
				}
				require.NoError(t, b.host.Close())
				for i, s := range flowStates {
					// It reads first what had come for it: its flow ends no sooner.
					if s.over != "guest" {
						mustBeReset(t, "client of "+s.name, clients[i])
					}
					servers[i].reset()
				}
				for range flowStates {
					b.mustEnd(relay.EndAborted, relay.EndGuestReset)
				}
				assert.Zero(t, b.host.Stats().Flows)
			})
		})
	}
}

// What a client does not read keeps no flow: neither of a guest that resets it, unless the
// client has ended its stream and may yet read, nor of a stack that is closed, whether the
// guest has reset it before or not.
func TestFlowUnread(t *testing.T) {
	for _, by := range []string{"guest", "stack", "guest and stack"} {
		for _, s := range flowStates {
			if !strings.Contains(s.name, "full to client") || by == "guest" && s.over == "client" {
				continue
			}
			t.Run(by+"/"+s.name, func(t *testing.T) {
				eachBed(t, 256, func(t *testing.T, b *flowBed) {
					client, server := b.pairs(7)()
					s.reach(t, client, server)
					if by != "stack" {
						resets := b.host.Stats().ResetsReceived
						server.reset()
						b.eventually("the reset has come", func() bool { return b.host.Stats().ResetsReceived > resets })
					}
					if by != "guest" {
						require.NoError(t, b.host.Close())
					}
					b.mustEnd(relay.EndAborted, relay.EndGuestReset)
					b.eventually("no flow is left", func() bool { return b.host.Stats().Flows == 0 && b.live() == 0 })
				})
			})
		}
	}
}

// A client that resets is seen though the guest reads nothing, and so nobody the client's
// bytes (C-16).
func TestFlowLeft(t *testing.T) {
	for _, s := range flowStates {
		if s.over != "" || !strings.Contains(s.name, "full") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			eachBed(t, 256, func(t *testing.T, b *flowBed) {
				client, server := b.pairs(7)()
				b.ours(client)
				s.reach(t, client, server)
				client.reset()
				b.mustEnd(relay.EndClientReset)
				b.eventually("no flow is left", func() bool { return b.host.Stats().Flows == 0 && b.live() == 0 })
			})
		})
	}
}

// Short connections, one after the other and many at once, whichever end is the
// first to close; the ports of the flows before are used again, also those the guest
// still keeps in TIME_WAIT.
func TestFlowShort(t *testing.T) {
	for _, first := range []string{"client", "guest"} {
		for name, c := range map[string]struct{ lanes, each int }{
			"one after the other": {1, less(unraced(2500, 600), 300)},
			"64 at once":          {64, less(unraced(40, 10), 5)},
		} {
			t.Run(first+" closes first/"+name, func(t *testing.T) {
				eachBed(t, 256, func(t *testing.T, b *flowBed) {
					if first == "guest" && c.lanes == 1 {
						// A tenth as many as there are flows: ours are free as they end.
						first := uint16(20_000)
						require.Nil(t, b.host.net.SetPortRange(first, first+uint16(c.each/10)))
					}
					at := b.serve(7, func(c flowConn) {
						buf := make([]byte, 100)
						n, err := io.ReadAtLeast(c, buf, 10)
						if err != nil {
							return
						}
						_, _ = c.Write(buf[:n])
						if first == "guest" {
							return // closes
						}
						_, _ = io.Copy(io.Discard, struct{ io.Reader }{c})
					})
					var wg sync.WaitGroup
					for lane := range c.lanes {
						wg.Go(func() {
							for i := range c.each {
								question := fmt.Sprintf("%05d%05d", lane, i)
								nc, err := net.Dial("tcp4", at.String())
								if !assert.NoError(t, err) {
									return
								}
								client := nc.(*net.TCPConn)
								_ = client.SetDeadline(time.Now().Add(flowPatience))
								_, err = client.Write([]byte(question))
								assert.NoError(t, err)
								if first == "client" {
									assert.NoError(t, client.CloseWrite())
								}
								got, err := io.ReadAll(client)
								ok := assert.NoError(t, err, "flow %d of lane %d", i, lane) && assert.Equal(t, question, string(got))
								_ = client.Close()
								if !ok {
									return
								}
							}
						})
					}
					wg.Wait()
					for range c.lanes * c.each {
						if t.Failed() {
							return
						}
						b.mustEnd(relay.EndClosed)
					}
				})
			})
		}
	}
}
