package listener

import (
	"net"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	// backlog is how many clients may wait to be accepted. The kernel cuts it to
	// net.core.somaxconn, whose default since Linux 5.4 is this.
	backlog = 4096

	// A silent peer is probed after keepIdle seconds, then every keepInterval,
	// and is gone after keepCount probes without an answer: 15 + 5×15 = 90 s, as
	// C-14 has it (tcp(7)).
	keepIdle     = 15
	keepInterval = 15
	keepCount    = 5

	// udpBuffer is what a UDP socket may queue each way, in bytes of payload and
	// the kernel's bookkeeping: 4 MiB hold 64 of the largest datagrams or about
	// 5 000 of 512 bytes (~830 bytes each with skb), a burst of some
	// milliseconds. It is a bound: an idle socket uses none of it.
	udpBuffer = 4 << 20
)

// bindFD makes a non-blocking socket with its options, bound to ap and, for
// TCP, listening. call is what failed.
func bindFD(proto Proto, ap netip.AddrPort) (fd int, call string, err error) {
	sa, err := sockaddr(ap)
	if err != nil {
		return -1, "socket", err
	}
	domain, kind := unix.AF_INET, unix.SOCK_STREAM
	if ap.Addr().Is6() {
		domain = unix.AF_INET6
	}
	if proto == UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err = unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, "socket", err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
			fd = -1
		}
	}()
	options := tcpOptions
	if proto == UDP {
		options = udpOptions
	}
	for _, o := range options {
		if o.domain != 0 && o.domain != domain {
			continue
		}
		if err = unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fd, "setsockopt", err
		}
	}
	if proto == UDP {
		growBuffers(fd)
	}
	if err = unix.Bind(fd, sa); err != nil {
		return fd, "bind", err
	}
	if proto == TCP {
		// Connections reset when they are closed, unless Conn.Close says
		// otherwise: so what a killed daemon leaves to the kernel does not reach
		// its clients as an end of stream (C-13). Inherited as well.
		if err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
			return fd, "setsockopt", err
		}
		if err = unix.Listen(fd, backlog); err != nil {
			return fd, "listen", err
		}
	}
	return fd, "", nil
}

type option struct{ domain, level, name, value int }

var (
	// Accepted connections inherit all of these from the listening socket, which
	// saves five system calls for each (assumptions_linux_test.go).
	tcpOptions = []option{
		// The families are two sockets, so that a publish on one says nothing
		// about the other, whatever net.ipv6.bindv6only is.
		{unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
		// Binds while connections of an earlier listener are in TIME_WAIT. Two
		// listeners on one port it does not allow, unlike SO_REUSEPORT.
		{0, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1},
		// Small writes are not delayed (C-18).
		{0, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{0, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{0, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepIdle},
		{0, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepInterval},
		{0, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keepCount},
	}
	// No SO_REUSEADDR: for UDP it lets two sockets have one port, and one of
	// them gets nothing (FB-064). No IP_RECVERR: a client that has gone is no
	// error of the socket that serves the others (FB-036).
	udpOptions = []option{
		{unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
		{unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1},
		{unix.AF_INET, unix.IPPROTO_IP, unix.IP_PKTINFO, 1},
	}
)

// growBuffers asks for udpBuffer each way, past net.core.rmem_max and wmem_max
// with CAP_NET_ADMIN. What it gets is good enough.
func growBuffers(fd int) {
	for _, o := range []struct{ force, plain int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF},
		{unix.SO_SNDBUFFORCE, unix.SO_SNDBUF},
	} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.force, udpBuffer) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.plain, udpBuffer)
		}
	}
}

// sockaddr is ap for bind(2). Zones are interface indices.
func sockaddr(ap netip.AddrPort) (unix.Sockaddr, error) {
	switch a := ap.Addr(); {
	case a.Is4():
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: a.As4()}, nil
	case a.Is6():
		scope, err := scopeID(a)
		return &unix.SockaddrInet6{Port: int(ap.Port()), Addr: a.As16(), ZoneId: scope}, err
	}
	return nil, unix.EAFNOSUPPORT
}

// addrPort is sa as a netip value; zero for what is no Internet address.
func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(withScope(netip.AddrFrom16(sa.Addr), sa.ZoneId), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// withScope gives a link-local address its interface index for a zone.
func withScope(a netip.Addr, scope uint32) netip.Addr {
	if scope == 0 || !a.IsLinkLocalUnicast() {
		return a
	}
	return a.WithZone(strconv.FormatUint(uint64(scope), 10))
}

// scopeID is the interface index that withScope put into a.
func scopeID(a netip.Addr) (uint32, error) {
	if a.Zone() == "" {
		return 0, nil
	}
	scope, err := strconv.ParseUint(a.Zone(), 10, 32)
	if err != nil {
		return 0, unix.EINVAL
	}
	return uint32(scope), nil
}

// opError says what failed where, as package net does.
func opError(proto Proto, ap netip.AddrPort, call string, err error) error {
	var a net.Addr = net.TCPAddrFromAddrPort(ap)
	if proto == UDP {
		a = net.UDPAddrFromAddrPort(ap)
	}
	return &net.OpError{Op: "listen", Net: proto.String(), Addr: a, Err: os.NewSyscallError(call, err)}
}
