package names

import (
	"testing"

	"github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
)

func TestQueriesAreCounted(t *testing.T) {
	up := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg {
		m := new(dns.Msg)
		m.SetRcode(req, dns.RcodeYXDomain)
		return m
	})
	tab := newTable()
	tab.set(t, map[string][]string{"web": {"127.0.0.1"}})
	s := start(t, tab, withUpstreams(up.addr))
	want := map[string]uint64{"NOERROR": 0, "FORMERR": 0, "SERVFAIL": 0, "NXDOMAIN": 0, "NOTIMP": 0, "REFUSED": 0, "BADVERS": 0}
	assert.Equal(t, want, s.Queries(), "nobody has asked")

	bad := question("web.culvert.internal.", dns.TypeA)
	bad.SetEdns0(1232, false)
	bad.IsEdns0().SetVersion(1)
	axfr := question("culvert.internal.", dns.TypeAXFR)
	for _, ask1 := range []struct {
		network string
		m       *dns.Msg
		rcode   string
	}{
		{"udp", question("web.culvert.internal.", dns.TypeA), "NOERROR"},
		{"tcp", question("web.culvert.internal.", dns.TypeMX), "NOERROR"},
		{"udp", question("nobody.culvert.internal.", dns.TypeA), "NXDOMAIN"},
		{"udp", bad, "BADVERS"},
		{"tcp", axfr, "REFUSED"},
		{"udp", question("example.org.", dns.TypeA), "YXDOMAIN"}, // as it comes from upstream
	} {
		ask(t, s, ask1.network, ask1.m)
		want[ask1.rcode]++
		assert.Equal(t, want, s.Queries(), ask1.rcode)
	}
}
