package netstack

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	hostAddr  = netip.MustParsePrefix("198.18.0.1/24")
	guestAddr = netip.MustParsePrefix("198.18.0.2/24")
)

const everyOffload = virtio.OffloadCSum | virtio.OffloadTSO4

// twoStacks joins a host's and a guest's stack in memory.
func twoStacks(t testing.TB, o memory.Options) (host, guest *Stack) {
	t.Helper()
	ours, theirs := memory.Pair(o)
	return joined(t, ours, theirs)
}

// joined makes stacks on both ends of a link.
func joined(t testing.TB, ours, theirs datapath.Attachment) (host, guest *Stack) {
	t.Helper()
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, host.Close()) })
	guest, err = New(theirs, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, Seed: "guest"})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, guest.Close()) })
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = host.Probe(ctx)
	require.NoError(t, err)
	_, err = guest.Probe(ctx)
	require.NoError(t, err)
	return host, guest
}

// offloads are the kinds of link the stack has to be right on (FB-139).
var offloads = map[string]memory.Options{
	"none":     {},
	"csum+tso": {ToGuest: everyOffload, FromGuest: everyOffload},
	"csum":     {ToGuest: virtio.OffloadCSum, FromGuest: virtio.OffloadCSum},
	"shallow":  {ToGuest: everyOffload, FromGuest: everyOffload, Depth: 4},
}

// serve runs handler for every connection to port until the test ends.
func serve(t testing.TB, s *Stack, port uint16, handler func(net.Conn)) {
	t.Helper()
	l, err := s.ListenTCP(port)
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go handler(c)
		}
	}()
}

// hold is a server that does nothing until the test ends.
func hold(t testing.TB) func(net.Conn) {
	end := make(chan struct{})
	t.Cleanup(func() { close(end) })
	return func(net.Conn) { <-end }
}

func mustDial(t testing.TB, s *Stack, port uint16) *Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := s.DialTCP(ctx, netip.AddrPortFrom(guestAddr.Addr(), port))
	require.NoError(t, err)
	t.Cleanup(c.Abort)
	return c
}

// A hostClient is a listener's client as package stack hands it to the relay.
type hostClient struct{ *listener.Conn }

func (c hostClient) Watch(ready func(relay.Ready)) error {
	return c.Conn.Watch(func(r listener.Ready) { ready(relay.Ready(r)) })
}

// clientPair returns a client and the Conn that it became, as for a published port.
func clientPair(t testing.TB) (client *net.TCPConn, ours hostClient) {
	t.Helper()
	accepted := make(accepting, 1)
	g, err := listener.NewGroup(accepted)
	require.NoError(t, err)
	l, err := g.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0"), nil)
	require.NoError(t, err)
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	ours = hostClient{<-accepted}
	t.Cleanup(func() { _ = c.Close(); _ = ours.Close(); _ = g.Close() })
	return c.(*net.TCPConn), ours
}

// accepting is a listener.Handler that takes clients.
type accepting chan *listener.Conn

func (a accepting) Accepted(_ *listener.Socket, c *listener.Conn) { a <- c }
func (accepting) Readable(*listener.Socket)                       {}
func (accepting) AcceptError(*listener.Socket, error)             {}

// copies begins c's copies and returns how each of them ends.
func copies(c relay.GuestConn, client relay.Conn) map[relay.Half]chan error {
	ended := map[relay.Half]chan error{relay.HalfClient: make(chan error, 1), relay.HalfGuest: make(chan error, 1)}
	c.Copy(client, func(from relay.Half, err error) { ended[from] <- err })
	return ended
}

