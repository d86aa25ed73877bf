package listener

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestPrefixes(t *testing.T) {
	p := netip.MustParsePrefix
	set := MakePrefixes(p("10.9.1.2/16"), p("::ffff:10.8.0.0/112"), p("2001:db8::1/32"), p("10.9.0.0/16"))
	assert.Equal(t, Prefixes("10.8.0.0/16,10.9.0.0/16,2001:db8::/32"), set)
	assert.Equal(t, set, MakePrefixes(set.List()...))
	assert.Equal(t, []netip.Prefix{p("10.8.0.0/16"), p("10.9.0.0/16"), p("2001:db8::/32")}, set.List())
	assert.Empty(t, MakePrefixes())
	assert.Nil(t, Prefixes("").List())
}
