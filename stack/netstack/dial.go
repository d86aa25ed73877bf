package netstack

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/culvertnet/culvert/stack/relay"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// A dialing is a connection that the guest has not answered. It implements
// runnable.
type dialing struct {
	conn *Conn
	dst  netip.AddrPort
	done func(*Conn, error)
	told atomic.Bool
}

// StartTCP begins to connect to dst from the gateway's address. done is called
// once, when the guest has accepted or refused, or cancel was called: perhaps
// before StartTCP returns. Its errors match those that stack.Guest names. done
// must not wait: it may run on the reader of frames.
func (s *Stack) StartTCP(dst netip.AddrPort, done func(relay.GuestConn, error)) (cancel func()) {
	select {
	case <-s.done:
		done(nil, fmt.Errorf("dial %s: %w", dst, net.ErrClosed))
		return func() {}
	default:
	}
	if s.link.promoted != nil {
		return s.link.promoted.Start(dst, done)
	}
	return s.startTCP(dst, func(c *Conn, err error) {
		if err != nil {
			done(nil, err)
			return
		}
		done(c, nil)
	})
}

// startTCP is StartTCP by an endpoint of gVisor's.
func (s *Stack) startTCP(dst netip.AddrPort, done func(*Conn, error)) (cancel func()) {
	c := newConn(s, dst.Addr())
	ep, err := s.net.NewEndpoint(tcp.ProtocolNumber, network(dst.Addr()), &c.queue)
	if err != nil {
		c.settle()
		done(nil, fmt.Errorf("dial %s: %w", dst, wrapError(err)))
		return func() {}
	}
	c.ep = ep
	c.holdSend()
	if s.link.promoted != nil {
		if err := s.bindOwn(ep); err != nil {
			c.Abort()
			done(nil, fmt.Errorf("dial %s: %w", dst, wrapError(err)))
			return func() {}
		}
	}
	d := &dialing{conn: c, dst: dst, done: done}
	c.dialing.Store(d) // the answer may be quicker than Connect
	err = ep.Connect(fullAddress(dst))
	if _, started := err.(*tcpip.ErrConnectStarted); !started {
		if !d.told.Swap(true) {
			d.tell(err)
		}
		return func() {}
	}
	c.inline(dst)
	if s.closing.Load() {
		c.Abort() // Close may have reset its flows before this was one, and waits for it
	}
	return c.Abort
}

// bindOwn gives an endpoint one of the ports that no promoted flow has.
func (s *Stack) bindOwn(ep tcpip.Endpoint) (err tcpip.Error) {
	const n = lastOwnPort - firstOwnPort + 1
	for range n {
		port := firstOwnPort + uint16(s.ownPort.Add(1)%n)
		err = ep.Bind(fullAddress(netip.AddrPortFrom(s.opts.Gateway.Addr(), port)))
		if _, used := err.(*tcpip.ErrPortInUse); !used {
			return err
		}
	}
	return err
}

// run tells the outcome, which gVisor does once.
func (d *dialing) run() {
	if !d.told.Swap(true) {
		d.tell(d.conn.ep.LastError())
	}
}

func (d *dialing) tell(err tcpip.Error) {
	c := d.conn
	switch {
	case c.closed.Load():
		d.done(nil, fmt.Errorf("dial %s: %w", d.dst, net.ErrClosed))
	case err != nil:
		c.Abort()
		d.done(nil, fmt.Errorf("dial %s: %w", d.dst, wrapError(err)))
	default:
		c.dialing.Store(nil)
		d.done(c, nil)
	}
}

// DialTCP connects to dst by an endpoint of gVisor's. It ends with ctx; its errors are
// StartTCP's.
func (s *Stack) DialTCP(ctx context.Context, dst netip.AddrPort) (*Conn, error) {
	select {
	case <-s.done:
		return nil, fmt.Errorf("dial %s: %w", dst, net.ErrClosed)
	default:
	}
	type outcome struct {
		conn *Conn
		err  error
	}
	answer := make(chan outcome, 1)
	cancel := s.startTCP(dst, func(c *Conn, err error) { answer <- outcome{c, err} })
	select {
	case o := <-answer:
		return o.conn, o.err
	case <-ctx.Done():
		cancel()
		if o := <-answer; o.conn != nil {
			o.conn.Abort()
		}
		return nil, fmt.Errorf("dial %s: %w", dst, ctx.Err())
	}
}

// DialContext connects to addr, "IP:port", for a client of the daemon's own: of
// what runs in the VM, an engine or an API server. The connection is no flow of
// anyone's and is not counted as one; it ends with the Stack at the latest. It
// is probed by keepalive, so that a server that vanished is noticed while
// nothing is said. network is "tcp".
func (s *Stack) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	dst, err := netip.ParseAddrPort(addr)
	if err != nil || network != "tcp" {
		return nil, fmt.Errorf("dial %s %s through the VM's link: it takes tcp to an IP address and port", network, addr)
	}
	c, err := s.DialTCP(ctx, dst)
	if err != nil {
		return nil, err
	}
	c.settled.Do(func() {
		s.budget.add(-1)
		s.flows.Add(-1)
	})
	if err := c.KeepAlive(); err != nil {
		c.Abort()
		s.link.filter.release(c.peer)
		return nil, fmt.Errorf("dial %s: %w", dst, err)
	}
	return &ownConn{TCPConn: gonet.NewTCPConn(&c.queue, c.ep), release: sync.OnceFunc(func() { c.outline(); s.link.filter.release(c.peer) })}, nil
}

// An ownConn is a connection of the daemon's own: with deadlines, which Conn has
// not.
type ownConn struct {
	*gonet.TCPConn
	release func()
}

// Close implements net.Conn.
func (c *ownConn) Close() error {
	err := c.TCPConn.Close()
	c.release()
	return err
}

// DialUDP returns a connected endpoint with a source port of its own on the
// gateway's address.
func (s *Stack) DialUDP(dst netip.AddrPort) (relay.GuestPacketConn, error) {
	select {
	case <-s.done:
		return nil, fmt.Errorf("dial %s: %w", dst, net.ErrClosed)
	default:
	}
	c := newUDPConn(s, dst)
	ep, err := s.net.NewEndpoint(udp.ProtocolNumber, network(dst.Addr()), &c.queue)
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("dial %s: %w", dst, wrapError(err))
	}
	c.ep = ep
	_ = ep.SetSockOptInt(tcpip.MTUDiscoverOption, int(tcpip.PMTUDiscoveryDont)) // as udpHead has it; fails for no endpoint of UDP
	if err := ep.Connect(fullAddress(dst)); err != nil {
		c.Close()
		return nil, fmt.Errorf("dial %s: %w", dst, wrapError(err))
	}
	if err := c.connected(); err != nil {
		c.Close()
		return nil, fmt.Errorf("dial %s: %w", dst, err)
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