// TestFB139_EveryOffload sends bytes both ways through host sockets over every kind of link,
// in sizes around one segment and one super-frame.
func TestFB139_EveryOffload(t *testing.T) {
	for name, o := range offloads {
		for _, size := range []int{1, 1419, 1460, 1461, 16 << 10, 16<<10 + 1, 65536, 8 << 20} {
			t.Run(name, func(t *testing.T) {
				datapathtest.Leaks(t)
				host, guest := twoStacks(t, o)
				want := make([]byte, size)
				_, _ = rand.Read(want)
				// The guest sends back what it got, once all has come.
				serve(t, guest, 7, func(c net.Conn) {
					got, _ := io.ReadAll(c)
					_, _ = c.Write(got)
					_ = c.Close()
				})
				conn := mustDial(t, host, 7)
				var read, written relay.Meter
				conn.SetMeters(&read, &written)
				client, ours := clientPair(t)
				done := copies(conn, ours)
				go func() {
					_, _ = client.Write(want)
					_ = client.CloseWrite()
				}()
				require.NoError(t, <-done[relay.HalfClient])
				require.NoError(t, conn.CloseWrite())
				go func() {
					if assert.NoError(t, <-done[relay.HalfGuest]) {
						_ = ours.CloseWrite()
					}
				}()
				got, err := io.ReadAll(client)
				require.NoError(t, err)
				assert.Equal(t, sha256.Sum256(want), sha256.Sum256(got))
				assert.EqualValues(t, size, read.Bytes())
				assert.EqualValues(t, size, written.Bytes())
				assert.Empty(t, host.Stats().Link.AllDrops())
				assert.Zero(t, host.Stats().ChecksumErrors)
				assert.NoError(t, conn.Close())
			})
		}
	}
}

func TestConnReadWrite(t *testing.T) {
	host, guest := twoStacks(t, offloads["none"])
	serve(t, guest, 7, func(c net.Conn) { _, _ = io.Copy(c, c); _ = c.Close() })
	c := mustDial(t, host, 7)
	want := bytes.Repeat([]byte("culvert "), 10000)
	go func() { _, _ = c.Write(want); _ = c.CloseWrite() }()
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	assert.Equal(t, want, got)
}

// TestC15_DialErrors holds every way a dial can fail apart.
func TestC15_DialErrors(t *testing.T) {
	host, _ := twoStacks(t, offloads["none"])
	_, err := host.DialTCP(context.Background(), netip.AddrPortFrom(guestAddr.Addr(), 9))
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)

	// Nobody answers for an address behind the node.
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = host.DialTCP(ctx, netip.MustParseAddrPort("198.18.0.77:80"))
	assert.ErrorIs(t, err, context.DeadlineExceeded)

	require.NoError(t, host.Close())
	_, err = host.DialTCP(context.Background(), netip.AddrPortFrom(guestAddr.Addr(), 9))
	assert.ErrorIs(t, err, net.ErrClosed)
	assert.Zero(t, host.Stats().Flows)
}

// TestFB013_ResetIsNoEnd checks that the guest's reset is never read as its
// end, and ours neither (C-13).
func TestFB013_ResetIsNoEnd(t *testing.T) {
	host, guest := twoStacks(t, offloads["none"])
	serve(t, guest, 7, func(c net.Conn) {
		var one [1]byte
		_, _ = c.Read(one[:])
		_ = c.Close() // with bytes unread: a reset
	})
	c := mustDial(t, host, 7)
	_, err := c.Write(make([]byte, 100_000))
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	assert.ErrorIs(t, err, syscall.ECONNRESET)

	ended := make(chan error, 1)
	serve(t, guest, 8, func(c net.Conn) {
		_, err := io.ReadAll(c)
		ended <- err
	})
	c = mustDial(t, host, 8)
	_, err = c.Write([]byte("x"))
	require.NoError(t, err)
	c.Abort()
	assert.Error(t, <-ended, "an abort must not read as an end of stream")
}

// TestAbortUnblocks checks that Abort ends both copies, whatever they wait for.
func TestAbortUnblocks(t *testing.T) {
	datapathtest.Leaks(t)
	host, guest := twoStacks(t, offloads["csum+tso"])
	serve(t, guest, 7, hold(t))    // never reads, never writes
	plenty := make([]byte, 64<<20) // fills every buffer
	for range 20 {
		c := mustDial(t, host, 7)
		client, ours := clientPair(t)
		go func() { _, _ = client.Write(plenty) }()
		done := copies(c, ours)
		time.Sleep(time.Millisecond)
		c.Abort()
		assert.ErrorIs(t, <-done[relay.HalfClient], net.ErrClosed)
		assert.ErrorIs(t, <-done[relay.HalfGuest], net.ErrClosed)
		_ = ours.Close()
		_ = client.Close()
	}
	assert.Empty(t, host.link.inlined.flows)
	require.NoError(t, guest.Close())
}

