package stack

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A hostGuest is a guest whose servers listen on the host's loopback: what
// leads to the node's port N goes to the server that is registered for N.
type hostGuest struct {
	mu    sync.Mutex
	tcp   map[netip.AddrPort]string
	udp   map[netip.AddrPort]string
	conns map[*hostConn]struct{}

	dialing  atomic.Int64 // dials under way
	endpoint atomic.Int64 // live connections and endpoints
}

// Ports at which nobody answers, in their own ways.
const (
	portSilent      = 9 // no answer at all
	portUnreachable = 10
	portNoSource    = 11
)

var node = netip.MustParseAddr("198.18.0.2")

func newHostGuest() *hostGuest {
	return &hostGuest{tcp: make(map[netip.AddrPort]string), udp: make(map[netip.AddrPort]string), conns: make(map[*hostConn]struct{})}
}

// serveTCP makes serve the guest's server at port of the node, and closes what
// it leaves open.
func (g *hostGuest) serveTCP(tb testing.TB, port uint16, serve func(*net.TCPConn)) {
	g.serveTCPAt(tb, netip.AddrPortFrom(node, port), serve)
}

func (g *hostGuest) serveTCPAt(tb testing.TB, at netip.AddrPort, serve func(*net.TCPConn)) {
	tb.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(tb, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	open := make(map[*net.TCPConn]struct{})
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = struct{}{}
			mu.Unlock()
			wg.Go(func() {
				serve(c)
				c.Close()
				mu.Lock()
				defer mu.Unlock()
				delete(open, c)
			})
		}
	})
	tb.Cleanup(func() {
		l.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tcp[at] = l.Addr().String()
}

// serveUDP makes serve the guest's server at port of the node.
func (g *hostGuest) serveUDP(tb testing.TB, port uint16, serve func(c *net.UDPConn, from netip.AddrPort, b []byte)) *net.UDPConn {
	tb.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(tb, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				serve(c, from, buf[:n])
			}
		}
	})
	tb.Cleanup(func() {
		c.Close()
		wg.Wait()
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.udp[netip.AddrPortFrom(node, port)] = c.LocalAddr().String()
	return c
}

// closedUDP makes port of the node one that nobody listens on.
func (g *hostGuest) closedUDP(tb testing.TB, port uint16) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(tb, err)
	defer c.Close()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.udp[netip.AddrPortFrom(node, port)] = c.LocalAddr().String()
}

// StartTCP implements Guest.
func (g *hostGuest) StartTCP(dst netip.AddrPort, done func(relay.GuestConn, error)) func() {
	return start(g.dialTCP, dst, done)
}

// start runs a dial that waits in a goroutine, which ends when the dial does.
func start(dial func(context.Context, netip.AddrPort) (relay.GuestConn, error), dst netip.AddrPort, done func(relay.GuestConn, error)) func() {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		done(dial(ctx, dst))
	}()
	return cancel
}

func (g *hostGuest) dialTCP(ctx context.Context, dst netip.AddrPort) (relay.GuestConn, error) {
	g.dialing.Add(1)
	defer g.dialing.Add(-1)
	switch dst.Port() {
	case portSilent:
		<-ctx.Done()
		return nil, ctx.Err()
	case portUnreachable:
		return nil, syscall.EHOSTUNREACH
	case portNoSource:
		return nil, syscall.EADDRNOTAVAIL
	}
	g.mu.Lock()
	at, ok := g.tcp[dst]
	g.mu.Unlock()
	if !ok {
		return nil, syscall.ECONNREFUSED
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", at)
	if err != nil {
		return nil, err
	}
	g.endpoint.Add(1)
	hc := &hostConn{TCPConn: c.(*net.TCPConn), guest: g}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conns[hc] = struct{}{}
	return hc, nil
}

// A slowGuest answers a connect late.
type slowGuest struct {
	*hostGuest
	delay time.Duration
}

// StartTCP implements Guest.
func (g *slowGuest) StartTCP(dst netip.AddrPort, done func(relay.GuestConn, error)) func() {
	return start(g.dialTCP, dst, done)
}

func (g *slowGuest) dialTCP(ctx context.Context, dst netip.AddrPort) (relay.GuestConn, error) {
	select {
	case <-time.After(g.delay):
		return g.hostGuest.dialTCP(ctx, dst)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// lose resets every connection, as a stack does whose datapath has ended.
func (g *hostGuest) lose() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		c.lost.Store(true)
		_ = c.SetLinger(0)
		_ = c.TCPConn.Close()
	}
}

func (g *hostGuest) DialUDP(dst netip.AddrPort) (relay.GuestPacketConn, error) {
	if dst.Port() == portNoSource {
		return nil, syscall.EADDRNOTAVAIL
	}
	g.mu.Lock()
	at := g.udp[dst]
	g.mu.Unlock()
	to, err := net.ResolveUDPAddr("udp", at)
	if err != nil {
		return nil, err
	}
	c, err := net.DialUDP("udp", nil, to)
	if err != nil {
		return nil, err
	}
	g.endpoint.Add(1)
	return &hostPacketConn{UDPConn: c, guest: g}, nil
}

// A hostConn is a connection to a server on the host as the guest's end.
type hostConn struct {
	*net.TCPConn
	guest         *hostGuest
	once          sync.Once
	lost          atomic.Bool
	read, written *relay.Meter
}

func (c *hostConn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	c.read.Add(n)
	return n, c.told(err)
}

func (c *hostConn) Write(p []byte) (int, error) {
	n, err := c.TCPConn.Write(p)
	c.written.Add(n)
	return n, c.told(err)
}

// told makes the end of the datapath look like a reset, as netstack does.
func (c *hostConn) told(err error) error {
	if err != nil && c.lost.Load() {
		return syscall.ECONNRESET
	}
	return err
}

// Copy implements relay.GuestConn with a goroutine for each way.
func (c *hostConn) Copy(client relay.Conn, ended func(relay.Half, error)) {
	go func() {
		ended(relay.HalfClient, copyAll(c, client, func(err error) error { return &relay.ClientError{Err: err} }, same))
	}()
	go func() {
		ended(relay.HalfGuest, copyAll(client, c, same, func(err error) error { return &relay.ClientError{Err: err} }))
	}()
}

func same(err error) error { return err }

// copyAll copies until src's end; errors of either side go through its function.
func copyAll(dst io.Writer, src io.Reader, read, written func(error) error) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return written(err)
			}
		}
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return read(err)
		}
	}
}

