package names

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// shop is a table with a name of each kind.
var shop = map[string][]string{
	"web":        {"127.0.0.1", "::1"},
	"my_app":     {"127.77.1.2"},
	"db.project": {"127.77.3.4"},
}

// TestAnswerFB097: twelve types for names of every kind.
func TestAnswerFB097(t *testing.T) {
	tab := newTable()
	tab.set(t, shop)
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg { return txt(req, "from elsewhere") })
	for _, noData := range []bool{false, true} {
		for _, upstreams := range [][]netip.AddrPort{nil, {elsewhere.addr}} {
			s := start(t, tab, withUpstreams(upstreams...), func(o *Options) { o.NoData = noData })
			unknown, foreign := "NXDOMAIN aa; SOA culvert.internal.", "REFUSED"
			unknownBack := "NXDOMAIN aa; SOA 77.127.in-addr.arpa."
			if noData {
				unknown, unknownBack = "NOERROR aa; SOA culvert.internal.", "NOERROR aa; SOA 77.127.in-addr.arpa."
			}
			single := foreign
			if upstreams != nil {
				foreign, single = `NOERROR ["from elsewhere"]`, "NXDOMAIN"
			}
			const nothing = "NOERROR aa; SOA culvert.internal."
			for name, want := range map[string]map[uint16]string{
				"web.culvert.internal.":          {dns.TypeA: "NOERROR aa 127.0.0.1", dns.TypeAAAA: "NOERROR aa ::1", 0: nothing},
				"WEB.Culvert.Internal.":          {dns.TypeA: "NOERROR aa 127.0.0.1", dns.TypeAAAA: "NOERROR aa ::1", 0: nothing},
				"x.y.web.culvert.internal.":      {dns.TypeA: "NOERROR aa 127.0.0.1", dns.TypeAAAA: "NOERROR aa ::1", 0: nothing},
				`a\.b.web.culvert.internal.`:     {dns.TypeA: "NOERROR aa 127.0.0.1", dns.TypeAAAA: "NOERROR aa ::1", 0: nothing},
				`\000.web.culvert.internal.`:     {dns.TypeA: "NOERROR aa 127.0.0.1", dns.TypeAAAA: "NOERROR aa ::1", 0: nothing},
				"*.web.culvert.internal.":        {dns.TypeA: "NOERROR aa 127.0.0.1", dns.TypeAAAA: "NOERROR aa ::1", 0: nothing},
				"my_app.culvert.internal.":       {dns.TypeA: "NOERROR aa 127.77.1.2", 0: nothing},
				"db.project.culvert.internal.":   {dns.TypeA: "NOERROR aa 127.77.3.4", 0: nothing},
				"project.culvert.internal.":      {0: nothing}, // an empty non-terminal
				"culvert.internal.":              {dns.TypeSOA: "NOERROR aa SOA culvert.internal.", 0: nothing},
				"other.culvert.internal.":        {0: unknown},
				"x.project.culvert.internal.":    {0: unknown},
				`x\.web.culvert.internal.`:       {0: unknown}, // one label: "x.web"
				`web\.culvert.internal.`:         {0: foreign},
				"webculvert.internal.":           {0: foreign},
				"web.":                           {dns.TypeA: "NOERROR aa 127.0.0.1", dns.TypeAAAA: "NOERROR aa ::1", 0: "NOERROR aa; SOA web."},
				"db.project.":                    {dns.TypeA: "NOERROR aa 127.77.3.4", 0: "NOERROR aa; SOA db.project."},
				"x.web.":                         {0: foreign}, // nothing is below a bare name
				"other.":                         {dns.TypeDNSKEY: foreign, dns.TypeDS: foreign, 0: single},
				"internal.":                      {dns.TypeDNSKEY: foreign, dns.TypeDS: foreign, 0: single},
				".":                              {0: foreign},
				"www.example.com.":               {0: foreign},
				"2.1.77.127.in-addr.arpa.":       {dns.TypePTR: "NOERROR aa my_app.culvert.internal.", 0: "NOERROR aa; SOA 77.127.in-addr.arpa."},
				"9.9.77.127.in-addr.arpa.":       {0: unknownBack},
				"9.77.127.in-addr.arpa.":         {0: "NOERROR aa; SOA 77.127.in-addr.arpa."},
				"x.9.9.77.127.in-addr.arpa.":     {0: unknownBack},
				"77.127.in-addr.arpa.":           {dns.TypeSOA: "NOERROR aa SOA 77.127.in-addr.arpa.", 0: "NOERROR aa; SOA 77.127.in-addr.arpa."},
				"1.0.0.127.in-addr.arpa.":        {dns.TypePTR: "NOERROR aa web.culvert.internal.", 0: "NOERROR aa; SOA 1.0.0.127.in-addr.arpa."},
				"1." + zeros(31) + "ip6.arpa.":   {dns.TypePTR: "NOERROR aa web.culvert.internal.", 0: "NOERROR aa; SOA 1." + zeros(31) + "ip6.arpa."},
				"2." + zeros(31) + "ip6.arpa.":   {0: foreign},
				"1.2.0.192.in-addr.arpa.":        {0: foreign},
				"01.0.0.127.in-addr.arpa.":       {0: foreign},
				"0.0.127.in-addr.arpa.":          {0: foreign},
				"1.0." + zeros(15) + "ip6.arpa.": {0: foreign},
			} {
				for _, qtype := range []uint16{
					dns.TypeA, dns.TypeAAAA, dns.TypePTR, dns.TypeSOA, dns.TypeNS, dns.TypeMX, dns.TypeTXT, dns.TypeCAA,
					dns.TypeSRV, dns.TypeHTTPS, dns.TypeCNAME, dns.TypeDS, dns.TypeDNSKEY,
				} {
					want := cmp.Or(want[qtype], want[0])
					resp := ask(t, s, []string{"udp", "tcp"}[int(qtype)%2], question(name, qtype))
					require.Equal(t, want, says(resp), "%s %s, nodata %t, upstreams %v", name, dns.TypeToString[qtype], noData, upstreams)
					assert.Equal(t, upstreams != nil, resp.RecursionAvailable || strings.Contains(want, "elsewhere"))
					if resp.Authoritative {
						for _, rr := range append(resp.Answer, resp.Ns...) {
							assert.LessOrEqual(t, rr.Header().Ttl, uint32(1), "FB-083")
						}
						for _, rr := range resp.Answer {
							assert.Equal(t, name, rr.Header().Name)
						}
					}
				}
			}
		}
	}
}

