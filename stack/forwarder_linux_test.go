package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var ctx = context.Background()

// mustForwarder returns a Forwarder that the test's end shuts down.
func mustForwarder(tb testing.TB, o Options) *Forwarder {
	tb.Helper()
	f, err := New(o)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		f.Shutdown(ended)
	})
	return f
}

// mustAttached returns a Forwarder with one guest as VM "default".
func mustAttached(tb testing.TB, o Options) (*Forwarder, *hostGuest) {
	tb.Helper()
	f, g := mustForwarder(tb, o), newHostGuest()
	f.AttachVM("default", VM{Guest: g, Node: node})
	return f, g
}

func mustSpec(tb testing.TB, text string) listener.Spec {
	tb.Helper()
	s, err := listener.ParseSpec(text)
	require.NoError(tb, err)
	s.Target.VM = "default"
	return s
}

func owner(id string) listener.Owner { return listener.Owner{Kind: listener.KindCLI, ID: id} }

// publish publishes texts as owner id's whole set.
func publish(tb testing.TB, f *Forwarder, id string, texts ...string) []listener.Outcome {
	tb.Helper()
	specs := make([]listener.Spec, len(texts))
	for i, text := range texts {
		specs[i] = mustSpec(tb, text)
	}
	return f.Publish(ctx, owner(id), specs)
}

// mustPublish publishes one text and returns where it is bound.
func mustPublish(tb testing.TB, f *Forwarder, id, text string) []netip.AddrPort {
	tb.Helper()
	out := publish(tb, f, id, text)
	require.Len(tb, out, 1)
	require.Equal(tb, listener.Forwarded, out[0].State, out[0].Detail)
	return out[0].Bound
}

// given are the ports that freePort has returned.
var given = make(map[uint16]bool)

// freePort returns a port that nobody has, on either loopback address, for TCP
// and UDP, and that it has not returned before. It lies below those that the
// kernel gives to clients, of which TIME_WAIT may hold most.
func freePort(tb testing.TB) uint16 {
	tb.Helper()
	for range 100 {
		port := uint16(10_000 + rand.IntN(20_000))
		if !given[port] && free(port) {
			given[port] = true
			return port
		}
	}
	tb.Fatal("no port is free")
	return 0
}

// free reports whether any program could have the port.
func free(port uint16) bool {
	for _, host := range []string{"127.0.0.1", "::1"} {
		at := net.JoinHostPort(host, fmt.Sprint(port))
		l, err := net.Listen("tcp", at)
		if err != nil {
			return false
		}
		l.Close()
		u, err := net.ListenPacket("udp", at)
		if err != nil {
			return false
		}
		u.Close()
	}
	return true
}

func dial(tb testing.TB, at netip.AddrPort) *net.TCPConn {
	tb.Helper()
	c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(at))
	require.NoError(tb, err)
	tb.Cleanup(func() { c.Close() })
	require.NoError(tb, c.SetDeadline(time.Now().Add(patience)))
	return c
}

// ask returns what the server at the other end says on its own.
func ask(tb testing.TB, at netip.AddrPort) string {
	tb.Helper()
	c := dial(tb, at)
	defer c.Close()
	b, err := io.ReadAll(c)
	require.NoError(tb, err)
	return string(b)
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// requireReset reads until the connection ends and wants that to be a reset.
func requireReset(tb testing.TB, c *net.TCPConn) {
	tb.Helper()
	_, err := io.Copy(io.Discard, c)
	require.True(tb, isReset(err), "want a reset, got %v", err)
}

// ping proves that an echo flow is alive.
func ping(tb testing.TB, c *net.TCPConn) {
	tb.Helper()
	_, err := io.WriteString(c, "ping")
	require.NoError(tb, err)
	b := make([]byte, 4)
	_, err = io.ReadFull(c, b)
	require.NoError(tb, err)
	require.Equal(tb, "ping", string(b))
}

func only(tb testing.TB, f *Forwarder) Row {
	tb.Helper()
	rows := f.Rows()
	require.Len(tb, rows, 1)
	return rows[0]
}

func eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	require.Eventually(tb, ok, patience, time.Millisecond, what)
}

func at4(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
}

