package listener

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A funcs is a Handler of functions; those left out count, close or drain.
type funcs struct {
	accepted    func(*Socket, *Conn)
	readable    func(*Socket)
	acceptError func(*Socket, error)
	errors      atomic.Int64
}

func (f *funcs) Accepted(s *Socket, c *Conn) {
	if f.accepted == nil {
		c.Close()
		return
	}
	f.accepted(s, c)
}

func (f *funcs) Readable(s *Socket) {
	if f.readable == nil {
		_, _ = NewReader().Read(s)
		return
	}
	f.readable(s)
}

func (f *funcs) AcceptError(s *Socket, err error) {
	f.errors.Add(1)
	if f.acceptError != nil {
		f.acceptError(s, err)
	}
}

// on runs f on the goroutine of g, whose Handler h is, and waits for it.
func (h *funcs) on(tb testing.TB, g *Group, f func()) {
	tb.Helper()
	done := make(chan struct{})
	h.readable = func(s *Socket) {
		_, _ = NewReader().Read(s)
		f()
		close(done)
	}
	s := mustListen(tb, g, UDP, anyPort4)
	c := mustDial(tb, UDP, s.Addr())
	_, err := c.Write(nil)
	require.NoError(tb, err)
	<-done
	require.NoError(tb, s.Close())
	require.NoError(tb, c.Close())
}

const patience = 20 * time.Second // for what happens at once on an idle machine

var anyPort4, anyPort6 = netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("[::1]:0")

func mustGroup(tb testing.TB, h Handler) *Group {
	tb.Helper()
	g, err := NewGroup(h)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		assert.NoError(tb, g.Close())
		echoing.Wait() // their clients are closed by now
	})
	return g
}

func mustListen(tb testing.TB, g *Group, proto Proto, ap netip.AddrPort) *Socket {
	tb.Helper()
	s, err := g.listen(proto, ap, nil)
	require.NoError(tb, err)
	return s
}

func mustDial(tb testing.TB, proto Proto, ap netip.AddrPort) net.Conn {
	tb.Helper()
	c, err := net.DialTimeout(proto.String(), ap.String(), patience)
	require.NoError(tb, err)
	require.NoError(tb, c.SetDeadline(time.Now().Add(patience)))
	tb.Cleanup(func() { c.Close() })
	return c
}

// accepting returns a Group and a channel of what it accepts.
func accepting(tb testing.TB) (*Group, <-chan *Conn) {
	conns := make(chan *Conn, 4096)
	return mustGroup(tb, &funcs{accepted: func(_ *Socket, c *Conn) { conns <- c }}), conns
}

func mustAccept(tb testing.TB, conns <-chan *Conn) *Conn {
	tb.Helper()
	select {
	case c := <-conns:
		tb.Cleanup(func() { c.Close() })
		return c
	case <-time.After(patience):
		require.FailNow(tb, "nothing accepted")
		return nil
	}
}

// echo is what a guest's server would do.
func echo(_ *Socket, c *Conn) {
	echoing.Go(func() {
		defer c.Close()
		_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
	})
}

var echoing sync.WaitGroup

func TestGroupTCP(t *testing.T) {
	for _, ap := range []netip.AddrPort{anyPort4, anyPort6} {
		var token any = ap
		conns := make(chan *Conn, 1)
		g := mustGroup(t, &funcs{accepted: func(s *Socket, c *Conn) {
			assert.Equal(t, token, s.Token())
			conns <- c
		}})
		s, err := g.ListenTCP(ap, token)
		require.NoError(t, err)
		assert.Equal(t, ap.Addr(), s.Addr().Addr())
		assert.NotZero(t, s.Addr().Port())
		assert.Equal(t, TCP, s.Proto())
		assert.Zero(t, s.Index())

		client := mustDial(t, TCP, s.Addr())
		c := mustAccept(t, conns)
		assert.Equal(t, client.LocalAddr().String(), c.RemoteAddr().String())
		assert.Equal(t, client.RemoteAddr().String(), c.LocalAddr().String())
	}
}

// On a wildcard each client has the address it came to.
func TestGroupTCPWildcard(t *testing.T) {
	g, conns := accepting(t)
	s := mustListen(t, g, TCP, netip.MustParseAddrPort("0.0.0.0:0"))
	for _, a := range []string{"127.0.0.1", "127.0.0.2"} {
		mustDial(t, TCP, netip.AddrPortFrom(addr(a), s.Addr().Port()))
		assert.Equal(t, netip.AddrPortFrom(addr(a), s.Addr().Port()), mustAccept(t, conns).LocalAddr())
	}
}