func zeros(n int) string { return strings.Repeat("0.", n) }

// TestAnswerFB098: nothing of the zone is sent upstream, whatever its letters and
// whether there is anything in the table, and the answer keeps the letters.
func TestAnswerFB098(t *testing.T) {
	random := rand.New(rand.NewPCG(98, 1))
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg { return txt(req, "leaked") })
	tab := newTable()
	s := start(t, tab, withUpstreams(elsewhere.addr))
	for i := range 1000 {
		if i == 500 {
			tab.set(t, shop)
		}
		const letters = "abcdefghijklmnopqrstuvwxyz0123456789-_"
		var name []byte
		for range 1 + random.IntN(3) {
			for range 1 + random.IntN(20) {
				name = append(name, letters[random.IntN(len(letters))])
			}
			name = append(name, '.')
		}
		name = append(name, "culvert.internal."...)
		for j, c := range name {
			if c >= 'a' && c <= 'z' && random.IntN(2) == 0 {
				name[j] = c - 'a' + 'A'
			}
		}
		resp := ask(t, s, "udp", question(string(name), []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeMX, dns.TypeDS}[i%4]))
		assert.Equal(t, dns.RcodeNameError, resp.Rcode, "%s", name)
	}
	for _, name := range []string{"gone.", "localhost.", "wpad."} { // nor plain names
		assert.Equal(t, "NXDOMAIN", says(ask(t, s, "udp", question(name, dns.TypeA))))
	}
	assert.Zero(t, elsewhere.packets())
}

