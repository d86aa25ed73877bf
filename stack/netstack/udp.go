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

const (
	// maxDatagram is the longest UDP payload in IPv4: 65535 - 20 - 8.
	maxDatagram = 65507
	// udpSendBuffer bounds datagrams that wait for room: four of the longest.
	udpSendBuffer = 4 * 65536
	// udpReceiveBuffer bounds datagrams that the client's socket has not taken:
	// gVisor's own 32 KiB loses the second of two long ones.
	udpReceiveBuffer = 1 << 20
)

// A UDPConn is the guest's end of one UDP flow, as a relay.GuestPacketConn.
type UDPConn struct {
	stack    *Stack
	ep       tcpip.Endpoint
	peer     netip.Addr
	queue    waiter.Queue
	readable notifier
	in       waiter.Entry
	closed   atomic.Bool
	refused  atomic.Bool // Write came upon a port-unreachable
	settled  sync.Once
}

var _ relay.GuestPacketConn = (*UDPConn)(nil)

func newUDPConn(s *Stack, peer netip.Addr) *UDPConn {
	c := &UDPConn{stack: s, peer: peer, readable: make(notifier, 1)}
	c.in.Init(c.readable, waiter.ReadableEvents|waiter.EventHUp|waiter.EventErr)
	c.queue.EventRegister(&c.in)
	s.book(peer)
	return c
}

func (c *UDPConn) settle() { c.settled.Do(func() { c.stack.unbook(c.peer) }) }

// Write implements relay.GuestPacketConn. An error that the guest sent for an
// earlier datagram is left to Receive.
func (c *UDPConn) Write(b []byte) (int, error) {
	for range 2 {
		n, err := c.ep.Write(bytes.NewReader(b), tcpip.WriteOptions{})
		switch err.(type) {
		case nil:
			return int(n), nil
		case *tcpip.ErrConnectionRefused:
			c.refused.Store(true)
			c.readable.wake()
		default:
			if c.closed.Load() {
				return 0, net.ErrClosed
			}
			return 0, wrapError(err)
		}
	}
	return 0, syscall.ECONNREFUSED
}

// datagrams serve Receive while something is there to be read.
var datagrams = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// Receive implements relay.GuestPacketConn.
func (c *UDPConn) Receive(deliver func(segs [][]byte, err error) error) error {
	segs := make([][]byte, 1)
	for {
		if err := c.receive(segs, deliver); err != nil {
			return err
		}
		<-c.readable
	}
}

// receive delivers what is there.
func (c *UDPConn) receive(segs [][]byte, deliver func([][]byte, error) error) error {
	buf := datagrams.Get().(*[maxDatagram]byte)
	defer datagrams.Put(buf)
	for {
		if c.closed.Load() {
			return net.ErrClosed
		}
		if c.refused.Swap(false) {
			if err := deliver(nil, syscall.ECONNREFUSED); err != nil {
				return err
			}
		}
		w := tcpip.SliceWriter(buf[:])
		res, err := c.ep.Read(&w, tcpip.ReadOptions{})
		switch err.(type) {
		case nil:
			segs[0] = buf[:res.Count]
			if err := deliver(segs, nil); err != nil {
				return err
			}
		case *tcpip.ErrWouldBlock:
			return nil
		case *tcpip.ErrClosedForReceive:
			return net.ErrClosed
		case *tcpip.ErrBadBuffer:
			// Longer than any datagram can be: put together of fragments that lie.
		default:
			if err := deliver(nil, wrapError(err)); err != nil {
				return err
			}
		}
	}
}

// Resumed implements relay.GuestPacketConn.
func (c *UDPConn) Resumed() time.Time { return c.stack.clock.resumed() }

// LocalAddr implements relay.GuestPacketConn.
func (c *UDPConn) LocalAddr() string {
	a, err := c.ep.GetLocalAddress()
	if err != nil {
		return ""
	}
	return addrPort(a).String()
}

// Close implements relay.GuestPacketConn.
func (c *UDPConn) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		if c.ep != nil {
			c.ep.Close()
		}
		c.readable.wake()
		c.settle()
	}
	return nil
}