// C-9: an idle port costs neither a goroutine nor a kilobyte.
func TestGroupCostOfIdlePorts(t *testing.T) {
	const n = 2000
	g := mustGroup(t, &funcs{accepted: echo})
	before, goroutines := heap(), runtime.NumGoroutine()
	sockets := make([]*Socket, n)
	for i := range sockets {
		proto, ap := TCP, anyPort4
		if i%2 == 1 {
			proto, ap = UDP, anyPort6
		}
		sockets[i] = mustListen(t, g, proto, ap)
	}
	assert.LessOrEqual(t, runtime.NumGoroutine(), goroutines)
	assert.Less(t, (heap()-before)/n, int64(1024))
	for i := 0; i < n; i += 100 {
		c := mustDial(t, TCP, sockets[i].Addr())
		_, err := c.Write([]byte("hello"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 5))
		require.NoError(t, err)
		c.Close()
	}
	runtime.KeepAlive(sockets)
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// FB-067, C-4: the port is free when Close returns, though a connection lives on.
func TestFB067CloseFreesThePort(t *testing.T) {
	g, conns := accepting(t)
	for range 50 {
		s := mustListen(t, g, TCP, anyPort4)
		client := mustDial(t, TCP, s.Addr())
		c := mustAccept(t, conns)
		require.NoError(t, s.Close())
		require.NoError(t, s.Close())
		assert.True(t, s.Closed())

		l, err := net.Listen("tcp", s.Addr().String()) // sets SO_REUSEADDR
		require.NoError(t, err)
		l.Close()
		_, err = c.Write([]byte("x"))
		require.NoError(t, err)
		_, err = io.ReadFull(client, make([]byte, 1))
		require.NoError(t, err, "what was accepted lives on")
		client.Close()
		c.Close()
	}
	u := mustListen(t, g, UDP, anyPort4)
	require.NoError(t, u.Close())
	l, err := net.ListenPacket("udp", u.Addr().String())
	require.NoError(t, err)
	l.Close()
}

// Clients that were not accepted yet are reset, not left hanging.
func TestGroupCloseResetsTheQueue(t *testing.T) {
	inside, release := make(chan struct{}), make(chan struct{})
	g := mustGroup(t, &funcs{accepted: func(_ *Socket, c *Conn) {
		c.Close()
		close(inside)
		<-release
	}})
	s := mustListen(t, g, TCP, anyPort4)
	mustDial(t, TCP, s.Addr())
	<-inside
	queued := mustDial(t, TCP, s.Addr())
	require.NoError(t, s.Close())
	_, err := queued.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	close(release)
}

// Close of a socket from the Handler must not wait for the Handler, and no call
// follows it.
func TestGroupCloseFromHandler(t *testing.T) {
	var calls atomic.Int64
	closed := make(chan struct{})
	g := mustGroup(t, &funcs{accepted: func(s *Socket, c *Conn) {
		c.Abort()
		if calls.Add(1) == 1 {
			assert.False(t, s.Closed())
			assert.NoError(t, s.Close())
			assert.True(t, s.Closed())
			close(closed)
		}
	}})
	s := mustListen(t, g, TCP, anyPort4)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if c, err := net.Dial("tcp", s.Addr().String()); err == nil {
				c.Close()
			}
		})
	}
	<-closed
	wg.Wait()
	require.NoError(t, g.Close())
	assert.EqualValues(t, 1, calls.Load())
}

func TestGroupClose(t *testing.T) {
	g, conns := accepting(t)
	s := mustListen(t, g, TCP, anyPort4)
	u := mustListen(t, g, UDP, anyPort4)
	client := mustDial(t, TCP, s.Addr())
	c := mustAccept(t, conns)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { assert.NoError(t, g.Close()) })
	}
	wg.Wait()
	assert.True(t, s.Closed())
	assert.True(t, u.Closed())
	assert.NoError(t, s.Close())
	_, err := net.Dial("tcp", s.Addr().String())
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
	_, err = g.ListenTCP(anyPort4, nil)
	assert.ErrorIs(t, err, net.ErrClosed)
	_, err = NewReader().Read(u)
	assert.ErrorIs(t, err, net.ErrClosed)
	_, err = u.Send([][2][]byte{{}}, u.Addr(), netip.Addr{})
	assert.ErrorIs(t, err, net.ErrClosed)

	_, err = c.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(client, make([]byte, 1))
	assert.NoError(t, err)
}

