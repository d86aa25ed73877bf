package names

import (
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestForwardAsIs: FB-097, a query goes upstream with all it says of EDNS and
// DNSSEC, under another id, and the answer comes back with its own.
func TestForwardAsIs(t *testing.T) {
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg {
		m := txt(req, "here")
		m.AuthenticatedData, m.RecursionAvailable = true, true
		return m
	})
	s := start(t, newTable(), withUpstreams(elsewhere.addr))
	same := 0
	for _, network := range []string{"udp", "tcp"} {
		for bits := range 8 {
			m := question("WWW.example.com.", dns.TypeTXT)
			m.CheckingDisabled = bits&1 != 0
			m.RecursionDesired = bits&2 != 0
			m.AuthenticatedData = bits&2 == 0
			if bits&4 != 0 {
				m.SetEdns0(1400, bits&1 == 0)
				m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("option")}}
			}
			resp := ask(t, s, network, m)
			assert.Equal(t, `NOERROR ["here"]`, says(resp))
			assert.True(t, resp.AuthenticatedData)
			assert.EqualValues(t, 300, resp.Answer[0].Header().Ttl, "not ours to change")

			got, over := elsewhere.last()
			assert.Equal(t, "udp", over)
			if got.Id == m.Id {
				same++
			}
			got.Id = m.Id
			assert.Equal(t, m.String(), got.String())
		}
	}
	assert.Less(t, same, 3, "of 16; each is once in 65536 times")
}

// TestForwardCut: what was cut short is asked again over TCP: by us for a client
// that came so, by the client itself otherwise.
func TestForwardCut(t *testing.T) {
	elsewhere := newUpstream(t, func(network string, req *dns.Msg) *dns.Msg {
		m := txt(req, "whole")
		if network == "udp" {
			m.Truncated, m.Answer = true, nil
		}
		return m
	})
	s := start(t, newTable(), withUpstreams(elsewhere.addr))
	assert.Equal(t, "NOERROR tc", says(ask(t, s, "udp", question("example.com.", dns.TypeTXT))))
	assert.Equal(t, 1, elsewhere.packets())
	assert.Equal(t, `NOERROR ["whole"]`, says(ask(t, s, "tcp", question("example.com.", dns.TypeTXT))))
	assert.Equal(t, 3, elsewhere.packets())
}

// TestForwardTooLong: an upstream that sends more than was asked for.
func TestForwardTooLong(t *testing.T) {
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg {
		m := txt(req, "x")
		for range 10 {
			m.Answer = append(m.Answer, txt(req, strings.Repeat("x", 200)).Answer...)
		}
		return m
	})
	s := start(t, newTable(), withUpstreams(elsewhere.addr))
	resp := ask(t, s, "udp", question("example.com.", dns.TypeTXT))
	assert.True(t, resp.Truncated)
	assert.LessOrEqual(t, resp.Len(), 512)
	assert.Len(t, ask(t, s, "tcp", question("example.com.", dns.TypeTXT)).Answer, 11)
}

// TestForwardUnreachable: FB-097, the next upstream is asked, and when none
// answers it is SERVFAIL.
func TestForwardUnreachable(t *testing.T) {
	l, pc, err := listen(localhost)
	require.NoError(t, err)
	closed := l.Addr().(*net.TCPAddr).AddrPort()
	l.Close()
	pc.Close()
	silent := newUpstream(t, func(string, *dns.Msg) *dns.Msg { return nil })
	lying := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg { // an answer to something else
		m := txt(req, "lie")
		m.Question[0].Name = "other.example.com."
		return m
	})
	good := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg { return txt(req, "good") })

	s := start(t, newTable(), withUpstreams(closed, silent.addr, good.addr))
	assert.Equal(t, `NOERROR ["good"]`, says(ask(t, s, "udp", question("example.com.", dns.TypeTXT))))
	s = start(t, newTable(), withUpstreams(closed))
	for _, network := range []string{"udp", "tcp"} {
		assert.Equal(t, "SERVFAIL", says(ask(t, s, network, question("example.com.", dns.TypeTXT))))
	}
	s = start(t, newTable(), withUpstreams(lying.addr))
	assert.Equal(t, "SERVFAIL", says(ask(t, s, "udp", question("example.com.", dns.TypeTXT))))
	assert.Equal(t, 1, lying.packets())
	assert.Equal(t, 1, silent.packets())
}

// TestForwardBusy: so many queries are under way upstream, and more are told so
// at once; the zone is answered meanwhile.
func TestForwardBusy(t *testing.T) {
	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	arrived := make(chan struct{}, maxAsking)
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg {
		arrived <- struct{}{}
		<-held
		return txt(req, "late")
	})
	t.Cleanup(release)
	tab := newTable()
	tab.set(t, shop)
	s := start(t, tab, withUpstreams(elsewhere.addr))
	var asking sync.WaitGroup
	for range maxAsking {
		asking.Go(func() {
			c := &dns.Client{Timeout: 10 * time.Second}
			_, _, _ = c.Exchange(question("example.com.", dns.TypeTXT), s.Addr().String())
		})
	}
	for range maxAsking {
		<-arrived
	}
	assert.Equal(t, "SERVFAIL", says(ask(t, s, "udp", question("example.com.", dns.TypeTXT))))
	assert.Equal(t, "NOERROR aa 127.0.0.1", says(ask(t, s, "udp", question("web.culvert.internal.", dns.TypeA))))
	release()
	asking.Wait()
	assert.Equal(t, maxAsking, elsewhere.packets())
}

// A client is a dns.ResponseWriter whose query came from anywhere.
type client struct {
	dns.ResponseWriter
	from, to net.Addr
	got      *dns.Msg
}

func (c *client) RemoteAddr() net.Addr        { return c.from }
func (c *client) LocalAddr() net.Addr         { return c.to }
func (c *client) WriteMsg(m *dns.Msg) error   { c.got = m; return nil }
func (c *client) Write(b []byte) (int, error) { c.got = new(dns.Msg); return len(b), c.got.Unpack(b) }

// TestForwardHostOnly: other machines' queries go nowhere, whatever the server
// listens at.
func TestForwardHostOnly(t *testing.T) {
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg { return txt(req, "here") })
	tab := newTable()
	tab.set(t, shop)
	s := start(t, tab, withUpstreams(elsewhere.addr))
	for _, test := range []struct {
		from, to string
		served   bool
	}{
		{"127.0.0.1", "127.0.0.1", true}, {"127.0.0.9", "::", true}, {"::1", "::1", true}, {"::ffff:127.0.0.1", "::", true},
		{"198.18.0.1", "198.18.0.1", true}, {"198.18.0.2", "198.18.0.1", false}, {"198.18.0.2", "::", false}, {"fe80::1", "::", false},
	} {
		c := &client{
			from: net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(test.from), 1234)),
			to:   net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(test.to), 53)),
		}
		s.ServeDNS(c, question("example.com.", dns.TypeTXT))
		want := "REFUSED"
		if test.served {
			want = `NOERROR ["here"]`
		}
		assert.Equal(t, want, says(c.got), "from %s to %s", test.from, test.to)
		s.ServeDNS(c, question("web.culvert.internal.", dns.TypeA))
		assert.Equal(t, "NOERROR aa 127.0.0.1", says(c.got))
	}
}