// Stating a set again changes nothing; stating another one touches only the
// difference.
func TestC2LevelTriggered(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, echo)
	a, b, c := freePort(t), freePort(t), freePort(t)
	text := func(p uint16) string { return fmt.Sprintf("%d:80", p) }

	first := publish(t, f, "x", text(a), text(b))
	clientA, clientB := dial(t, at4(a)), dial(t, at4(b))
	ping(t, clientA)
	ping(t, clientB)
	changed := f.Changed()
	assert.Equal(t, first, publish(t, f, "x", text(a), text(b)))
	select {
	case <-changed:
		assert.Fail(t, "nothing changed")
	default:
	}

	out := publish(t, f, "x", text(c), text(a), text(a))
	require.Len(t, out, 3, "one for each spec, also when they are equal")
	for _, o := range out {
		assert.Equal(t, listener.Forwarded, o.State, o.Detail)
	}
	<-changed
	assert.Equal(t, first[0], out[1])
	assert.Len(t, f.Rows(), 2)
	ping(t, clientA)
	requireReset(t, clientB)
	assert.True(t, free(b))
	ping(t, dial(t, at4(c)))
	assert.Equal(t, []listener.Owner{owner("x")}, f.Owners())

	f.Withdraw(ctx, owner("x"))
	f.Withdraw(ctx, owner("x"))
	f.Withdraw(ctx, owner("never heard of"))
	assert.Empty(t, f.Rows())
	assert.Empty(t, f.Owners())
	requireReset(t, clientA)
}

// The rows of some owners are the ledger's, without the others'.
func TestRowsOf(t *testing.T) {
	f, _ := mustAttached(t, Options{})
	publish(t, f, "x", "127.0.0.1:0:81", "127.0.0.1:0:80", "127.0.0.1:0:82/udp")
	publish(t, f, "y", "127.0.0.1:0:83")
	publish(t, f, "z", "127.0.0.1:0:84")
	ledger := f.Rows()
	require.Len(t, ledger, 5)
	assert.Equal(t, ledger[:3], f.RowsOf(owner("x")))
	assert.Equal(t, slices.Concat(ledger[4:], ledger[:3]), f.RowsOf(owner("z"), owner("never heard of"), owner("x")))
	assert.Equal(t, []Row{ledger[3], ledger[3]}, f.RowsOf(owner("y"), owner("y")))
	assert.Empty(t, f.RowsOf())
}

// The second owner of a port fails with the first one's name and takes over with
// its own target; the first, back again, waits.
func TestC3FB101Promotion(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 81, say("a"))
	g.serveTCP(t, 82, say("b"))
	g.serveTCP(t, 83, hold)
	p := freePort(t)
	mustPublish(t, f, "a", fmt.Sprintf("%d:81", p))
	out := publish(t, f, "b", fmt.Sprintf("127.0.0.1:%d:82", p))
	assert.Equal(t, listener.Failed, out[0].State)
	require.ErrorIs(t, out[0].Err, listener.ErrConflict)
	assert.Contains(t, out[0].Detail, "belongs to cli a")
	assert.True(t, out[0].RetryAt.IsZero(), "it is promoted, not tried")
	assert.Equal(t, "a", ask(t, at4(p)))

	f.Withdraw(ctx, owner("a"))
	rows := f.Rows()
	require.Len(t, rows, 1)
	assert.Equal(t, listener.Forwarded, rows[0].Outcome.State, rows[0].Outcome.Detail)
	assert.Equal(t, "b", ask(t, at4(p)))

	out = publish(t, f, "a", fmt.Sprintf("%d:81", p))
	assert.Equal(t, listener.Failed, out[0].State)
	assert.Equal(t, "b", ask(t, at4(p)), "no theft")

	// A change of the target only keeps the port.
	mustPublish(t, f, "b", fmt.Sprintf("127.0.0.1:%d:83", p))
	assert.Equal(t, listener.Failed, f.Rows()[0].Outcome.State)
}

// What can never be served says so and keeps the port from nobody.
func TestSkippedClaimsNothing(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, say("b"))
	p := freePort(t)
	client := mustSpec(t, fmt.Sprintf("%d:80", p))
	client.Source = listener.SourceClient
	noGuestPort := mustSpec(t, fmt.Sprintf("%d:80", p))
	noGuestPort.Target.Addr = netip.AddrPort{}
	for _, s := range []listener.Spec{client, noGuestPort} {
		out := f.Publish(ctx, owner("a"), []listener.Spec{s})
		assert.Equal(t, listener.Skipped, out[0].State)
		assert.NotEmpty(t, out[0].Detail)
		assert.True(t, out[0].RetryAt.IsZero())
		mustPublish(t, f, "b", fmt.Sprintf("%d:80", p))
		assert.Equal(t, "b", ask(t, at4(p)))
		f.Withdraw(ctx, owner("b"))
	}
}

