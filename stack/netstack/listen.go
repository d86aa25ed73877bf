package netstack

import (
	"fmt"
	"net"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
)

// ListenTCP listens on the stack's own address. A VM's stack never does: it is
// for the in-process guest of the demo and the tests, a Stack with node and
// gateway exchanged.
func (s *Stack) ListenTCP(port uint16) (net.Listener, error) {
	l, err := gonet.ListenTCP(s.net, s.own(port), ipv4.ProtocolNumber)
	if err != nil {
		return nil, fmt.Errorf("listen on %d/tcp: %w", port, err)
	}
	return l, nil
}

// ListenUDP is ListenTCP's like for datagrams.
func (s *Stack) ListenUDP(port uint16) (net.PacketConn, error) {
	own := s.own(port)
	c, err := gonet.DialUDP(s.net, &own, nil, ipv4.ProtocolNumber)
	if err != nil {
		return nil, fmt.Errorf("listen on %d/udp: %w", port, err)
	}
	return c, nil
}

func (s *Stack) own(port uint16) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nic, Addr: address(s.opts.Gateway.Addr()), Port: port}
}