// many is a Table in which every name leads to a hundred addresses.
type many struct{}

func (many) Lookup(string) (addrs []netip.Addr, exists bool) {
	for i := range 100 {
		addrs = append(addrs, netip.AddrFrom4([4]byte{127, 77, 1, byte(i)}))
	}
	return addrs, true
}
func (many) Has(string) bool { return false }
func (many) Reverse(netip.Addr) (names []string) {
	for i := range 3000 {
		names = append(names, fmt.Sprintf("container-with-a-long-name-%d", i))
	}
	return append(names, strings.Repeat("a.", 125)+"a")
}

// TestAnswerFB095: an answer over UDP is no longer than the client takes, and no
// longer than 1232 bytes.
func TestAnswerFB095(t *testing.T) {
	s := start(t, many{})
	for _, test := range []struct{ edns, atMost int }{{0, 512}, {1, 512}, {512, 512}, {1000, 1000}, {1232, 1232}, {4096, 1232}, {65535, 1232}} {
		m := question("web.culvert.internal.", dns.TypeA)
		if test.edns != 0 {
			m.SetEdns0(uint16(test.edns), true)
		}
		resp := ask(t, s, "udp", m)
		assert.True(t, resp.Truncated)
		resp.Compress = true
		assert.LessOrEqual(t, resp.Len(), test.atMost)
		assert.Greater(t, len(resp.Answer), 20, "compressed")
		opt := resp.IsEdns0()
		require.Equal(t, test.edns != 0, opt != nil)
		if opt != nil {
			assert.EqualValues(t, udpSize, opt.UDPSize())
			assert.True(t, opt.Do())
		}
	}
	resp := ask(t, s, "tcp", question("web.culvert.internal.", dns.TypeA))
	assert.False(t, resp.Truncated)
	assert.Len(t, resp.Answer, 100)

	resp = ask(t, s, "tcp", question("1.1.77.127.in-addr.arpa.", dns.TypePTR))
	resp.Compress = true
	assert.LessOrEqual(t, resp.Len(), dns.MaxMsgSize)
	assert.Greater(t, len(resp.Answer), 1000)
}

// TestAnswerChanges: FB-082, FB-083, a name that moved or went is right in the
// next answer.
func TestAnswerChanges(t *testing.T) {
	tab := newTable()
	s := start(t, tab)
	get := func(name string) string {
		return says(ask(t, s, "udp", question(name+".culvert.internal.", dns.TypeA)))
	}
	const none = "NXDOMAIN aa; SOA culvert.internal."
	for range 50 {
		tab.set(t, map[string][]string{"one": {"127.77.0.1"}})
		assert.Equal(t, "NOERROR aa 127.77.0.1", get("one"))
		tab.set(t, map[string][]string{"two": {"127.77.0.1"}})
		assert.Equal(t, none, get("one"))
		assert.Equal(t, "NOERROR aa 127.77.0.1", get("two"))
		tab.set(t, map[string][]string{"one": {"127.77.0.1"}, "two": {"127.77.0.2"}})
		assert.Equal(t, "NOERROR aa 127.77.0.2", get("two"))
		tab.set(t, nil)
		assert.Equal(t, none, get("one"))
		assert.Equal(t, none, get("two"))
	}
}