// FB-173: no client can make a listener go.
func TestFB173AbortingClients(t *testing.T) {
	g := mustGroup(t, &funcs{accepted: echo})
	s := mustListen(t, g, TCP, anyPort4)
	inode := func() uint64 {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(s.fd, &st))
		return st.Ino
	}
	before := inode()
	for range 500 {
		c := mustDial(t, TCP, s.Addr())
		require.NoError(t, c.(*net.TCPConn).SetLinger(0))
		c.Close()
	}
	c := mustDial(t, TCP, s.Addr())
	_, err := c.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 1))
	require.NoError(t, err)
	c.Close()
	assert.Equal(t, before, inode())
}

// C-53: with no descriptor left, clients are reset and counted, and the next
// one after that is served, by itself.
func TestGroupOutOfDescriptors(t *testing.T) {
	for _, reserve := range []bool{true, false} {
		name := "reserve"
		if !reserve {
			name = "no reserve"
		}
		t.Run(name, func(t *testing.T) {
			conns := make(chan *Conn, 16)
			failed := make(chan error, 1024)
			h := &funcs{
				accepted:    func(_ *Socket, c *Conn) { conns <- c },
				acceptError: func(_ *Socket, err error) { failed <- err },
			}
			g := mustGroup(t, h)
			s := mustListen(t, g, TCP, anyPort4)
			mustDial(t, TCP, s.Addr())
			mustAccept(t, conns)
			h.on(t, g, func() { // past accepting, with nobody in line
				if !reserve {
					unix.Close(g.reserve)
					g.reserve = -1
				}
			})

			clients := make([]int, 3)
			for i := range clients {
				clients[i] = mustRawSocket(t, TCP, unix.AF_INET)
			}
			restore := noMoreDescriptors(t)
			defer restore()
			start := time.Now()
			for _, fd := range clients {
				require.NoError(t, unix.Connect(fd, mustSockaddr(t, s.Addr())))
			}
			if reserve {
				for _, fd := range clients {
					require.ErrorIs(t, <-failed, syscall.EMFILE)
					_, err := unix.Read(fd, make([]byte, 1))
					assert.ErrorIs(t, err, syscall.ECONNRESET)
				}
				restore()
				for { // a client or so may meet the last refusal under way
					mustDial(t, TCP, s.Addr())
					select {
					case c := <-conns:
						c.Close()
						return
					case <-failed:
					case <-time.After(patience):
						require.FailNow(t, "neither accepted nor refused")
					}
				}
			}
			for range 3 {
				require.ErrorIs(t, <-failed, syscall.EMFILE)
			}
			restore()
			for range clients {
				mustAccept(t, conns) // it is those who waited
			}
			// No spin: one try at once and one after each pause.
			assert.LessOrEqual(t, h.errors.Load(), 2+int64(time.Since(start)/acceptPause))
		})
	}
}

// noMoreDescriptors lowers RLIMIT_NOFILE so that no more can be opened, and
// fills the gaps below it.
func noMoreDescriptors(t *testing.T) (restore func()) {
	t.Helper()
	lift := lowerDescriptors(t, 0)
	var gaps []int
	for {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			require.ErrorIs(t, err, unix.EMFILE)
			break
		}
		gaps = append(gaps, fd)
	}
	return sync.OnceFunc(func() {
		lift()
		for _, fd := range gaps {
			unix.Close(fd)
		}
	})
}

// lowerDescriptors lowers RLIMIT_NOFILE so that about n more can be opened:
// there may be gaps below the limit when n is not 0.
func lowerDescriptors(t *testing.T, n uint64) (restore func()) {
	t.Helper()
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	lowest, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	require.NoError(t, err)
	unix.Close(lowest)
	limit := old
	limit.Cur = uint64(lowest) + n
	require.NoError(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &limit, nil))
	return sync.OnceFunc(func() { require.NoError(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &old, nil)) })
}

func mustRawSocket(tb testing.TB, proto Proto, domain int) int {
	tb.Helper()
	kind := unix.SOCK_STREAM
	if proto == UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
	require.NoError(tb, err)
	tb.Cleanup(func() { unix.Close(fd) })
	require.NoError(tb, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, new(unix.NsecToTimeval(int64(patience)))))
	return fd
}

func mustSockaddr(tb testing.TB, ap netip.AddrPort) unix.Sockaddr {
	tb.Helper()
	sa, err := sockaddr(ap)
	require.NoError(tb, err)
	return sa
}

