package netstack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/promoted"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// What the tests of whole flows share. A flow in them is:
//
//	client ── listener.Conn ── relay ── GuestConn of StartTCP ══ Faulty link ══ guest's server
//	  host's loopback                     the stack under test                   gVisor's, or Linux's

// A way is one of the ways to make the guest's end of a flow. All are held to the
// same tests.
type way struct {
	name string
	set  func(*Options)
}

var ways = []way{
	{"gvisor", func(*Options) {}},
	{"promoted", func(o *Options) { o.Promoted = true }},
}

// needsPeekOff skips tests of promoted flows on kernels without.
func needsPeekOff(t testing.TB, w way) {
	t.Helper()
	var o Options
	w.set(&o)
	datapathtest.Require(t, "peekoff", !o.Promoted || promoted.Supported(), "promoted flows take SO_PEEK_OFF for TCP, which Linux has since 6.9")
}

// flowPatience is for what an idle machine without losses does at once, and with
// losses within some retransmission time-outs: 1 s, doubled each time.
const flowPatience = 50 * time.Second

// A flowGuest is a guest on the other end of a link.
type flowGuest struct {
	name string
	// open makes a link and the guest on it. The guest ends with the test.
	open func(t testing.TB, depth int) (ours datapath.Attachment, listen func(port uint16) (flowListener, error))
}

// A flowListener is a server of the guest's.
type flowListener interface {
	Accept() (flowConn, error)
	Close() error
}

// A flowConn is an end of a flow: the client, or the guest's server.
type flowConn interface {
	net.Conn
	CloseWrite() error
	SetReadBuffer(bytes int) error
	// reset ends the connection with a reset.
	reset()
}

// flowGuests are the guests there are; the files of a system add its own.
var flowGuests = []flowGuest{{"gvisor", openGVisorGuest}}

// A flowClient is a host's client.
type flowClient struct{ *net.TCPConn }

func (c flowClient) reset() {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// A flowBed is a stack under test between clients and a guest.
type flowBed struct {
	t      testing.TB
	way    way
	guest  string
	host   *Stack
	link   *datapathtest.Faulty
	listen func(port uint16) (flowListener, error)
	group  *listener.Group
	ended  chan relay.End // of every flow

	mu      sync.Mutex
	under   map[netip.AddrPort]*underWay // by the client's address
	dialErr func(error)                  // told of a refused dial, may be nil
}

// An underWay is our part of one flow.
type underWay struct {
	client *listener.Conn
	cancel func()
	guest  relay.GuestConn // nil until it has answered
}

// eachBed runs test for each way and each guest; with the first guest only for who is
// in a hurry.
func eachBed(t *testing.T, depth int, test func(t *testing.T, b *flowBed)) {
	for _, w := range ways {
		for i, g := range flowGuests {
			if testing.Short() && i > 0 {
				break
			}
			t.Run(w.name+"/"+g.name, func(t *testing.T) { test(t, newFlowBed(t, w, g, depth)) })
		}
	}
}

// newFlowBed makes a bed on a link whose queues hold depth frames, where that can be
// chosen. At the test's end no flow may be left, nor anything else.
func newFlowBed(t testing.TB, w way, g flowGuest, depth int) *flowBed {
	t.Helper()
	needsPeekOff(t, w)
	datapathtest.Leaks(t)
	att, listen := g.open(t, depth)
	b := &flowBed{
		t: t, way: w, guest: g.name, listen: listen, ended: make(chan relay.End, 10000), under: make(map[netip.AddrPort]*underWay),
		link: datapathtest.NewFaulty(att, 1, datapathtest.Faults{}, datapathtest.Faults{}),
	}
	o := Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"}
	w.set(&o)
	var err error
	b.host, err = New(b.link, o)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, b.host.Close()) })
	_, err = b.host.Probe(t.Context())
	require.NoError(t, err)
	b.group, err = listener.NewGroup(b)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, b.group.Close()) })
	t.Cleanup(func() {
		b.eventually("no flow is left", func() bool { return b.host.Stats().Flows == 0 && b.live() == 0 })
	})
	return b
}

// setFaults makes the link a bad one in both directions.
func (b *flowBed) setFaults(f datapathtest.Faults) { b.link.SetFaults(f, f) }

func (b *flowBed) eventually(what string, is func() bool) {
	b.t.Helper()
	assert.Eventually(b.t, is, flowPatience, time.Millisecond, what)
}

// live returns how many flows there are.
func (b *flowBed) live() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.under)
}