// TestAnswerOdd: queries that are none, or not ours to answer.
func TestAnswerOdd(t *testing.T) {
	tab := newTable()
	tab.set(t, shop)
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg { return txt(req, "leaked") })
	s := start(t, tab, withUpstreams(elsewhere.addr))
	for _, test := range []struct {
		want   string
		change func(*dns.Msg)
	}{
		{"NOTIMP", func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }},
		{"NOTIMP", func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }},
		{"NOTIMP", func(m *dns.Msg) { m.Opcode = dns.OpcodeStatus }},
		{"REFUSED", func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }},
		{"REFUSED", func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassANY }},
		{"REFUSED", func(m *dns.Msg) {
			m.Question[0] = dns.Question{Name: "version.bind.", Qtype: dns.TypeTXT, Qclass: dns.ClassCHAOS}
		}},
		{"REFUSED", func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAXFR }},
		{"REFUSED", func(m *dns.Msg) { m.Question[0].Name, m.Question[0].Qtype = "example.com.", dns.TypeAXFR }},
		{"FORMERR", func(m *dns.Msg) { m.Question = nil }},
		{"FORMERR", func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }},
		/* BADVERS has the same number */ {"BADSIG", func(m *dns.Msg) { m.SetEdns0(1232, false); m.IsEdns0().SetVersion(1) }},
		{"NOERROR aa 127.0.0.1 ::1", func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeANY }},
	} {
		for _, network := range []string{"udp", "tcp"} {
			m := question("web.culvert.internal.", dns.TypeA)
			test.change(m)
			assert.Equal(t, test.want, says(ask(t, s, network, m)))
		}
	}
	assert.Zero(t, elsewhere.packets())
}

func TestReverseAddr(t *testing.T) {
	for name, want := range map[string]string{
		"1.0.0.127.in-addr.arpa.": "127.0.0.1", "4.3.77.127.in-addr.arpa.": "127.77.3.4",
		"1." + zeros(31) + "ip6.arpa.":                       "::1",
		"b.a.9.8." + zeros(20) + "8.b.d.0.1.0.0.2.ip6.arpa.": "2001:db8::89ab",
	} {
		got, ok := reverseAddr(name)
		assert.True(t, ok, name)
		assert.Equal(t, want, got.String())
		back, err := dns.ReverseAddr(want)
		require.NoError(t, err)
		assert.Equal(t, back, name)
	}
	for _, name := range []string{
		"", ".", "in-addr.arpa.", "1.in-addr.arpa.", "1.2.3.4.5.in-addr.arpa.", "256.0.0.127.in-addr.arpa.", "1.0.0.0127.in-addr.arpa.",
		"..0.127.in-addr.arpa.", "ip6.arpa.", zeros(31) + "ip6.arpa.", zeros(33) + "ip6.arpa.", "g." + zeros(31) + "ip6.arpa.",
		"11" + zeros(31) + "ip6.arpa.", ":." + zeros(31) + "ip6.arpa.", "%." + zeros(31) + "ip6.arpa.", "example.com.",
	} {
		_, ok := reverseAddr(name)
		assert.False(t, ok, name)
	}
}

// FuzzAnswer: whatever is asked, an answer is one that can be sent, in the size
// that was asked for, and nothing of the zone is for others.
func FuzzAnswer(f *testing.F) {
	for _, m := range []*dns.Msg{
		question("web.culvert.internal.", dns.TypeA), question("1.1.77.127.in-addr.arpa.", dns.TypePTR), question(".", dns.TypeNS),
		question(`a\.b\000.web.culvert.internal.`, dns.TypeANY), question("x.ip6.arpa.", dns.TypePTR),
	} {
		m.SetEdns0(4096, true)
		wire, err := m.Pack()
		require.NoError(f, err)
		f.Add(wire)
	}
	tab := newTable()
	tab.set(f, shop)
	s := &Server{zone: "culvert.internal.", table: tab, upstreams: []netip.AddrPort{localhost}}
	f.Fuzz(func(t *testing.T, wire []byte) {
		var req dns.Msg
		if req.Unpack(wire) != nil {
			return
		}
		resp, ours := s.answer(&req)
		if !ours {
			name := strings.ToLower(req.Question[0].Name)
			assert.False(t, name == s.zone || dns.IsSubDomain(s.zone, name), "%q", name)
			return
		}
		resp.Compress = true
		resp.Truncate(min(takes(&req), udpSize))
		packed, err := resp.Pack()
		require.NoError(t, err)
		assert.LessOrEqual(t, len(packed), udpSize)
	})
}