// Sockets come and go, and clients with them, while the goroutine serves
// others: nothing is lost, nothing goes to a wrong socket.
func TestGroupChurn(t *testing.T) {
	g := mustGroup(t, &funcs{accepted: func(s *Socket, c *Conn) {
		assert.Equal(t, s.Addr(), c.LocalAddr())
		echo(s, c)
	}, readable: func(s *Socket) {
		if messages, err := NewReader().Read(s); err == nil {
			_, _ = s.Send([][2][]byte{{messages[0].Data}}, messages[0].Client, messages[0].Local)
		}
	}})
	var wg sync.WaitGroup
	for worker := range 8 {
		proto := TCP
		if worker%2 == 1 {
			proto = UDP
		}
		wg.Go(func() {
			for range 50 {
				s, err := g.listen(proto, anyPort4, nil)
				if !assert.NoError(t, err) {
					return
				}
				c, err := net.DialTimeout(proto.String(), s.Addr().String(), patience)
				if !assert.NoError(t, err) {
					return
				}
				_ = c.SetDeadline(time.Now().Add(patience))
				_, err = c.Write([]byte("0123"))
				assert.NoError(t, err)
				b := make([]byte, 4)
				_, err = io.ReadFull(c, b)
				assert.NoError(t, err)
				assert.Equal(t, "0123", string(b))
				c.Close()
				assert.NoError(t, s.Close())
			}
		})
	}
	wg.Wait()
}

// FB-036: a client that has gone is no error of the socket that serves others.
func TestFB036ClientGone(t *testing.T) {
	g := mustGroup(t, &funcs{})
	s, err := g.bind(UDP, anyPort4, nil, 0)
	require.NoError(t, err)
	defer s.Close()
	client := mustDial(t, UDP, s.Addr())
	gone := mustAddrPort(client.LocalAddr())
	client.Close()
	r := NewReader()
	for range 1000 {
		_, err := s.Send(inPieces("late"), gone, loopback4)
		assert.NoError(t, err)
		_, err = r.Read(s)
		assert.ErrorIs(t, err, ErrWouldBlock)
	}
}

// FB-064: UDP shares with nobody, whatever the others set.
func TestFB064UDPSharesWithNobody(t *testing.T) {
	g := mustGroup(t, &funcs{})
	foreign := mustRawSocket(t, UDP, unix.AF_INET)
	require.NoError(t, unix.SetsockoptInt(foreign, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	require.NoError(t, unix.Bind(foreign, mustSockaddr(t, anyPort4)))
	sa, err := unix.Getsockname(foreign)
	require.NoError(t, err)
	for _, host := range []string{"127.0.0.1", "0.0.0.0"} {
		_, err = g.ListenUDP(netip.AddrPortFrom(addr(host), addrPort(sa).Port()), nil)
		require.ErrorIs(t, err, syscall.EADDRINUSE)
		var op *net.OpError
		require.ErrorAs(t, err, &op)
		assert.Equal(t, "udp", op.Net)
	}
}

func TestListenRefuses(t *testing.T) {
	g := mustGroup(t, &funcs{})
	fds := openFDs()
	for _, ap := range []netip.AddrPort{{}, netip.MustParseAddrPort("198.18.255.1:0"), netip.MustParseAddrPort("[fe80::1%lo]:0")} {
		_, err := g.ListenTCP(ap, nil)
		assert.Error(t, err, ap)
		_, err = g.ListenUDP(ap, nil)
		assert.Error(t, err, ap)
	}
	assert.Equal(t, fds, openFDs())
	assert.Empty(t, g.sockets)
}

// With many clients waiting at one socket, the others still have their turn.
func TestGroupFairness(t *testing.T) {
	var busy *Socket
	otherServed := make(chan int, 1)
	served := 0
	inside, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	g := mustGroup(t, &funcs{accepted: func(s *Socket, c *Conn) {
		c.Close()
		once.Do(func() { close(inside); <-release })
		if s == busy {
			served++
			return
		}
		otherServed <- served
	}})
	gate, other := mustListen(t, g, TCP, anyPort4), mustListen(t, g, TCP, anyPort4)
	mustDial(t, TCP, gate.Addr())
	<-inside
	gate.Close()
	busy = mustListen(t, g, TCP, anyPort4)
	<-dialed(t, busy.Addr(), 10*acceptBatch)
	mustDial(t, TCP, other.Addr())
	drained := otherServed
	// The gate's client, whose call is under way, takes the first message.
	close(release)
	<-drained
	assert.LessOrEqual(t, <-drained, acceptBatch)
}

// dialed connects n clients and closes the channel when they all have.
func dialed(t *testing.T, ap netip.AddrPort, n int) <-chan struct{} {
	t.Helper()
	done := make(chan struct{})
	for range n {
		mustDial(t, TCP, ap)
	}
	close(done)
	return done
}

func TestGroupNeedsThePoller(t *testing.T) {
	f, err := os.Open("/dev/null")
	require.NoError(t, err)
	defer f.Close()
	assert.True(t, errors.Is(pollable(f), os.ErrNoDeadline), "what is not on the poller is told apart")
}