// TestFB019_PeerGone checks that the guest's end ends the stack and wakes what
// waits on it.
func TestFB019_PeerGone(t *testing.T) {
	host, guest := twoStacks(t, offloads["none"])
	serve(t, guest, 7, hold(t))
	c := mustDial(t, host, 7)
	require.NoError(t, guest.Close())
	<-host.Done()
	assert.ErrorIs(t, host.Err(), datapath.ErrPeerGone)
	require.NoError(t, host.Close())
	_, err := c.Read(make([]byte, 1))
	assert.Error(t, err)
	_, err = host.Probe(context.Background())
	assert.Error(t, err)
}

func TestUDP(t *testing.T) {
	for name, o := range offloads {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			if o.Depth != 0 {
				o.Depth = 128 // 65507 bytes are 45 fragments
			}
			host, guest := twoStacks(t, o)
			l, err := guest.ListenUDP(7)
			require.NoError(t, err)
			go func() {
				buf := make([]byte, 1<<16)
				for {
					n, from, err := l.ReadFrom(buf)
					if err != nil {
						return
					}
					_, _ = l.WriteTo(buf[:n], from)
				}
			}()
			defer l.Close()
			c, err := host.DialUDP(netip.AddrPortFrom(guestAddr.Addr(), 7))
			require.NoError(t, err)
			got := make(chan []byte, 10)
			c.Receive(func(datagrams []relay.Datagram, err error) {
				if err != nil {
					assert.ErrorIs(t, err, net.ErrClosed)
				}
				for _, d := range datagrams {
					got <- bytes.Join(d[:], nil)
				}
			})
			for _, size := range []int{0, 1, 1472, 1473, 2944, 9000, 65507} {
				want := make([]byte, size)
				_, _ = rand.Read(want)
				n, err := c.Write([][]byte{want})
				require.NoError(t, err)
				assert.Equal(t, 1, n)
				select {
				case b := <-got:
					assert.True(t, bytes.Equal(want, b), "size %d", size)
				case <-time.After(5 * time.Second):
					t.Fatalf("no echo of %d bytes; drops %v", size, host.Stats().Link.AllDrops())
				}
			}
			require.NoError(t, c.Close())
			_, err = c.Write([][]byte{nil})
			assert.ErrorIs(t, err, net.ErrClosed)
			assert.Zero(t, host.Stats().Flows)
		})
	}
}

// TestFB049_PortUnreachable checks C-23: the guest's port-unreachable comes out
// of Receive, and the flow lives on.
func TestFB049_PortUnreachable(t *testing.T) {
	host, guest := twoStacks(t, offloads["none"])
	c, err := host.DialUDP(netip.AddrPortFrom(guestAddr.Addr(), 9))
	require.NoError(t, err)
	refused, got := make(chan struct{}, 10), make(chan struct{}, 10)
	c.Receive(func(_ []relay.Datagram, err error) {
		switch {
		case errors.Is(err, syscall.ECONNREFUSED):
			refused <- struct{}{}
		case err == nil:
			got <- struct{}{}
		}
	})
	_, err = c.Write([][]byte{[]byte("x")})
	require.NoError(t, err)
	<-refused
	l, err := guest.ListenUDP(9)
	require.NoError(t, err)
	defer l.Close()
	_, err = c.Write([][]byte{[]byte("y")})
	require.NoError(t, err)
	buf := make([]byte, 10)
	_, from, err := l.ReadFrom(buf)
	require.NoError(t, err)
	_, err = l.WriteTo([]byte("z"), from)
	require.NoError(t, err)
	<-got
	require.NoError(t, c.Close())
}

