package stack

import (
	"net/netip"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// An icmpSender tells clients that the guest has nobody at a UDP port, which
// takes CAP_NET_RAW (raw(7)). Without it, it does nothing.
type icmpSender struct {
	mu     sync.Mutex
	v4, v6 int // raw sockets; -1 without
}

func newICMPSender() *icmpSender {
	return &icmpSender{v4: rawSocket(unix.AF_INET, unix.IPPROTO_ICMP), v6: rawSocket(unix.AF_INET6, unix.IPPROTO_ICMPV6)}
}

func rawSocket(family, proto int) int {
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
	if err != nil {
		return -1
	}
	// It only sends: what comes in must not pile up. A classic filter that
	// returns 0 drops everything (socket(7), SO_ATTACH_FILTER).
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop[0]}); err != nil {
		_ = unix.Close(fd)
		return -1
	}
	return fd
}

// portUnreachable tells client that nobody is at host, from host's address.
func (s *icmpSender) portUnreachable(client, host netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := host.Addr().Unmap()
	// A client that cannot be told waits for its own time-out, as it would
	// behind any firewall; the refusal is counted either way.
	if from.Is4() {
		if s.v4 >= 0 {
			info := &unix.Inet4Pktinfo{Spec_dst: from.As4()}
			to := &unix.SockaddrInet4{Addr: client.Addr().Unmap().As4()}
			_, _ = unix.SendmsgN(s.v4, unreachable4(client, host), unix.PktInfo4(info), to, 0)
		}
		return
	}
	if s.v6 >= 0 {
		// Zones are interface indices, as package listener has them.
		scope, _ := strconv.ParseUint(client.Addr().Zone(), 10, 32)
		info := &unix.Inet6Pktinfo{Addr: from.As16(), Ifindex: uint32(scope)}
		to := &unix.SockaddrInet6{Addr: client.Addr().As16(), ZoneId: uint32(scope)}
		_, _ = unix.SendmsgN(s.v6, unreachable6(client, host), unix.PktInfo6(info), to, 0)
	}
}

func (s *icmpSender) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, fd := range []*int{&s.v4, &s.v6} {
		if *fd >= 0 {
			_ = unix.Close(*fd)
			*fd = -1
		}
	}
}
