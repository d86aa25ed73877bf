package netstack

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// # Theory of operation
//
// gVisor hands each arriving segment to a processor: a goroutine that wakes,
// locks the segment's endpoint and works through what is queued there. On a
// link whose frames come from next door the wake costs more than the work, and
// on a small machine it takes the processor the guest wants to answer on.
//
// So the reader of frames does this work itself where it can. It knows the
// flows of this stack by their addresses. For a segment of one of them it takes
// the endpoint's lock, if that is free, and marks it as a user does, which has
// gVisor queue the segment and wake nobody; the segments that follow in the same
// batch join it. Then it lets the lock go and works through the queue as the
// processor would. Whenever the lock is not free everything is as it was: the
// holder, or the processor, finds the segment in its queue.
//
// Segments that are long (inlineSegment) are left to the processor: a flow in bulk
// has work for more than one thread, and acknowledges less often if what arrives
// meanwhile is worked off together.
//
// Order is kept, because whoever works takes segments from the one queue under
// the endpoint's lock.

// inlineSegment is the longest frame the reader works on by itself.
const inlineSegment = 16 << 10

// A tuple names a TCP flow of this stack: IPv4 addresses and ports.
type tuple struct {
	local, remote         [4]byte
	localPort, remotePort uint16
}

// tupleOf returns the tuple of an IPv4 packet whose TCP header follows at hlen.
func tupleOf(ip header.IPv4, hlen int) tuple {
	return tuple{
		local: [4]byte(ip[16:20]), remote: [4]byte(ip[12:16]),
		localPort: binary.BigEndian.Uint16(ip[hlen+2:]), remotePort: binary.BigEndian.Uint16(ip[hlen:]),
	}
}

// tupleBetween returns the tuple of a flow; ok is false for one that is not IPv4's.
func tupleBetween(local, remote netip.AddrPort) (t tuple, ok bool) {
	if !local.Addr().Is4() || !remote.Addr().Is4() {
		return t, false
	}
	return tuple{local.Addr().As4(), remote.Addr().As4(), local.Port(), remote.Port()}, true
}

// An inlined is the flows whose segments the reader may work on. It is safe for
// concurrent use.
type inlined struct {
	mu    sync.RWMutex
	flows map[tuple]*Conn
}

func (i *inlined) find(t tuple) *Conn {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.flows[t]
}

// all returns them.
func (i *inlined) all() []*Conn {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return slices.Collect(maps.Values(i.flows))
}

// inline has the reader work on the segments from c's peer, dst, until c is
// closed. Those that come before, the answer to the first if it is quick, take
// gVisor's way.
func (c *Conn) inline(dst netip.AddrPort) {
	if !ownedKnown {
		return
	}
	a, err := c.ep.GetLocalAddress()
	if err != nil {
		return
	}
	t, ok := tupleBetween(addrPort(a), dst)
	if !ok {
		return
	}
	i := &c.stack.link.inlined
	i.mu.Lock()
	defer i.mu.Unlock()
	if c.closed.Load() {
		return // outline was here
	}
	if i.flows == nil {
		i.flows = make(map[tuple]*Conn)
	}
	i.flows[t] = c
	c.tuple = t
}

// outline ends inline. c is closed, or its dial has long been told.
func (c *Conn) outline() {
	i := &c.stack.link.inlined
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.flows[c.tuple] == c {
		delete(i.flows, c.tuple)
	}
}

// take takes the endpoint's lock as a user's, if it is free.
func (c *Conn) take() bool {
	ep := c.ep.(*tcp.Endpoint)
	if !ep.TryLock() {
		return false
	}
	owned(ep).Store(1)
	return true
}

// work lets the lock of take go and works through what was queued meanwhile.
func (c *Conn) work() {
	ep := c.ep.(*tcp.Endpoint)
	state := ep.EndpointState()
	owned(ep).Store(0)
	ep.ResumeWork() // unlocks
	c.worked.Store(true)
	switch state {
	case tcp.StateConnecting, tcp.StateSynSent, tcp.StateSynRecv:
		handleConnecting(ep)
	case tcp.StateEstablished, tcp.StateFinWait1, tcp.StateFinWait2, tcp.StateCloseWait, tcp.StateLastAck, tcp.StateClosing:
		handleConnected(ep)
	}
	c.worked.Store(false)
	// Where somebody else had the lock for a moment, or there was more than one
	// turn's worth, or the state is none of ours: the processor is woken if
	// anything is left.
	ep.LockUser()
	ep.UnlockUser()
}
