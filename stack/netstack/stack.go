package netstack

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// nic is the number of a stack's only NIC.
const nic = 1

// Options describes the link and the stack on it.
type Options struct {
	// Node is the guest's address on the link: flows go there, or through it.
	Node netip.Addr
	// Gateway is our own address on the link, with the link's prefix.
	Gateway netip.Prefix
	// Node6 and Gateway6 are their likes of IPv6, not served yet.
	Node6    netip.Addr
	Gateway6 netip.Prefix
	// MTU is the longest IP packet on the link, 576 to 65520 bytes.
	MTU int
	// MAC is our Ethernet address. Zero derives a locally administered one from
	// Seed, so that it stays the same over restarts.
	MAC  [6]byte
	Seed string
	// Budget bounds buffers; nil makes one of this stack's own.
	Budget *Budget
	// Promoted has flows do without gVisor where the link has the offloads that this
	// takes; see package promoted.
	Promoted bool
}

// A Stack is one life of a VM's link: the attachment and the TCP/IP on it. All
// methods are safe for concurrent use.
type Stack struct {
	net    *stack.Stack
	link   *linkEndpoint
	opts   Options
	budget *Budget
	clock  *clock // gVisor's; stands while the guest is paused
	runner *runner
	pool   pool
	start  time.Time

	flows   atomic.Int64  // live Conns and UDPConns
	ownPort atomic.Uint32 // the last of ownPorts that was tried

	closing   atomic.Bool // Close was called
	done      chan struct{}
	err       error // what ended the attachment; set before done is closed
	closeOnce sync.Once
}

