package names

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

const (
	// udpSize is the longest answer over UDP: what passes every path unfragmented
	// (1280, the least MTU of IPv6, less 48 of headers), as DNS Flag Day 2020 has
	// it. It is also what we say we take.
	udpSize = 1232
	// maxConns bounds the TCP connections at a time; others wait to be accepted.
	maxConns = 128
	// acceptPause is how long accepting rests when it fails, as for want of
	// descriptors.
	acceptPause = 100 * time.Millisecond
	// udpPoll is how long the server library waits for a datagram before it looks
	// up. Shutdown wakes it.
	udpPoll = time.Hour
	// maxZone leaves room for the names in front of the zone, and for
	// "hostmaster.".
	maxZone = 189
)

// A Table is what names are answered from. *reconcile.Names is one.
type Table interface {
	// Lookup says where a name of the zone leads, given without the zone; below a
	// name everything leads where it does. Without addresses, a name exists
	// because others are below it.
	Lookup(name string) (addrs []netip.Addr, exists bool)
	// Has says whether the very name is in the table.
	Has(name string) bool
	// Reverse returns the names that lead to an address, the best first.
	Reverse(addr netip.Addr) []string
}

var _ Table = (*reconcile.Names)(nil)

// Options are what New takes.
type Options struct {
	// Listen is where to listen, UDP and TCP. Port 0 takes one number for both.
	Listen netip.AddrPort
	// Zone is the zone's name, as ParseZone takes it.
	Zone string
	// NoData makes an unknown name of the zone one without data instead of
	// NXDOMAIN: for resolvers that would search elsewhere after an NXDOMAIN.
	NoData bool
	// Upstreams are asked, in this order, for what is not ours; none: REFUSED.
	Upstreams []netip.AddrPort
	Table     Table
	Log       *slog.Logger
}

// A Server is a DNS server. Its methods may be called concurrently.
type Server struct {
	zone      string // with dots at the end and, but for the root, none in front
	noData    bool
	upstreams []netip.AddrPort
	asking    chan struct{} // holds one for each query that is under way upstream
	table     Table
	log       *slog.Logger
	addr      netip.AddrPort
	answered  rcodes

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	udp    *dns.Server
	tcp    *dns.Server

	mu      sync.Mutex
	serving bool
	closed  bool
	done    chan struct{} // closed when Serve has returned
}

// ParseZone returns the zone of a text, "culvert.internal", in lower case and
// without the dot at its end. The error says why it is none.
func ParseZone(text string) (string, error) {
	zone := strings.ToLower(strings.TrimSuffix(text, "."))
	if len(zone) > maxZone {
		return "", fmt.Errorf("zone %q has %d bytes; at most %d leave room for names in it", zone[:maxZone]+"…", len(zone), maxZone)
	}
	for label := range strings.SplitSeq(zone, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return "", fmt.Errorf("zone %q is no name for DNS: labels of 1 to 63 letters, digits, '-' and '_', with dots between them", text)
		}
	}
	return zone, nil
}

// ParseUpstream returns where an upstream is: an address, and a port unless it is
// 53.
func ParseUpstream(text string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(text); err == nil && ap.Port() != 0 && !ap.Addr().IsUnspecified() {
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
	}
	a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"))
	if err != nil || a.IsUnspecified() {
		return netip.AddrPort{}, fmt.Errorf("upstream %q is no address, or address and port, such as 192.0.2.53 or [2001:db8::53]:53", text)
	}
	return netip.AddrPortFrom(a.Unmap(), 53), nil
}

