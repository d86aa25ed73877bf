package relay

import (
	"container/list"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// # Theory of operation
//
// A client's datagrams to one host address are one flow, with an endpoint of
// its own towards the guest (C-20). The first datagram opens it; it ends
//
//   - after Idle without a datagram either way,
//   - when the table is full and it is the one idle for longest,
//   - when its publish or VM goes (CloseWhere),
//   - when its endpoint breaks.
//
// Whatever ends it frees the endpoint and takes it out of the table, and the
// client's next datagram opens a new one (FB-033).
//
// Flows stand in a list by the time they were last looked at. Traffic only
// stamps the flow; whoever looks for an idle one, at the head of the list, moves
// those that were stamped since to the tail. So a datagram takes no list
// operation, and finding the idlest costs one move for each flow that was active.

// A UDPKey names a UDP flow. It is comparable.
type UDPKey struct {
	// Socket is the host socket, whatever the Handler knows it by; a pointer.
	Socket any
	Client netip.AddrPort
	// Local is the host address that the client sent to.
	Local netip.Addr
}

// A UDPHandler opens flows and talks to clients. Its methods may be called
// from several goroutines at once and must not block; Open and Ended are called
// under no lock of the flow's.
type UDPHandler interface {
	// Open returns the guest's end of a new flow. An error drops the datagram
	// that asked for it.
	Open(k UDPKey) (UDPFlow, error)
	// Reply sends a datagram to the client, from where it sent to.
	Reply(k UDPKey, segs [][]byte) error
	// Refused tells the client that the guest has nobody at that port.
	Refused(k UDPKey)
}

// A UDPFlow is a flow as the Handler opened it.
type UDPFlow interface {
	GuestPacketConn
	// Passed counts a datagram of n bytes, to the guest or from it.
	Passed(toGuest bool, n int)
	// Ended is called once, when the flow has gone.
	Ended(evicted bool)
}

// Sessions is the table of UDP flows. All methods are safe for concurrent use.
type Sessions struct {
	handler UDPHandler
	idle    time.Duration
	max     int
	stop    chan struct{}
	wg      sync.WaitGroup // the sweeper, and a receiver for each flow

	mu     sync.Mutex
	flows  map[UDPKey]*udpSession
	order  list.List // of *udpSession; idlest first
	closed bool
}

// A udpSession is one flow in the table.
type udpSession struct {
	key    UDPKey
	flow   UDPFlow
	active atomic.Int64 // when a datagram last passed, ns since began
	looked int64        // active, when the list last looked; under Sessions.mu
	elem   *list.Element
}

// NewSessions returns an empty table of at most max flows that end after idle.
func NewSessions(h UDPHandler, idle time.Duration, max int) *Sessions {
	s := &Sessions{handler: h, idle: idle, max: max, stop: make(chan struct{}), flows: make(map[UDPKey]*udpSession)}
	s.wg.Go(s.sweep)
	return s
}

// Deliver sends a client's datagram to the guest, opening its flow if it has
// none. It does not block and keeps nothing of b. An error concerns this
// datagram only.
func (s *Sessions) Deliver(k UDPKey, b []byte) error {
	f, err := s.session(k)
	if err != nil {
		return err
	}
	f.touch()
	n, err := f.flow.Write(b)
	if errors.Is(err, net.ErrClosed) {
		// It ended between the look-up and now: once more, with a new one.
		s.remove(f, false)
		if f, err = s.session(k); err != nil {
			return err
		}
		n, err = f.flow.Write(b)
	}
	if err != nil {
		return err
	}
	f.flow.Passed(true, n)
	return nil
}

func (f *udpSession) touch() { f.active.Store(int64(time.Since(began))) }

// session returns k's flow, a new one if there is none.
func (s *Sessions) session(k UDPKey) (*udpSession, error) {
	s.mu.Lock()
	if f := s.flows[k]; f != nil || s.closed {
		s.mu.Unlock()
		if f == nil {
			return nil, net.ErrClosed
		}
		return f, nil
	}
	var evicted *udpSession
	if len(s.flows) >= s.max {
		evicted = s.idlest()
		s.takeOut(evicted)
	}
	s.mu.Unlock()
	if evicted != nil {
		evicted.end(true)
	}

	flow, err := s.handler.Open(k)
	if err != nil {
		return nil, err
	}
	f := &udpSession{key: k, flow: flow}
	f.touch()
	s.mu.Lock()
	if other := s.flows[k]; other != nil || s.closed {
		s.mu.Unlock()
		f.end(false)
		if other == nil {
			return nil, net.ErrClosed
		}
		return other, nil
	}
	f.looked = f.active.Load()
	f.elem = s.order.PushBack(f)
	s.flows[k] = f
	s.wg.Go(func() { s.receive(f) })
	s.mu.Unlock()
	return f, nil
}

// receive passes on what the guest sends, until the flow ends.
func (s *Sessions) receive(f *udpSession) {
	_ = f.flow.Receive(func(segs [][]byte, err error) error {
		if errors.Is(err, syscall.ECONNREFUSED) {
			s.handler.Refused(f.key)
			return nil
		}
		if err != nil {
			return nil // of one datagram; the next may be fine
		}
		f.touch()
		n := 0
		for _, seg := range segs {
			n += len(seg)
		}
		// A client that is gone, or has no room, loses it; nothing is tried
		// again (FB-036).
		if s.handler.Reply(f.key, segs) == nil {
			f.flow.Passed(false, n)
		}
		return nil
	})
	s.remove(f, false)
}

// remove ends f unless somebody has.
func (s *Sessions) remove(f *udpSession, evicted bool) {
	s.mu.Lock()
	ours := s.takeOut(f)
	s.mu.Unlock()
	if ours {
		f.end(evicted)
	}
}

// takeOut removes f from the table and reports whether it was there. s.mu is
// held.
func (s *Sessions) takeOut(f *udpSession) bool {
	if f.elem == nil {
		return false
	}
	s.order.Remove(f.elem)
	f.elem = nil
	delete(s.flows, f.key)
	return true
}

// end frees the flow's endpoint.
func (f *udpSession) end(evicted bool) {
	_ = f.flow.Close()
	f.flow.Ended(evicted)
}

// idlest returns the flow that was idle for longest, bringing the list up to
// date as far as needed. s.mu is held, and there is a flow.
func (s *Sessions) idlest() *udpSession {
	for {
		f := s.order.Front().Value.(*udpSession)
		if active := f.active.Load(); active != f.looked {
			f.looked = active
			s.order.MoveToBack(f.elem)
			continue
		}
		return f
	}
}

// sweep ends idle flows. It looks eight times in Idle, so a flow lives for at
// most an eighth longer.
func (s *Sessions) sweep() {
	tick := time.NewTicker(max(s.idle/8, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
			s.endIdle()
		}
	}
}

func (s *Sessions) endIdle() {
	deadline := int64(time.Since(began) - s.idle)
	var idle []*udpSession
	s.mu.Lock()
	for len(s.flows) > 0 {
		if s.order.Front().Value.(*udpSession).looked > deadline {
			break
		}
		f := s.idlest()
		if f.looked > deadline {
			break
		}
		s.takeOut(f)
		idle = append(idle, f)
	}
	s.mu.Unlock()
	for _, f := range idle {
		f.end(false)
	}
}

// Len returns how many flows there are.
func (s *Sessions) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.flows)
}

// CloseWhere ends every flow whose key is meant.
func (s *Sessions) CloseWhere(meant func(UDPKey) bool) {
	var gone []*udpSession
	s.mu.Lock()
	for k, f := range s.flows {
		if meant(k) {
			s.takeOut(f)
			gone = append(gone, f)
		}
	}
	s.mu.Unlock()
	for _, f := range gone {
		f.end(false)
	}
}

// Close ends all flows and waits for their goroutines. Closing again only waits.
func (s *Sessions) Close() {
	s.mu.Lock()
	was := s.closed
	s.closed = true
	s.mu.Unlock()
	if !was {
		close(s.stop)
	}
	s.CloseWhere(func(UDPKey) bool { return true })
	s.wg.Wait()
}
