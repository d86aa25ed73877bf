package relay

import (
	"container/list"
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// # Theory of operation
//
// A client's datagrams to one host address are one flow, with an endpoint of
// its own towards the guest (C-20). The first datagram opens it; it ends
//
//   - after Idle without a datagram either way, unless the guest was paused in
//     this time: the client keeps its port (C-20) over a pause of any length (C-28),
//   - when the table is full and it is the one idle for longest,
//   - when the guest says that nobody is at the port (FB-049),
//   - when its publish or VM goes (CloseWhere),
//   - when its endpoint breaks.
//
// Whatever ends it frees the endpoint and takes it out of the table, and the
// client's next datagram opens a new one (FB-033).
//
// Flows stand in a list in the order of their last datagram: each moves its flow
// to the tail, under the lock that the look-up takes anyway. So the head is the
// idlest, for eviction as for expiry, and both cost the same with any number of
// flows.

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
	// Reply sends datagrams to the client, from where it sent to, and returns how
	// many bytes of payload went. It neither blocks nor keeps anything of them. An
	// error that matches syscall.ECONNREFUSED (the client is gone) or
	// net.ErrClosed ends the flow, any other concerns single datagrams.
	Reply(k UDPKey, datagrams []Datagram) (bytes int, err error)
	// Refused tells the client that the guest has nobody at that port.
	Refused(k UDPKey)
}

// A UDPFlow is a flow as the Handler opened it.
type UDPFlow interface {
	GuestPacketConn
	// Passed counts n bytes of payload, to the guest or from it.
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
	wg      sync.WaitGroup // the sweeper

	mu     sync.Mutex
	flows  map[UDPKey]*udpSession
	order  list.List // of *udpSession; idlest first
	closed bool
}

// A udpSession is one flow in the table.
type udpSession struct {
	key  UDPKey
	flow UDPFlow

	// Under Sessions.mu.
	active time.Time     // when a datagram last passed
	elem   *list.Element // nil once it is out of the table
}

// NewSessions returns an empty table of at most max flows that end after idle.
func NewSessions(h UDPHandler, idle time.Duration, max int) *Sessions {
	s := &Sessions{handler: h, idle: idle, max: max, stop: make(chan struct{}), flows: make(map[UDPKey]*udpSession)}
	s.wg.Go(s.sweep)
	return s
}

// Deliver sends a client's datagrams to the guest, in order, opening its flow if
// it has none. It does not block and keeps nothing of them. n of them were
// taken; an error concerns the next one.
func (s *Sessions) Deliver(k UDPKey, datagrams [][]byte) (n int, err error) {
	f, err := s.session(k)
	if err != nil {
		return 0, err
	}
	n, err = f.write(datagrams)
	if errors.Is(err, net.ErrClosed) {
		// It ended between the look-up and now: once more, with a new one.
		s.remove(f)
		if f, err = s.session(k); err != nil {
			return n, err
		}
		var more int
		more, err = f.write(datagrams[n:])
		n += more
	}
	return n, err
}

// write sends datagrams and counts those that were taken.
func (f *udpSession) write(datagrams [][]byte) (n int, err error) {
	n, err = f.flow.Write(datagrams)
	bytes := 0
	for _, d := range datagrams[:n] {
		bytes += len(d)
	}
	f.flow.Passed(true, bytes)
	return n, err
}

// session returns k's flow, a new one if there is none, and notes that a
// datagram passes.
func (s *Sessions) session(k UDPKey) (*udpSession, error) {
	if f, err := s.lookUp(k); f != nil || err != nil {
		return f, err
	}
	flow, err := s.handler.Open(k)
	if err != nil {
		return nil, err
	}
	return s.add(&udpSession{key: k, flow: flow})
}

// lookUp returns k's flow, nil if there is none.
func (s *Sessions) lookUp(k UDPKey) (*udpSession, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, net.ErrClosed
	}
	f := s.flows[k]
	if f != nil {
		s.touch(f)
	}
	return f, nil
}

// touch notes that a datagram of f passes. s.mu is held.
func (s *Sessions) touch(f *udpSession) {
	if f.elem != nil {
		f.active = time.Now()
		s.order.MoveToBack(f.elem)
	}
}

// add puts a new flow into the table, in the place of the idlest if it is full.
// Where another was faster that one is returned and f ended.
func (s *Sessions) add(f *udpSession) (*udpSession, error) {
	s.mu.Lock()
	other, closed := s.flows[f.key], s.closed
	var evicted *udpSession
	if other == nil && !closed {
		if len(s.flows) >= max(s.max, 1) {
			evicted = s.order.Front().Value.(*udpSession)
			s.takeOut(evicted)
		}
		f.active = time.Now()
		f.elem = s.order.PushBack(f)
		s.flows[f.key] = f
	}
	s.mu.Unlock()
	switch {
	case closed:
		f.end(false)
		return nil, net.ErrClosed
	case other != nil:
		f.end(false)
		return other, nil
	case evicted != nil:
		evicted.end(true)
	}
	f.flow.Receive(func(datagrams []Datagram, err error) { s.receive(f, datagrams, err) })
	return f, nil
}

// receive passes on what the guest sends.
func (s *Sessions) receive(f *udpSession, datagrams []Datagram, err error) {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		if s.remove(f) {
			s.handler.Refused(f.key)
		}
		return
	case errors.Is(err, net.ErrClosed):
		s.remove(f)
		return
	case err != nil:
		return // of one datagram; the next may be fine
	}
	s.mu.Lock()
	live := f.elem != nil
	s.touch(f)
	s.mu.Unlock()
	if !live {
		return // it has ended meanwhile
	}
	// Nothing is tried again (FB-036): a client that is gone ends the flow, any
	// other error concerns single datagrams (FB-041).
	n, err := s.handler.Reply(f.key, datagrams)
	f.flow.Passed(false, n)
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, net.ErrClosed) {
		s.remove(f)
	}
}

// remove ends f unless somebody has, and reports whether it did.
func (s *Sessions) remove(f *udpSession) bool {
	s.mu.Lock()
	ours := s.takeOut(f)
	s.mu.Unlock()
	if ours {
		f.end(false)
	}
	return ours
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
	var idle []*udpSession
	s.mu.Lock()
	for e := s.order.Front(); e != nil; e = s.order.Front() {
		f := e.Value.(*udpSession)
		if time.Since(f.active) < s.idle {
			break
		}
		if time.Since(f.flow.Resumed()) < s.idle {
			s.touch(f) // with as much time again, at most, as it had
			continue
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

// Close ends all flows and waits for the sweeper. Closing again only waits.
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