// New starts a stack on att, which it owns from now on: Close closes it.
func New(att datapath.Attachment, o Options) (*Stack, error) {
	if o.MAC == ([6]byte{}) {
		o.MAC = seededMAC(o.Seed)
	}
	if o.Budget == nil {
		o.Budget = NewBudget(0, 0)
	}
	s := &Stack{opts: o, budget: o.Budget, clock: newClock(), start: time.Now(), done: make(chan struct{})}
	s.net = stack.New(stack.Options{
		Clock:              s.clock,
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	s.runner = newRunner()
	s.link = newLinkEndpoint(att, o, func() int64 { return int64(time.Since(s.start)) }, s.ended)
	s.link.runner = s.runner
	if o.Promoted && promotable(att.Info()) {
		s.link.promoted = newPromoted(s)
	}
	if err := s.configure(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// seededMAC returns an Ethernet address of the locally administered kind (the
// second bit of IEEE 802's first octet) that follows from seed.
func seededMAC(seed string) (mac [6]byte) {
	sum := sha256.Sum256([]byte("culvert gateway " + seed))
	copy(mac[:], sum[:])
	mac[0] = mac[0]&^1 | 2
	return mac
}

func (s *Stack) configure() error {
	if err := s.budget.join(s.net); err != nil {
		return err
	}
	if err := s.net.CreateNICWithOptions(nic, s.link, stack.NICOptions{QDisc: s.link}); err != nil {
		return fmt.Errorf("create nic: %w", wrapError(err))
	}
	own := tcpip.ProtocolAddress{
		Protocol: ipv4.ProtocolNumber,
		AddressWithPrefix: tcpip.AddressWithPrefix{
			Address: address(s.opts.Gateway.Addr()), PrefixLen: s.opts.Gateway.Bits(),
		},
	}
	if err := s.net.AddProtocolAddress(nic, own, stack.AddressProperties{}); err != nil {
		return fmt.Errorf("add address %s: %w", s.opts.Gateway, wrapError(err))
	}
	// For UDP alone; TCP has options of its own.
	for _, o := range []any{
		tcpip.SendBufferSizeOption{Min: stack.MinBufferSize, Default: udpSendBuffer, Max: udpSendBuffer},
		tcpip.ReceiveBufferSizeOption{Min: stack.MinBufferSize, Default: udpReceiveBuffer, Max: udpReceiveBuffer},
	} {
		if err := s.net.SetOption(o); err != nil {
			return fmt.Errorf("set %T: %w", o, wrapError(err))
		}
	}
	// Everything lies at the node or behind it.
	s.net.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
	return nil
}

// ended is told what ended the attachment.
func (s *Stack) ended(err error) {
	s.err = err
	close(s.done)
}

// Connected says whether Done tells of a guest that left.
func (s *Stack) Connected() bool { return s.link.att.Info().Connected }

// Done is closed when the datapath has ended, from either side.
func (s *Stack) Done() <-chan struct{} { return s.done }

// Err returns what ended the datapath: datapath.ErrPeerGone, datapath.ErrClosed,
// or nil while it lives.
func (s *Stack) Err() error {
	select {
	case <-s.done:
		return s.err
	default:
		return nil
	}
}

// Probe asks the node for its Ethernet address (ARP) and returns how long the
// answer took; any other packet of the node's is an answer as well. It fails with
// ctx's error when none comes.
func (s *Stack) Probe(ctx context.Context) (rtt time.Duration, err error) {
	return s.link.neigh.probe(ctx, s.done)
}

// SetPaused says that the guest is paused, or no longer. While it is, no flow to
// it ends because it does not answer, however long that takes (C-28): the time
// of TCP stands still. Everything else goes on, dials and their contexts too.
func (s *Stack) SetPaused(paused bool) { s.clock.setStopped(paused) }

// Info describes the attachment.
func (s *Stack) Info() datapath.Info { return s.link.att.Info() }

// LastFrame returns when a frame last came from the guest; zero for never.
func (s *Stack) LastFrame() time.Time {
	n := s.link.lastFrame.Load()
	if n == 0 {
		return time.Time{}
	}
	return s.start.Add(time.Duration(n))
}

// Stalled returns for how long frames have waited of which the guest takes none,
// of the queue that stands longest; 0 while it takes them, or there are none.
func (s *Stack) Stalled() (longest time.Duration) {
	for _, o := range s.link.out {
		longest = max(longest, o.stalled())
	}
	return longest
}

// Stats returns the attachment's counters and the stack's own.
func (s *Stack) Stats() Stats {
	net := s.net.Stats()
	st := Stats{
		Link:            s.link.stats,
		Queues:          len(s.link.out),
		Flows:           int(s.flows.Load()),
		Endpoints:       len(s.net.RegisteredEndpoints()),
		Retransmits:     net.TCP.Retransmits.Value(),
		ChecksumErrors:  net.TCP.ChecksumErrors.Value() + net.UDP.ChecksumErrors.Value() + net.IP.MalformedPacketsReceived.Value(),
		ReceiveDrops:    net.UDP.ReceiveBufferErrors.Value(),
		ResetsReceived:  net.TCP.ResetsReceived.Value(),
		SegmentsDropped: net.TCP.SegmentSendErrors.Value() + net.TCP.InvalidSegmentsReceived.Value(),
	}
	if s.link.promoted != nil {
		p := s.link.promoted.Stats()
		st.Endpoints += p.Flows
		st.Retransmits += p.Retransmits
		st.ResetsReceived += p.Resets
	}
	return st
}

// Stats is a reading of a Stack's counters.
type Stats struct {
	Link            *datapath.Stats
	Queues          int
	Flows           int // live flows of ours
	Endpoints       int // endpoints gVisor knows, those in TIME_WAIT among them
	Retransmits     uint64
	ChecksumErrors  uint64
	ReceiveDrops    uint64
	ResetsReceived  uint64
	SegmentsDropped uint64
}

// Close resets every flow, closes the attachment and waits for all goroutines.
// Closing again does nothing.
func (s *Stack) Close() error {
	s.closeOnce.Do(func() {
		s.closing.Store(true)
		s.budget.leave(s.net)
		if s.link.promoted != nil {
			s.link.promoted.Close()
		}
		for _, c := range s.link.inlined.all() {
			c.Abort() // also one that was reset and whose client has not read what came before
		}
		s.net.Close() // resets flows while the attachment still carries the resets
		s.link.att.Close()
		// Our goroutines first: net.Wait waits for them too, but under the
		// stack's lock, which one of them may want for its last packet.
		s.link.Wait()
		s.abortLate()
		s.net.Wait()
		s.link.udp.drain() // tells flows that they have ended
		s.runner.wait()
		s.pool.close()
		s.link.end(datapath.ErrClosed)
	})
	return nil
}

// abortLate resets endpoints that came into being while net.Close reset those that it
// knew: what a listener accepts, of the demo's guest or a test's. net.Wait waits for
// their ends. No frame comes any more, and once the processors have ended nothing does.
func (s *Stack) abortLate() {
	s.net.TransportProtocolInstance(tcp.ProtocolNumber).Wait()
	for _, ep := range s.net.RegisteredEndpoints() {
		ep.Abort()
	}
}

// sendARP sends an ARP packet of ours.
func (l *linkEndpoint) sendARP(op header.ARPOp, dst tcpip.LinkAddress, dstIP netip.Addr) {
	b := arpFrame(op, l.mac, l.filter.own, dst, dstIP)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	l.out[0].send(pkt) // waits its turn on a full link, like any other
	pkt.DecRef()
}

// address returns a as gVisor writes it.
func address(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

// errShort says that a socket held less than it had promised.
var errShort = errors.New("client socket held less than it said")
