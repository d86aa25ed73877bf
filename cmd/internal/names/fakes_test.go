package names

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/miekg/dns"
	"github.com/stretchr/testify/require"
)

var localhost = netip.MustParseAddrPort("127.0.0.1:0")

// nobody is a Publisher that publishes nothing: the tables of tests have names
// only.
type nobody struct{}

func (nobody) Publish(context.Context, listener.Owner, []listener.Spec) []listener.Outcome {
	return nil
}
func (nobody) Withdraw(context.Context, listener.Owner) {}
func (nobody) Owners() []listener.Owner                 { return nil }

// A table is a real one, and the loop that fills it.
type table struct {
	*reconcile.Names
	loop *reconcile.Loop
}

func newTable() *table {
	loop := reconcile.NewLoop(nobody{}, slog.New(slog.DiscardHandler))
	return &table{loop.Names(), loop}
}

// set makes the names exactly these: each with its addresses.
func (t *table) set(tb testing.TB, names map[string][]string) {
	tb.Helper()
	snap := reconcile.Snapshot{Source: "test"}
	for name, addrs := range names {
		n := reconcile.Name{Name: name, Since: time.Unix(int64(len(name)), 0)}
		for _, a := range addrs {
			n.Addrs = append(n.Addrs, netip.MustParseAddr(a))
		}
		owner := listener.Owner{Kind: listener.KindDocker, ID: name}
		snap.Wants = append(snap.Wants, reconcile.Want{Owner: owner, Names: []reconcile.Name{n}})
	}
	err := t.loop.Apply(context.Background(), snap)
	require.NoError(tb, err)
}

// start serves a table until the test ends.
func start(t *testing.T, tab Table, change ...func(*Options)) *Server {
	t.Helper()
	o := Options{Listen: localhost, Zone: "culvert.internal", Table: tab, Log: slog.New(slog.DiscardHandler)}
	for _, c := range change {
		c(&o)
	}
	s, err := New(o)
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-served)
	})
	return s
}

// withUpstreams has a server ask upstreams.
func withUpstreams(upstreams ...netip.AddrPort) func(*Options) {
	return func(o *Options) { o.Upstreams = upstreams }
}

// question is a query as clients send them.
func question(name string, qtype uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	return m
}

// ask sends a query over "udp" or "tcp" and returns the answer, which must be one
// to it.
func ask(tb testing.TB, s *Server, network string, m *dns.Msg) *dns.Msg {
	tb.Helper()
	c := &dns.Client{Net: network, Timeout: 10 * time.Second, UDPSize: dns.MaxMsgSize}
	resp, _, err := c.Exchange(m, s.Addr().String())
	require.NoError(tb, err)
	require.Equal(tb, m.Id, resp.Id)
	require.True(tb, resp.Response)
	if len(m.Question) == 1 && len(resp.Question) == 1 {
		require.Equal(tb, m.Question, resp.Question, "a question comes back as it was, letter by letter")
	}
	return resp
}

// says returns an answer in one line: "NOERROR aa 127.0.0.1", "NXDOMAIN aa SOA
// culvert.internal.".
func says(m *dns.Msg) string {
	text := dns.RcodeToString[m.Rcode]
	if m.Authoritative {
		text += " aa"
	}
	if m.Truncated {
		text += " tc"
	}
	for _, rr := range m.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			text += " " + rr.A.String()
		case *dns.AAAA:
			text += " " + rr.AAAA.String()
		case *dns.PTR:
			text += " " + rr.Ptr
		case *dns.TXT:
			text += fmt.Sprintf(" %q", rr.Txt)
		default:
			text += " " + dns.TypeToString[rr.Header().Rrtype] + " " + rr.Header().Name
		}
	}
	for _, rr := range m.Ns {
		text += "; " + dns.TypeToString[rr.Header().Rrtype] + " " + rr.Header().Name
	}
	return text
}

// An upstream is a server on the other side that answers as it is told, and
// writes down what it was asked.
type upstream struct {
	addr netip.AddrPort

	mu    sync.Mutex
	asked []*dns.Msg
	over  []string
}

// newUpstream serves both protocols until the test ends. answer may return nil:
// no answer.
func newUpstream(t *testing.T, answer func(network string, req *dns.Msg) *dns.Msg) *upstream {
	t.Helper()
	l, pc, err := listen(localhost)
	require.NoError(t, err)
	u := &upstream{addr: l.Addr().(*net.TCPAddr).AddrPort()}
	handle := func(network string) dns.HandlerFunc {
		return func(w dns.ResponseWriter, req *dns.Msg) {
			u.mu.Lock()
			u.asked = append(u.asked, req.Copy())
			u.over = append(u.over, network)
			u.mu.Unlock()
			if resp := answer(network, req); resp != nil {
				_ = w.WriteMsg(resp)
			}
		}
	}
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	for _, srv := range []*dns.Server{{PacketConn: pc, Handler: handle("udp")}, {Listener: l, Handler: handle("tcp")}} {
		started := make(chan struct{})
		srv.NotifyStartedFunc = func() { close(started) }
		running.Go(func() { _ = srv.ActivateAndServe() })
		<-started
		t.Cleanup(func() { _ = srv.Shutdown() })
	}
	return u
}

// packets is how often it was asked.
func (u *upstream) packets() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.asked)
}

// last returns what it was asked last, and over what.
func (u *upstream) last() (*dns.Msg, string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.asked[len(u.asked)-1], u.over[len(u.over)-1]
}

// txt answers a query with a text.
func txt(req *dns.Msg, text string) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(req)
	m.Answer = []dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: req.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 300}, Txt: []string{text}}}
	return m
}