// When Withdraw returns, any program can have the port, with and without an open
// connection on it.
func TestC4FB067FreeWhenWithdrawn(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, echo)
	g.serveUDP(t, 80, echoUDP)
	p := freePort(t)
	for i := range 50 {
		out := publish(t, f, "x", fmt.Sprintf("%d:80", p), fmt.Sprintf("%d:80/udp", p))
		require.Equal(t, listener.Forwarded, out[0].State, out[0].Detail)
		require.Equal(t, listener.Forwarded, out[1].State, out[1].Detail)
		var c *net.TCPConn
		if i%2 == 0 {
			c = dial(t, at4(p))
			ping(t, c)
		}
		f.Withdraw(ctx, owner("x"))
		require.True(t, free(p), i)
		if c != nil {
			requireReset(t, c)
			c.Close()
		}
	}
	assert.Zero(t, g.endpoint.Load())
}

// A port that another process has is tried again until it is free; what changes
// nothing is silent.
func TestC7FB069Retry(t *testing.T) {
	var log lockedBuffer
	f, g := mustAttached(t, Options{
		Timeouts: Timeouts{BindRetry: 20 * time.Millisecond}, Log: slog.New(slog.NewTextHandler(&log, nil)),
	})
	g.serveTCP(t, 80, say("hello"))
	foreign, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := netip.MustParseAddrPort(foreign.Addr().String()).Port()
	out := publish(t, f, "x", fmt.Sprintf("127.0.0.1:%d:80", p))
	assert.Equal(t, listener.Failed, out[0].State)
	require.ErrorIs(t, out[0].Err, listener.ErrInUse)
	assert.False(t, out[0].RetryAt.IsZero())
	since, retryAt := out[0].Since, out[0].RetryAt
	eventually(t, "five tries", func() bool {
		o := only(t, f).Outcome
		return o.RetryAt.Sub(retryAt) > 100*time.Millisecond
	})
	assert.Equal(t, since, only(t, f).Outcome.Since, "failed since then")
	assert.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())

	changed := f.Changed()
	foreign.Close()
	<-changed
	eventually(t, "forwarded", func() bool { return only(t, f).Outcome.State == listener.Forwarded })
	assert.Equal(t, "hello", ask(t, at4(p)))
	assert.True(t, only(t, f).Outcome.RetryAt.IsZero())
	// A try while it was closed found the port taken and, when it looked, nobody who had
	// it: another detail, which is said.
	between := strings.Count(log.String(), "is in use by another process")
	assert.LessOrEqual(t, between, 1, log.String())
	assert.Equal(t, 2+between, strings.Count(log.String(), "\n"), log.String())

	// The reverse: it goes while it is failed.
	foreign, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer foreign.Close()
	out = publish(t, f, "x", fmt.Sprintf("%s:80", foreign.Addr()))
	assert.Equal(t, listener.Failed, out[0].State)
	f.Withdraw(ctx, owner("x"))
	assert.Empty(t, f.Rows())
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// One socket of several that cannot be bound makes the row failed; the others
// carry traffic (C-5).
func TestC5PartlyBound(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, say("hello"))
	var p uint16 // taken in one family only
	for p == 0 {
		foreign, err := net.Listen("tcp", "[::1]:0")
		require.NoError(t, err)
		defer foreign.Close()
		if port := netip.MustParseAddrPort(foreign.Addr().String()).Port(); canBind(at4(port)) {
			p = port
		}
	}
	out := publish(t, f, "x", fmt.Sprintf("%d:80", p))
	assert.Equal(t, listener.Failed, out[0].State)
	assert.Contains(t, out[0].Detail, fmt.Sprintf("[::1]:%d", p))
	assert.Equal(t, []netip.AddrPort{at4(p)}, out[0].Bound)
	assert.Equal(t, "hello", ask(t, at4(p)))
}

func canBind(at netip.AddrPort) bool {
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		return false
	}
	l.Close()
	return true
}