// TestFB130_Lifetimes checks that a stack's life leaves nothing behind.
func TestFB130_Lifetimes(t *testing.T) {
	datapathtest.Leaks(t)
	for range 300 {
		ours, theirs := memory.Pair(offloads["csum+tso"])
		host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"})
		require.NoError(t, err)
		guest, err := New(theirs, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, Seed: "guest"})
		require.NoError(t, err)
		_, err = host.Probe(context.Background())
		require.NoError(t, err)
		l, err := guest.ListenTCP(7)
		require.NoError(t, err)
		c, err := host.DialTCP(context.Background(), netip.AddrPortFrom(guestAddr.Addr(), 7))
		require.NoError(t, err)
		_, err = c.Write([]byte("x"))
		require.NoError(t, err)
		_ = c.Close()
		_ = l.Close()
		require.NoError(t, host.Close())
		require.NoError(t, guest.Close())
		require.NoError(t, host.Close())
	}
}

// TestC17_StoppedReader checks that a guest that reads nothing stops the
// writer, and that what waits stays within the flow's buffer.
func TestC17_StoppedReader(t *testing.T) {
	ours, theirs := memory.Pair(offloads["csum+tso"])
	budget := NewBudget(256<<10, 1<<20)
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host", Budget: budget})
	require.NoError(t, err)
	defer host.Close()
	guest, err := New(theirs, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, Seed: "guest", Budget: NewBudget(256<<10, 1<<20)})
	require.NoError(t, err)
	defer guest.Close()
	_, err = host.Probe(context.Background())
	require.NoError(t, err)
	release := make(chan struct{})
	got := make(chan int64, 1)
	serve(t, guest, 7, func(c net.Conn) {
		<-release
		n, _ := io.Copy(io.Discard, c)
		got <- n
	})
	c := mustDial(t, host, 7)
	var written relay.Meter
	c.SetMeters(nil, &written)
	const total = 8 << 20
	done := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, total))
		_ = c.CloseWrite()
		done <- err
	}()
	// The writer has stopped when the count stands still.
	for last := uint64(1); last != written.Bytes(); time.Sleep(100 * time.Millisecond) {
		last = written.Bytes()
	}
	// gVisor's first send buffer is one more window than the share.
	assert.Less(t, written.Bytes(), uint64(3*256<<10))
	close(release)
	require.NoError(t, <-done)
	assert.EqualValues(t, total, <-got)
}

// TestFB013_ResetToldTwice checks that both directions learn of one reset,
// whichever asks first.
func TestFB013_ResetToldTwice(t *testing.T) {
	host, guest := twoStacks(t, offloads["none"])
	serve(t, guest, 7, func(c net.Conn) {
		var one [1]byte
		_, _ = c.Read(one[:])
		_ = c.Close() // with bytes unread: a reset
	})
	c := mustDial(t, host, 7)
	_, err := c.Write([]byte("ab"))
	for err == nil {
		time.Sleep(time.Millisecond)
		_, err = c.Write([]byte("c"))
	}
	assert.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE), "%v", err)
	_, err = c.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	_, ours := clientPair(t)
	assert.ErrorIs(t, <-copies(c, ours)[relay.HalfGuest], syscall.ECONNRESET)
}

// TestCloseAmidHandshakes closes a stack that listens while connections to it come about:
// those, too, that have not when it resets what it has.
func TestCloseAmidHandshakes(t *testing.T) {
	for range less(unraced(200, 50), 20) {
		host, guest := twoStacks(t, memory.Options{})
		serve(t, guest, 7, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
		var wg sync.WaitGroup
		var dialed atomic.Int64
		ctx, cancel := context.WithCancel(t.Context())
		for range 16 {
			wg.Go(func() {
				for ctx.Err() == nil {
					c, err := host.DialTCP(ctx, netip.AddrPortFrom(guestAddr.Addr(), 7))
					if err == nil {
						dialed.Add(1)
						defer c.Abort()
					}
				}
			})
		}
		for dialed.Load() < 32 {
			runtime.Gosched()
		}
		closed := make(chan struct{})
		go func() { defer close(closed); assert.NoError(t, guest.Close()) }()
		select {
		case <-closed:
		case <-time.After(flowPatience):
			t.Fatal("Close waits for what it has not reset")
		}
		cancel()
		wg.Wait()
		require.NoError(t, host.Close())
	}
}