// Gone implements relay.Watcher: without it a reset that Write was told of
// would look like an end to Read.
func (c *hostConn) Gone() bool {
	gone := true
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			p := []unix.PollFd{{Fd: int32(fd)}}
			_, _ = unix.Poll(p, 0)
			gone = p[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
		})
	}
	return gone
}

// WaitGone implements relay.Watcher.
func (c *hostConn) WaitGone(ctx context.Context) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !c.Gone() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (c *hostConn) KeepAlive() error { return c.SetKeepAlive(true) }

func (c *hostConn) Abort() {
	_ = c.SetLinger(0)
	_ = c.Close()
}

func (c *hostConn) Close() error {
	c.once.Do(func() {
		c.guest.endpoint.Add(-1)
		c.guest.mu.Lock()
		defer c.guest.mu.Unlock()
		delete(c.guest.conns, c)
	})
	return c.TCPConn.Close()
}

func (c *hostConn) SetMeters(read, written *relay.Meter) { c.read, c.written = read, written }

func (c *hostConn) LocalAddr() string { return c.TCPConn.LocalAddr().String() }

func (c *hostConn) Resumed() time.Time { return time.Time{} }

// A hostPacketConn is an endpoint towards a server on the host.
type hostPacketConn struct {
	*net.UDPConn
	guest *hostGuest
	once  sync.Once
}

func (c *hostPacketConn) Write(datagrams [][]byte) (n int, err error) {
	for n < len(datagrams) && err == nil {
		_, err = c.UDPConn.Write(datagrams[n])
		if errors.Is(err, syscall.ECONNREFUSED) { // of an earlier one: Receive is told by the next
			_, err = c.UDPConn.Write(datagrams[n])
		}
		if err == nil {
			n++
		}
	}
	return n, err
}

func (c *hostPacketConn) Receive(deliver func([]relay.Datagram, error)) {
	go func() {
		buf := make([]byte, 65536)
		for {
			n, err := c.Read(buf)
			switch {
			case err != nil:
				deliver(nil, err)
				if errors.Is(err, net.ErrClosed) {
					return
				}
			default:
				deliver([]relay.Datagram{{buf[:n/2], buf[n/2 : n]}}, nil)
			}
		}
	}()
}

func (c *hostPacketConn) LocalAddr() string { return c.UDPConn.LocalAddr().String() }

func (c *hostPacketConn) Resumed() time.Time { return time.Time{} }

func (c *hostPacketConn) Close() error {
	c.once.Do(func() { c.guest.endpoint.Add(-1) })
	return c.UDPConn.Close()
}

const patience = 20 * time.Second // for what happens at once on an idle machine

// Servers.

func echo(c *net.TCPConn) {
	_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
}

// hold keeps the connection until the client ends it.
func hold(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) }

func say(text string) func(*net.TCPConn) {
	return func(c *net.TCPConn) { _, _ = io.WriteString(c, text) }
}

func echoUDP(c *net.UDPConn, from netip.AddrPort, b []byte) { _, _ = c.WriteToUDPAddrPort(b, from) }