// Accepted implements listener.Handler as package stack does.
func (b *flowBed) Accepted(s *listener.Socket, c *listener.Conn) {
	key, u := c.RemoteAddr(), &underWay{client: c}
	b.mu.Lock()
	b.under[key] = u
	b.mu.Unlock()
	gone := func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.under, key)
	}
	cancel := b.host.StartTCP(netip.AddrPortFrom(guestAddr.Addr(), s.Token().(uint16)), func(guest relay.GuestConn, err error) {
		if err != nil {
			b.mu.Lock()
			told := b.dialErr
			b.mu.Unlock()
			c.Abort()
			gone()
			if told != nil {
				told(err)
			} else {
				assert.NoError(b.t, err)
			}
			return
		}
		b.mu.Lock()
		u.guest = guest
		b.mu.Unlock()
		relay.Start(hostClient{c}, guest, relay.Options{ToGuest: new(relay.Meter), ToHost: new(relay.Meter)}, func(e relay.End) {
			gone()
			b.ended <- e
		})
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	u.cancel = cancel
}

// Readable implements listener.Handler.
func (b *flowBed) Readable(*listener.Socket) {}

// AcceptError implements listener.Handler.
func (b *flowBed) AcceptError(_ *listener.Socket, err error) { assert.NoError(b.t, err) }

// serve runs handler for each connection to a server of the guest's at port, and
// returns the host's address that leads there. Whoever it runs for is waited for.
func (b *flowBed) serve(port uint16, handler func(flowConn)) netip.AddrPort {
	b.t.Helper()
	l, err := b.listen(port)
	require.NoError(b.t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { handler(c); _ = c.Close() })
		}
	})
	b.t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	s, err := b.group.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0"), port)
	require.NoError(b.t, err)
	return s.Addr()
}

// pairs is serve for who wants the server's ends one by one.
func (b *flowBed) pairs(port uint16) func() (client, server flowConn) {
	accepted := make(chan flowConn)
	var open sync.WaitGroup
	end := make(chan struct{})
	at := b.serve(port, func(c flowConn) {
		select {
		case accepted <- c:
			<-end // the test closes it
		case <-end:
		}
	})
	b.t.Cleanup(func() { close(end); open.Wait() })
	return func() (client, server flowConn) {
		b.t.Helper()
		client = b.dial(at)
		select {
		case server = <-accepted:
		case <-time.After(flowPatience):
			b.t.Fatal("the guest has accepted nobody")
		}
		b.t.Cleanup(func() { _ = server.Close() })
		return client, server
	}
}

// dial connects a client, which the test's end closes.
func (b *flowBed) dial(at netip.AddrPort) flowConn {
	b.t.Helper()
	c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(at))
	require.NoError(b.t, err)
	b.t.Cleanup(func() { _ = c.Close() })
	require.NoError(b.t, c.SetDeadline(time.Now().Add(flowPatience)))
	return flowClient{c}
}

// ours returns our part of a client's flow, once the guest has answered.
func (b *flowBed) ours(client flowConn) (u *underWay) {
	b.t.Helper()
	key := client.LocalAddr().(*net.TCPAddr).AddrPort()
	require.Eventually(b.t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		u = b.under[key]
		return u != nil && u.guest != nil
	}, flowPatience, time.Millisecond, "our part of the flow")
	return u
}

// mustEnd asserts how the next flow ends.
func (b *flowBed) mustEnd(want ...relay.End) {
	b.t.Helper()
	select {
	case e := <-b.ended:
		assert.Contains(b.t, want, e, "%v", e)
	case <-time.After(flowPatience):
		assert.Fail(b.t, "the flow has not ended")
	}
}

// A pace is how one end of a stream goes about it.
type pace struct {
	most  int           // of a read or write, in bytes; 200 kB if zero
	stops int           // every how many bytes it stops for a while, on average; never if zero
	stop  time.Duration // how long at most
}

// bytesOf is the stream of a seed.
func bytesOf(seed uint64) io.Reader {
	var key [32]byte
	binary.BigEndian.PutUint64(key[:], seed)
	return rand.NewChaCha8(key)
}

// A walker draws the steps of a pace.
type walker struct {
	pace
	rng *rand.Rand
}

func (p pace) walk(seed, side uint64) *walker {
	if p.most == 0 {
		p.most = 200_000
	}
	return &walker{p, rand.New(rand.NewPCG(seed, side))}
}

// size draws the length of the next read or write: small ones as often as long ones.
func (w *walker) size() int {
	if w.rng.IntN(2) == 0 {
		return 1 + w.rng.IntN(min(w.most, 3000))
	}
	return 1 + w.rng.IntN(w.most)
}

// passed stops for a while now and then.
func (w *walker) passed(n int) {
	if w.stops > 0 && w.rng.IntN(w.stops) < n {
		time.Sleep(time.Duration(w.rng.Int64N(int64(w.stop))))
	}
}

