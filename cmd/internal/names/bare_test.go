package names

import (
	"net/netip"
	"testing"

	"github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
)

// C-47: a guest that names its containers as it likes takes no name that is the
// host's or the public's.
func TestBareNamesCaptureNothing(t *testing.T) {
	tab := newTable()
	here := []string{"127.0.0.1"}
	tab.set(t, map[string][]string{
		"web": here, "db.project": here, "github.com": here, "db.shop": here, "localhost": here, "x.localhost": here, "wpad": here,
	})
	elsewhere := newUpstream(t, func(_ string, req *dns.Msg) *dns.Msg { return txt(req, "elsewhere") })
	for name, upstream := range map[string]bool{"web": false, "db.project": false, "github.com": true, "db.shop": true} {
		for _, asked := range [][]netip.AddrPort{nil, {elsewhere.addr}} {
			s := start(t, tab, withUpstreams(asked...))
			before := elsewhere.packets()
			resp := ask(t, s, "udp", question(name+".", dns.TypeA))
			if upstream && asked != nil {
				assert.Equal(t, before+1, elsewhere.packets(), name)
				assert.False(t, resp.Authoritative, name)
			} else {
				assert.Equal(t, before, elsewhere.packets(), name)
				assert.Len(t, resp.Answer, 1, name)
			}
			resp = ask(t, s, "udp", question(name+".culvert.internal.", dns.TypeA))
			assert.Len(t, resp.Answer, 1, "%s in the zone", name)
		}
	}
	s := start(t, tab)
	for _, name := range []string{"localhost.", "x.localhost.", "wpad."} {
		assert.Empty(t, ask(t, s, "udp", question(name, dns.TypeA)).Answer, name)
	}
}
