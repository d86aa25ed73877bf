package netstack

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/culvertnet/culvert/stack/relay"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// DialTCP connects to dst from the gateway's address. It returns when the guest
// has accepted or refused, or when ctx ends. Its errors match those that
// stack.Guest names.
func (s *Stack) DialTCP(ctx context.Context, dst netip.AddrPort) (relay.GuestConn, error) {
	select {
	case <-s.done:
		return nil, fmt.Errorf("dial %s: %w", dst, net.ErrClosed)
	default:
	}
	c := newConn(s, dst.Addr())
	ep, err := s.net.NewEndpoint(tcp.ProtocolNumber, network(dst.Addr()), &c.queue)
	if err != nil {
		c.settle()
		return nil, fmt.Errorf("dial %s: %w", dst, wrapError(err))
	}
	c.ep = ep
	err = ep.Connect(fullAddress(dst))
	if _, started := err.(*tcpip.ErrConnectStarted); started {
		select {
		case <-c.writable:
			err = ep.LastError()
		case <-ctx.Done():
			c.Abort()
			return nil, fmt.Errorf("dial %s: %w", dst, ctx.Err())
		}
	}
	if err != nil {
		c.Abort()
		return nil, fmt.Errorf("dial %s: %w", dst, wrapError(err))
	}
	return c, nil
}

// DialUDP returns a connected endpoint with a source port of its own on the
// gateway's address.
func (s *Stack) DialUDP(dst netip.AddrPort) (relay.GuestPacketConn, error) {
	select {
	case <-s.done:
		return nil, fmt.Errorf("dial %s: %w", dst, net.ErrClosed)
	default:
	}
	c := newUDPConn(s, dst.Addr())
	ep, err := s.net.NewEndpoint(udp.ProtocolNumber, network(dst.Addr()), &c.queue)
	if err != nil {
		c.settle()
		return nil, fmt.Errorf("dial %s: %w", dst, wrapError(err))
	}
	c.ep = ep
	if err := ep.Connect(fullAddress(dst)); err != nil {
		c.Close()
		return nil, fmt.Errorf("dial %s: %w", dst, wrapError(err))
	}
	return c, nil
}

// network returns the protocol number of a's family.
func network(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}

func fullAddress(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{Addr: address(a.Addr()), Port: a.Port()}
}

// addrPort returns what gVisor's address says.
func addrPort(a tcpip.FullAddress) netip.AddrPort {
	ip, _ := netip.AddrFromSlice(a.Addr.AsSlice())
	return netip.AddrPortFrom(ip, a.Port)
}

// A notifier wakes one waiter; a wake-up that nobody waits for is kept.
type notifier chan struct{}

// NotifyEvent is called under gVisor's locks and only leaves word.
func (n notifier) NotifyEvent(waiter.EventMask) { n.wake() }

func (n notifier) wake() {
	select {
	case n <- struct{}{}:
	default:
	}
}