// send writes n bytes of the stream of seed.
func (p pace) send(c io.Writer, seed uint64, n int) error {
	w, from, buf := p.walk(seed, 1), bytesOf(seed), make([]byte, max(p.most, 200_000))
	for n > 0 {
		piece := buf[:min(n, w.size())]
		_, _ = io.ReadFull(from, piece)
		if _, err := c.Write(piece); err != nil {
			return err
		}
		n -= len(piece)
		w.passed(len(piece))
	}
	return nil
}

var errWrongByte = errors.New("another byte than the one sent")

// receive reads the stream of seed until its end, and returns how many bytes came.
// A byte that was not sent, or sent elsewhere, is errWrongByte; the end is nil.
func (p pace) receive(c io.Reader, seed uint64) (n int, err error) {
	w, want := p.walk(seed, 2), bytesOf(seed)
	buf, expect := make([]byte, max(p.most, 200_000)), make([]byte, max(p.most, 200_000))
	for {
		k, err := c.Read(buf[:w.size()])
		_, _ = io.ReadFull(want, expect[:k])
		if !bytes.Equal(buf[:k], expect[:k]) {
			return n, fmt.Errorf("%w, between %d and %d", errWrongByte, n, n+k)
		}
		n += k
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		w.passed(k)
	}
}

// mustReceive asserts that the whole stream of n bytes comes, and then its end.
func (p pace) mustReceive(t testing.TB, who string, c io.Reader, seed uint64, n int) {
	t.Helper()
	got, err := p.receive(c, seed)
	assert.NoError(t, err, "%s, after %d of %d bytes", who, got, n)
	assert.Equal(t, n, got, "%s: an end of stream before all had come (C-13)", who)
}

// mustSend asserts that the whole stream is taken, and ends it.
func (p pace) mustSend(t testing.TB, who string, c flowConn, seed uint64, n int) {
	t.Helper()
	if assert.NoError(t, p.send(c, seed, n), who) {
		assert.NoError(t, c.CloseWrite(), who)
	}
}

// A gvisorConn is a connection of a gVisor guest's.
type gvisorConn struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
}

func (c gvisorConn) reset() { c.ep.Abort() }

func (c gvisorConn) SetReadBuffer(bytes int) error {
	c.ep.SocketOptions().SetReceiveBufferSize(int64(bytes), true)
	return nil
}

// A gvisorListener is gonet's, which does not show its endpoints.
type gvisorListener struct {
	ep       tcpip.Endpoint
	ready    waiter.Entry
	queue    *waiter.Queue
	incoming chan struct{}
	done     chan struct{}
	once     sync.Once
}

func (l *gvisorListener) Accept() (flowConn, error) {
	for {
		ep, queue, err := l.ep.Accept(nil)
		switch err.(type) {
		case nil:
			// As holdSend has it: a buffer that gVisor tunes leaves writers asleep.
			o := ep.SocketOptions()
			o.SetSendBufferSize(o.GetSendBufferSize(), true)
			c := gvisorConn{gonet.NewTCPConn(queue, ep), ep}
			return c, c.SetDeadline(time.Now().Add(flowPatience))
		case *tcpip.ErrWouldBlock:
		default:
			return nil, wrapError(err)
		}
		select {
		case <-l.incoming:
		case <-l.done:
			return nil, net.ErrClosed
		}
	}
}

func (l *gvisorListener) Close() error {
	l.once.Do(func() { close(l.done); l.ep.Close() })
	return nil
}

func openGVisorGuest(t testing.TB, depth int) (datapath.Attachment, func(uint16) (flowListener, error)) {
	o := offloads["csum+tso"]
	o.Depth = depth
	ours, theirs := memory.Pair(o)
	guest, err := New(theirs, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, Seed: "guest"})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, guest.Close()) })
	return ours, func(port uint16) (flowListener, error) {
		l := &gvisorListener{queue: new(waiter.Queue), incoming: make(notifier, 1), done: make(chan struct{})}
		ep, e := guest.net.NewEndpoint(tcp.ProtocolNumber, ipv4.ProtocolNumber, l.queue)
		if e != nil {
			return nil, wrapError(e)
		}
		l.ep = ep
		l.ready.Init(notifier(l.incoming), waiter.ReadableEvents)
		l.queue.EventRegister(&l.ready)
		if e := ep.Bind(guest.own(port)); e != nil {
			return nil, wrapError(e)
		}
		if e := ep.Listen(1024); e != nil {
			return nil, wrapError(e)
		}
		return l, nil
	}
}
