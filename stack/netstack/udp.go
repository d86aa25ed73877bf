package netstack

import (
	"bytes"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/waiter"
)

// # Theory of operation
//
// A flow of datagrams has an endpoint of gVisor's, which holds its port and takes
// what is rare: datagrams longer than the link's MTU, which are cut into
// fragments and put together again, what finds no room on the link and waits, and
// the guest's port-unreachable. All others go past gVisor:
//
//	client ─► Write ─► frames of a prepared header and the client's bytes ─► link
//	client ◄─ deliver ◄─ the frame's payload, by its port (udpTable) ◄─ link
//
// Both ways without a copy, an allocation or a goroutine of the flow's, and some
// at a time: Write makes of datagrams of one length one super-frame where the
// guest takes it (udp_out.go), and what inbound reads in a batch for one flow is
// delivered in one call (udp_in.go).
//
// Order: Write sends on both ways in its goroutine, so gVisor's packets and ours
// are in the order of the datagrams; and while packets wait for room, ours queue
// behind them as gVisor's. Inbound delivers what waits here before it asks the
// endpoint for what gVisor has put together.

const (
	// maxDatagram is the longest UDP payload in IPv4: 65535 - 20 - 8.
	maxDatagram = 65507
	// udpSendBuffer bounds datagrams that wait for room: four of the longest.
	udpSendBuffer = 4 * 65536
	// udpReceiveBuffer bounds datagrams that were put together and not yet
	// delivered: gVisor's own 32 KiB loses the second of two long ones.
	udpReceiveBuffer = 1 << 20
)

// A UDPConn is the guest's end of one UDP flow, as a relay.GuestPacketConn.
type UDPConn struct {
	stack *Stack
	ep    tcpip.Endpoint
	peer  netip.AddrPort
	port  uint16 // ours
	head  udpHead
	queue waiter.Queue
	woken waiter.Entry
	// deliver is Receive's, nil before and after.
	deliver atomic.Pointer[func([]relay.Datagram, error)]
	queued  bool // in udpTable.ready, under its mu

	mu     sync.RWMutex // held for reading while datagrams are sent: none leaves from a port given back
	closed bool
}

var _ relay.GuestPacketConn = (*UDPConn)(nil)

// newUDPConn takes over a connected endpoint.
func newUDPConn(s *Stack, peer netip.AddrPort) *UDPConn {
	c := &UDPConn{stack: s, peer: peer}
	s.book(peer.Addr())
	return c
}

// connected is called once ep is.
func (c *UDPConn) connected() error {
	local, err := c.ep.GetLocalAddress()
	if err != nil {
		return wrapError(err)
	}
	c.port = local.Port
	c.head = newUDPHead(c.stack.link, addrPort(local), c.peer)
	return nil
}

// Write implements relay.GuestPacketConn.
func (c *UDPConn) Write(datagrams [][]byte) (n int, err error) {
	for n < len(datagrams) && err == nil {
		var done int
		var refused bool
		done, refused, err = c.send(datagrams[n:])
		n += done
		if refused {
			// The guest said so of an earlier datagram; these have not been sent.
			c.tell(nil, syscall.ECONNREFUSED)
		}
	}
	return n, err
}

// send sends datagrams until one fails, or the endpoint tells that the guest has
// refused one before.
func (c *UDPConn) send(datagrams [][]byte) (n int, refused bool, err error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for n < len(datagrams) {
		if c.closed {
			return n, false, net.ErrClosed
		}
		fast := 0
		for n+fast < len(datagrams) && len(datagrams[n+fast]) <= c.stack.link.maxPlain {
			fast++
		}
		if fast > 0 {
			n += c.sendFrames(datagrams[n : n+fast])
			if n == len(datagrams) {
				break
			}
		}
		// Too long for a frame, or without room.
		_, err := c.ep.Write(bytes.NewReader(datagrams[n]), tcpip.WriteOptions{})
		switch err.(type) {
		case nil:
			n++
		case *tcpip.ErrConnectionRefused:
			return n, true, nil
		default:
			return n, false, wrapError(err)
		}
	}
	return n, false, nil
}

// Receive implements relay.GuestPacketConn.
func (c *UDPConn) Receive(deliver func([]relay.Datagram, error)) {
	c.mu.Lock()
	closed := c.closed
	if !closed {
		c.deliver.Store(&deliver)
		c.woken.Init(c, waiter.ReadableEvents|waiter.EventErr|waiter.EventHUp)
		c.queue.EventRegister(&c.woken)
		c.stack.link.udp.add(c)
	}
	c.mu.Unlock()
	if closed {
		deliver(nil, net.ErrClosed)
	}
}

// tell delivers, unless nobody listens any more.
func (c *UDPConn) tell(datagrams []relay.Datagram, err error) {
	if deliver := c.deliver.Load(); deliver != nil {
		(*deliver)(datagrams, err)
	}
}

// NotifyEvent implements waiter.EventListener: gVisor has something for Receive.
// It holds locks and is only listened to.
func (c *UDPConn) NotifyEvent(waiter.EventMask) { c.stack.link.udp.wake(c) }

// datagrams are what endpoints are read into.
var datagrams = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// drain delivers what gVisor has put together, and errors.
func (c *UDPConn) drain() {
	buf := datagrams.Get().(*[maxDatagram]byte)
	defer datagrams.Put(buf)
	one := make([]relay.Datagram, 1)
	for c.deliver.Load() != nil {
		w := tcpip.SliceWriter(buf[:])
		res, err := c.ep.Read(&w, tcpip.ReadOptions{})
		switch err.(type) {
		case nil:
			one[0] = relay.Datagram{buf[:res.Count]}
			c.tell(one, nil)
		case *tcpip.ErrWouldBlock:
			return
		case *tcpip.ErrClosedForReceive:
			c.tell(nil, net.ErrClosed)
			return
		case *tcpip.ErrBadBuffer:
			// Longer than any datagram can be: put together of fragments that lie.
		default:
			c.tell(nil, wrapError(err))
		}
	}
}

// Resumed implements relay.GuestPacketConn.
func (c *UDPConn) Resumed() time.Time { return c.stack.clock.resumed() }

// LocalAddr implements relay.GuestPacketConn.
func (c *UDPConn) LocalAddr() string {
	return netip.AddrPortFrom(c.stack.opts.Gateway.Addr(), c.port).String()
}

// Close implements relay.GuestPacketConn.
func (c *UDPConn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	deliver := c.deliver.Swap(nil)
	if deliver != nil {
		c.stack.link.udp.remove(c)
		c.queue.EventUnregister(&c.woken)
	}
	if c.ep != nil {
		c.ep.Close() // and only then is the port another's
	}
	c.mu.Unlock()
	c.stack.unbook(c.peer.Addr())
	if deliver != nil {
		(*deliver)(nil, net.ErrClosed)
	}
	return nil
}