// 127.0.0.1:P and [::1]:P are two publishes that always reach their own servers.
func TestC1FB061KeyHasTheAddress(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 81, say("four"))
	g.serveTCP(t, 82, say("six"))
	g.serveUDP(t, 83, echoUDP)
	p := freePort(t)
	texts := []string{fmt.Sprintf("127.0.0.1:%d:81", p), fmt.Sprintf("[::1]:%d:82", p), fmt.Sprintf("127.0.0.1:%d:83/udp", p)}
	for range 30 {
		rand.Shuffle(len(texts), func(i, j int) { texts[i], texts[j] = texts[j], texts[i] })
		for _, o := range publish(t, f, "x", texts...) {
			require.Equal(t, listener.Forwarded, o.State, o.Detail)
		}
		require.Equal(t, "four", ask(t, at4(p)))
		require.Equal(t, "six", ask(t, netip.AddrPortFrom(netip.IPv6Loopback(), p)))
		if rand.IntN(3) == 0 {
			f.Withdraw(ctx, owner("x"))
		}
	}
}

// The same number on both sides is no loop.
func TestFB062SameNumber(t *testing.T) {
	f, g := mustAttached(t, Options{})
	for range 10 {
		n := freePort(t)
		g.serveTCP(t, n, say(fmt.Sprint(n)))
		for _, form := range []string{"127.0.0.1:%d:%d", "[::1]:%d:%d", "0.0.0.0:%d:%d", "%d:%d"} {
			bound := mustPublish(t, f, "x", fmt.Sprintf(form, n, n))
			for _, at := range bound {
				assert.Equal(t, fmt.Sprint(n), ask(t, at))
			}
		}
	}
}

// A range leads port by port, and the row says where.
func TestRange(t *testing.T) {
	f, g := mustAttached(t, Options{})
	for i := range uint16(3) {
		g.serveTCP(t, 7000+i, say(fmt.Sprint(i)))
	}
	var first uint16
	for first = freePort(t); !free(first+1) || !free(first+2); first = freePort(t) {
	}
	mustPublish(t, f, "x", fmt.Sprintf("%d-%d:7000-7002", first, first+2))
	for i := range uint16(3) {
		assert.Equal(t, fmt.Sprint(i), ask(t, at4(first+i)))
	}
	row := only(t, f)
	assert.Equal(t, fmt.Sprintf("127.0.0.1:%d-%d", first, first+2), row.Host)
	assert.Equal(t, "198.18.0.2:7000-7002", row.Guest)
	assert.EqualValues(t, 3, row.Flows.Total)
}

// Without its VM a row is pending and its port free; with it, forwarded on the
// same port, whoever chose that (C-26, C-27).
func TestC26C27VMComesAndGoes(t *testing.T) {
	f, g := mustForwarder(t, Options{}), newHostGuest()
	g.serveTCP(t, 80, echo)
	p := freePort(t)
	out := publish(t, f, "x", fmt.Sprintf("%d:80", p), "127.0.0.1:0:80")
	for _, o := range out {
		assert.Equal(t, listener.Pending, o.State)
		assert.Equal(t, "VM default is not there", o.Detail)
		require.ErrorIs(t, o.Err, listener.ErrNoVM)
		assert.Empty(t, o.Bound)
	}
	assert.True(t, free(p))
	f.DetachVM("default") // nothing to do

	var picked netip.AddrPort
	for range 3 {
		f.AttachVM("default", VM{Guest: g, Node: node})
		rows := f.Rows()
		require.Len(t, rows, 2)
		for _, r := range rows {
			require.Equal(t, listener.Forwarded, r.Outcome.State, r.Outcome.Detail)
			assert.Equal(t, "198.18.0.2:80", r.Guest)
		}
		if picked.IsValid() {
			assert.Equal(t, picked, rows[1].Outcome.Bound[0])
		}
		picked = rows[1].Outcome.Bound[0]
		clients := []*net.TCPConn{dial(t, at4(p)), dial(t, picked)}
		for _, c := range clients {
			ping(t, c)
		}

		f.AttachVM("other", VM{Guest: g, Node: node})
		f.DetachVM("other")
		for _, c := range clients {
			ping(t, c)
		}

		f.DetachVM("default")
		for _, r := range f.Rows() {
			assert.Equal(t, listener.Pending, r.Outcome.State)
			assert.Empty(t, r.Outcome.Bound)
			assert.Zero(t, r.Flows.Active)
			assert.Equal(t, "198.18.0.2:80", r.Guest)
		}
		for _, c := range clients {
			requireReset(t, c)
		}
		assert.True(t, free(p) && free(picked.Port()))
		assert.Zero(t, g.endpoint.Load())
	}
	assert.EqualValues(t, 3, f.Rows()[0].Flows.Total)
}

