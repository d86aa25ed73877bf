package listener

import (
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// What this package leans on in the kernel, so that a kernel that differs is
// seen here and not in a report.

// Accepted sockets inherit the listening socket's options (socket_linux.go).
func TestAssumeInheritance(t *testing.T) {
	_, c := mustPair(t)
	require.NoError(t, c.Control(func(fd uintptr) {
		for _, o := range []option{
			{level: unix.IPPROTO_TCP, name: unix.TCP_NODELAY, value: 1},
			{level: unix.SOL_SOCKET, name: unix.SO_KEEPALIVE, value: 1},
			{level: unix.IPPROTO_TCP, name: unix.TCP_KEEPIDLE, value: 15},
			{level: unix.IPPROTO_TCP, name: unix.TCP_KEEPINTVL, value: 15},
			{level: unix.IPPROTO_TCP, name: unix.TCP_KEEPCNT, value: 5},
		} {
			got, err := unix.GetsockoptInt(int(fd), o.level, o.name)
			require.NoError(t, err)
			assert.Equal(t, o.value, got, "level %d option %d", o.level, o.name)
		}
		flags, err := unix.FcntlInt(fd, unix.F_GETFD, 0)
		require.NoError(t, err)
		assert.NotZero(t, flags&unix.FD_CLOEXEC)
		flags, err = unix.FcntlInt(fd, unix.F_GETFL, 0)
		require.NoError(t, err)
		assert.NotZero(t, flags&unix.O_NONBLOCK)
	}))
}

// The families are apart: a v6 wildcard neither takes nor blocks IPv4.
func TestAssumeV6Only(t *testing.T) {
	g := mustGroup(t, &funcs{})
	for _, proto := range []Proto{TCP, UDP} {
		// A port that the kernel picks for IPv6 may be a client's of IPv4.
		s6 := mustListen(t, g, proto, netip.AddrPortFrom(netip.IPv6Unspecified(), freePorts(t, g, proto, 1)))
		for _, host := range []string{"0.0.0.0", "127.0.0.1"} {
			s4 := mustListen(t, g, proto, netip.AddrPortFrom(addr(host), s6.Addr().Port()))
			require.NoError(t, s4.Close())
		}
		if proto == TCP {
			_, err := net.Dial("tcp4", netip.AddrPortFrom(loopback4, s6.Addr().Port()).String())
			assert.ErrorIs(t, err, syscall.ECONNREFUSED)
		}
	}
}

// The kernel calls the same pairs a conflict as the Table: equal addresses, and
// a wildcard with any address of its family, in either order, although TCP
// sockets have SO_REUSEADDR.
func TestAssumeOverlap(t *testing.T) {
	g := mustGroup(t, &funcs{})
	for _, tt := range []struct{ first, second string }{
		{"127.0.0.1", "127.0.0.1"}, {"0.0.0.0", "127.0.0.1"}, {"127.0.0.1", "0.0.0.0"}, {"0.0.0.0", "0.0.0.0"},
		{"::1", "::1"}, {"::", "::1"}, {"::1", "::"},
		{"127.0.0.1", "127.0.0.2"}, {"127.0.0.1", "::1"}, {"0.0.0.0", "::"}, {"::", "127.0.0.1"},
	} {
		for _, proto := range []Proto{TCP, UDP} {
			// As above: the kernel's choice for the first address may be taken on the second.
			s := mustListen(t, g, proto, netip.AddrPortFrom(addr(tt.first), freePorts(t, g, proto, 1)))
			second := netip.AddrPortFrom(addr(tt.second), s.Addr().Port())

			tab := NewTable(Policy{ExposeToLAN: true})
			require.NoError(t, tab.Reserve(proto, s.Addr(), "first"))
			conflict := tab.Reserve(proto, second, "second") != nil

			s2, err := g.listen(proto, second, nil)
			if conflict {
				assert.ErrorIs(t, err, syscall.EADDRINUSE, "%v %v", tt, proto)
			} else if assert.NoError(t, err, "%v %v", tt, proto) {
				require.NoError(t, s2.Close())
			}
			require.NoError(t, s.Close())
		}
	}
}

// A listening port is free for one that sets SO_REUSEADDR while connections of
// the earlier listener are established or in TIME_WAIT.
func TestAssumeReuseOverConnections(t *testing.T) {
	g, conns := accepting(t)
	s := mustListen(t, g, TCP, anyPort4)
	established := mustDial(t, TCP, s.Addr())
	mustAccept(t, conns)
	ended := mustDial(t, TCP, s.Addr())
	c := mustAccept(t, conns)
	require.NoError(t, c.Close()) // the first to close has the TIME_WAIT
	_, err := io.ReadAll(ended)
	require.NoError(t, err)
	require.NoError(t, ended.Close())
	require.NoError(t, s.Close())

	again := mustListen(t, g, TCP, s.Addr())
	mustDial(t, TCP, again.Addr())
	assert.Equal(t, s.Addr(), mustAccept(t, conns).LocalAddr())
	require.NoError(t, established.Close())
}

// An epoll set is itself pollable, and edge-triggered polling of it, as the
// runtime does, loses no wake-up (group.go).
func TestAssumeEpollNests(t *testing.T) {
	arrived := make(chan struct{})
	g := mustGroup(t, &funcs{readable: func(s *Socket) {
		if _, err := NewReader().Read(s); err == nil {
			arrived <- struct{}{}
		}
	}})
	s := mustListen(t, g, UDP, anyPort4)
	c := mustDial(t, UDP, s.Addr())
	for range 1000 { // one by one: each finds the goroutine about to park, or parked
		_, err := c.Write([]byte("x"))
		require.NoError(t, err)
		<-arrived
	}
}

// TestAssumeLingerIsInherited: an accepted connection that is closed by the
// kernel, as when its process dies, resets its client; one that Close closes
// ends in order.
func TestAssumeLingerIsInherited(t *testing.T) {
	fd, _, err := bindFD(TCP, netip.MustParseAddrPort("127.0.0.1:0"))
	require.NoError(t, err)
	defer unix.Close(fd)
	sa, err := unix.Getsockname(fd)
	require.NoError(t, err)
	set, err := newClientSet()
	require.NoError(t, err)
	defer set.close()
	for _, orderly := range []bool{false, true} {
		client, err := net.Dial("tcp", addrPort(sa).String())
		require.NoError(t, err)
		var accepted int
		for {
			if accepted, _, err = unix.Accept4(fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC); err != unix.EAGAIN {
				break
			}
		}
		require.NoError(t, err)
		if orderly {
			c, err := newConn(set, accepted, addrPort(sa), netip.AddrPort{})
			require.NoError(t, err)
			require.NoError(t, c.Close())
		} else {
			require.NoError(t, unix.Close(accepted))
		}
		_, err = client.Read(make([]byte, 1))
		if orderly {
			assert.ErrorIs(t, err, io.EOF)
		} else {
			assert.ErrorIs(t, err, unix.ECONNRESET)
		}
		_ = client.Close()
	}
}