// New opens the server's sockets. A taken port is an error that names its holder,
// where the kernel tells. The server answers once Serve is called.
func New(o Options) (*Server, error) {
	zone, err := ParseZone(o.Zone)
	if err != nil {
		return nil, err
	}
	if !o.Listen.IsValid() { // the zero value would be every address
		return nil, errors.New("DNS server: no address to listen at")
	}
	l, pc, err := listen(o.Listen)
	if err != nil {
		return nil, err
	}
	s := &Server{
		zone: zone + ".", noData: o.NoData, upstreams: o.Upstreams, asking: make(chan struct{}, maxAsking),
		table: o.Table, log: o.Log, addr: l.Addr().(*net.TCPAddr).AddrPort(), done: make(chan struct{}),
	}
	for _, u := range o.Upstreams {
		if u == s.addr {
			return nil, errors.Join(fmt.Errorf("upstream %s is where names are served: it would be asked by itself", u), l.Close(), pc.Close())
		}
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	// Queries longer than a datagram's usual limit are none that we answer.
	s.udp = &dns.Server{PacketConn: pc, Handler: s, UDPSize: 4096, ReadTimeout: udpPoll}
	s.tcp = &dns.Server{Listener: newBoundedListener(l), Handler: s}
	return s, nil
}

// listen opens both sockets on one port.
func listen(ap netip.AddrPort) (net.Listener, *net.UDPConn, error) {
	family := "6"
	switch {
	case ap.Addr().Is4():
		family = "4"
	case ap.Addr().IsUnspecified():
		family = "" // both
	}
	for try := 0; ; try++ {
		l, err := net.ListenTCP("tcp"+family, net.TCPAddrFromAddrPort(ap))
		if err != nil {
			return nil, nil, explain(listener.TCP, ap, err)
		}
		both := netip.AddrPortFrom(ap.Addr(), l.Addr().(*net.TCPAddr).AddrPort().Port())
		pc, err := net.ListenUDP("udp"+family, net.UDPAddrFromAddrPort(both))
		if err == nil {
			return l, pc, nil
		}
		l.Close()
		if ap.Port() != 0 || try == 20 { // another number may be free for both
			return nil, nil, explain(listener.UDP, both, err)
		}
	}
}

// explain says in one sentence why the server cannot listen.
func explain(proto listener.Proto, ap netip.AddrPort, err error) error {
	_, detail, cause := listener.Explain(proto, ap, err)
	return &listenError{"DNS server: " + detail, cause}
}

type listenError struct {
	sentence string
	cause    error
}

func (e *listenError) Error() string { return e.sentence }
func (e *listenError) Unwrap() error { return e.cause }

// Addr returns where the server listens.
func (s *Server) Addr() netip.AddrPort { return s.addr }

// Serve answers until Close, and returns nil then. It is called once.
func (s *Server) Serve() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.serving = true
	s.mu.Unlock()
	defer close(s.done)

	var started sync.WaitGroup // a server that has not started cannot be shut down
	ended := make(chan error, 2)
	for _, srv := range []*dns.Server{s.udp, s.tcp} {
		started.Add(1)
		once := sync.OnceFunc(started.Done)
		srv.NotifyStartedFunc = once
		go func() {
			err := srv.ActivateAndServe()
			once()
			ended <- err
		}()
	}
	started.Wait()
	var failed error
	left := 2
	select {
	case <-s.ctx.Done():
	case failed = <-ended:
		left--
		s.cancel() // the queries of the other
	}
	for _, srv := range []*dns.Server{s.udp, s.tcp} {
		_ = srv.Shutdown() // one that has ended says that it is not started
	}
	for range left {
		failed = cmp.Or(failed, <-ended)
	}
	if failed != nil {
		return fmt.Errorf("serve DNS at %s: %w", s.addr, failed)
	}
	return nil
}

// Close closes the sockets, cuts off queries under way and waits for Serve.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	serving := s.serving
	s.mu.Unlock()
	s.cancel()
	if serving {
		<-s.done
		return nil
	}
	return errors.Join(ignoreClosed(s.udp.PacketConn.Close()), ignoreClosed(s.tcp.Listener.Close()))
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// A boundedListener accepts so many connections at a time, and rests when
// accepting fails: the server library would try again at once, for ever.
type boundedListener struct {
	net.Listener
	open   chan struct{}
	closed chan struct{}
	once   sync.Once
}

func newBoundedListener(l net.Listener) *boundedListener {
	return &boundedListener{Listener: l, open: make(chan struct{}, maxConns), closed: make(chan struct{})}
}

func (l *boundedListener) Accept() (net.Conn, error) {
	select {
	case l.open <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.open
		select {
		case <-time.After(acceptPause):
		case <-l.closed:
		}
		return nil, err
	}
	return &boundedConn{c, sync.OnceFunc(func() { <-l.open })}, nil
}

func (l *boundedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type boundedConn struct {
	net.Conn
	left func()
}

func (c *boundedConn) Close() error {
	defer c.left()
	return c.Conn.Close()
}