// Attaching again replaces the life before.
func TestC27AttachTwice(t *testing.T) {
	f, g := mustAttached(t, Options{})
	g.serveTCP(t, 80, echo)
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	old := dial(t, at)
	ping(t, old)
	second := newHostGuest()
	second.serveTCP(t, 80, say("second"))
	f.AttachVM("default", VM{Guest: second, Node: node})
	requireReset(t, old)
	assert.Equal(t, "second", ask(t, at))
}

// All flows of a VM that goes are reset at once, those that dial as well.
func TestC26ManyFlows(t *testing.T) {
	const n = 500
	f, g := mustAttached(t, Options{Timeouts: Timeouts{Connect: time.Hour}})
	g.serveTCP(t, 80, hold)
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	silent := mustPublish(t, f, "y", fmt.Sprintf("127.0.0.1:0:%d", portSilent))[0]
	var clients []*net.TCPConn
	for range n {
		clients = append(clients, dial(t, at), dial(t, silent))
	}
	eventually(t, "all flows", func() bool { return g.endpoint.Load() == n && g.dialing.Load() == n })
	require.Len(t, f.Flows(), 2*n)
	start := time.Now()
	f.DetachVM("default")
	t.Logf("%d flows retired in %s", 2*n, time.Since(start))
	assert.Empty(t, f.Flows())
	assert.Zero(t, g.endpoint.Load())
	assert.Zero(t, g.dialing.Load())
	for _, c := range clients {
		requireReset(t, c)
		c.Close()
	}
}

// A broken VM delays no other (C-29).
func TestC29Independent(t *testing.T) {
	f, g := mustAttached(t, Options{Timeouts: Timeouts{Connect: time.Hour}})
	g.serveTCP(t, 80, say("fine"))
	broken := newHostGuest()
	f.AttachVM("broken", VM{Guest: broken, Node: node})
	s := mustSpec(t, fmt.Sprintf("127.0.0.1:0:%d", portSilent))
	s.Target.VM = "broken"
	out := f.Publish(ctx, owner("b"), []listener.Spec{s})
	dial(t, out[0].Bound[0])
	eventually(t, "a dial", func() bool { return broken.dialing.Load() == 1 })
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	assert.Equal(t, "fine", ask(t, at))
	f.Withdraw(ctx, owner("x"))
	f.DetachVM("broken")
	assert.Zero(t, broken.dialing.Load())
}

// Adding, removing, VMs that come and go, in any order: what is open is always
// what was asked for.
func TestFB070RandomWalk(t *testing.T) {
	f, g := mustForwarder(t, Options{}), newHostGuest()
	for i := range uint16(4) {
		g.serveTCP(t, 100+i, say(fmt.Sprint(i)))
	}
	ports := []uint16{freePort(t), freePort(t), freePort(t), freePort(t)}
	var asked []string           // owners, in the order of asking
	has := map[string][]uint16{} // what they ask for
	attached := false
	rng := rand.New(rand.NewPCG(1, 2))
	for step := range 500 {
		id := fmt.Sprint(rng.IntN(4))
		switch rng.IntN(6) {
		case 0:
			attached = true
			f.AttachVM("default", VM{Guest: g, Node: node})
		case 1:
			attached = false
			f.DetachVM("default")
		case 2:
			f.Withdraw(ctx, owner(id))
			delete(has, id)
		default:
			// All or nothing, so that the order of asking is that of owners.
			if _, there := has[id]; there {
				publishWalk(t, f, id, has[id])
				break
			}
			set := append([]uint16(nil), ports[:1+rng.IntN(len(ports))]...)
			has[id] = set
			asked = append(asked, id)
			publishWalk(t, f, id, set)
		}
		asked = append([]string(nil), asked...)
		kept := asked[:0]
		seen := map[string]bool{}
		for i := len(asked) - 1; i >= 0; i-- { // the last time each asked anew
			if _, there := has[asked[i]]; there && !seen[asked[i]] {
				seen[asked[i]] = true
				kept = append([]string{asked[i]}, kept...)
			}
		}
		asked = kept

		holder := map[uint16]string{}
		for _, id := range asked {
			for _, p := range has[id] {
				if holder[p] == "" {
					holder[p] = id
				}
			}
		}
		total := 0
		for _, r := range f.Rows() {
			total++
			p := r.Outcome.Spec.Host.Port()
			want := listener.Failed
			switch {
			case holder[p] == r.Owner.ID && attached:
				want = listener.Forwarded
			case holder[p] == r.Owner.ID:
				want = listener.Pending
			}
			require.Equal(t, want, r.Outcome.State, "step %d: %s: %s", step, r.Owner, r.Outcome.Detail)
		}
		for _, set := range has {
			total -= len(set)
		}
		require.Zero(t, total, "as many rows as were asked for")
		p := ports[step%len(ports)]
		if attached && holder[p] != "" {
			require.Equal(t, holder[p], ask(t, at4(p)))
		} else {
			require.True(t, canBind(at4(p)), "step %d", step)
		}
	}
}

// publishWalk has each owner lead all of its ports to its own server.
func publishWalk(tb testing.TB, f *Forwarder, id string, ports []uint16) {
	tb.Helper()
	texts := make([]string, len(ports))
	for i, p := range ports {
		texts[i] = fmt.Sprintf("127.0.0.1:%d:10%s", p, id)
	}
	publish(tb, f, id, texts...)
}

// A port of the daemon's own is nobody's.
func TestReserve(t *testing.T) {
	f, _ := mustAttached(t, Options{})
	p := freePort(t)
	require.NoError(t, f.Reserve(listener.TCP, at4(p), "metrics"))
	out := publish(t, f, "x", fmt.Sprintf("%d:80", p))
	assert.Equal(t, listener.Failed, out[0].State)
	assert.Contains(t, out[0].Detail, "metrics")
}

// Shutdown lets a flow finish, resets what does not, and leaves nothing.
func TestC51Shutdown(t *testing.T) {
	f, g := mustAttached(t, Options{Timeouts: Timeouts{Drain: time.Minute}})
	g.serveTCP(t, 80, echo)
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	c := dial(t, at)
	ping(t, c)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		f.Shutdown(ctx)
	}()
	eventually(t, "the listener is closed", func() bool { return canBind(at) })
	ping(t, c)
	require.NoError(t, c.CloseWrite())
	_, err := io.ReadAll(c)
	require.NoError(t, err, "it ended by itself")
	<-stopped
	f.Shutdown(ctx)
	out := publish(t, f, "y", "127.0.0.1:0:80")
	assert.NotEqual(t, listener.Forwarded, out[0].State)
	require.ErrorIs(t, out[0].Err, ErrShutDown)
	f.AttachVM("default", VM{Guest: g, Node: node})
	f.DetachVM("default")
	assert.Zero(t, g.endpoint.Load())
}

func TestC51ShutdownResetsTheRest(t *testing.T) {
	f, g := mustAttached(t, Options{Timeouts: Timeouts{Drain: 10 * time.Millisecond}})
	g.serveTCP(t, 80, echo)
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	c := dial(t, at)
	ping(t, c)
	f.Shutdown(ctx)
	requireReset(t, c)
	assert.Zero(t, g.endpoint.Load())
}

// A VM that goes while the daemon drains.
func TestDetachWhileDraining(t *testing.T) {
	f, g := mustAttached(t, Options{Timeouts: Timeouts{Drain: time.Hour}})
	g.serveTCP(t, 80, echo)
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	c := dial(t, at)
	ping(t, c)
	var wg sync.WaitGroup
	wg.Go(func() { f.Shutdown(ctx) })
	wg.Go(func() { f.DetachVM("default") })
	wg.Wait()
	requireReset(t, c)
}

// What can never be reached is skipped, and said, before a client is refused.
func TestIPv6TargetSkipped(t *testing.T) {
	f, _ := mustAttached(t, Options{})
	out := publish(t, f, "x", "0:[fd00::1]:80")
	assert.Equal(t, listener.Skipped, out[0].State)
	assert.Contains(t, out[0].Detail, "IPv4 only")
	assert.Empty(t, out[0].Bound)
}

// Our own address on the link is no guest's.
func TestGatewayTargetSkipped(t *testing.T) {
	f, _ := mustAttached(t, Options{})
	f.SetGateway("default", netip.MustParseAddr("198.18.7.1"))
	p := freePort(t)
	out := publish(t, f, "x", fmt.Sprintf("%d:198.18.7.1:80", p))
	assert.Equal(t, listener.Skipped, out[0].State)
	assert.Contains(t, out[0].Detail, "198.18.7.1 is culvert's own address")
	mustPublish(t, f, "y", fmt.Sprintf("%d:198.18.7.2:80", p)) // the port is nobody's
}
