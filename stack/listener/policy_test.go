package listener

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// FB-065: an empty host address never means more than the policy says.
func TestFB065PolicyAddrs(t *testing.T) {
	for _, host := range []string{"", "0.0.0.0", "::", "::ffff:0.0.0.0"} {
		assert.Equal(t, []netip.Addr{addr("127.0.0.1"), addr("::1")}, Policy{}.Addrs(addr(host)), host)
		assert.Equal(t, []netip.Addr{addr("0.0.0.0"), addr("::")}, Policy{ExposeToLAN: true}.Addrs(addr(host)), host)
	}
	for in, want := range map[string]string{"127.0.0.1": "127.0.0.1", "127.77.0.3": "127.77.0.3", "::1": "::1",
		"198.18.0.1": "198.18.0.1", "::ffff:198.18.0.1": "198.18.0.1"} {
		for _, p := range []Policy{{}, {ExposeToLAN: true}} {
			assert.Equal(t, []netip.Addr{addr(want)}, p.Addrs(addr(in)), in)
		}
	}
}

func TestGuestHost(t *testing.T) {
	host := func(a netip.Addr) bool { return a == addr("198.18.0.1") || a == addr("fd00::1") }
	guest := func(a netip.Addr) bool { return a == addr("10.0.2.2") || a == addr("fd00:2::2") }
	for _, tt := range []struct {
		in      string
		expose  bool
		want    string // "" for the policy's
		refusal string
	}{
		{"", false, "", ""},
		{"0.0.0.0", false, "", ""},
		{"::", true, "", ""},
		{"127.0.0.1", false, "127.0.0.1", ""},
		{"127.1.2.3", true, "127.1.2.3", ""},
		{"::1", false, "::1", ""},
		{"::ffff:127.0.0.1", false, "127.0.0.1", ""},
		{"10.0.2.2", false, "", ""},
		{"::ffff:10.0.2.2", true, "", ""},
		{"fd00:2::2", false, "", ""},
		{"198.18.0.1", false, "", "unless exposeToLAN is on"},
		{"198.18.0.1", true, "198.18.0.1", ""},
		{"fd00::1", true, "fd00::1", ""},
		{"198.18.0.9", false, "", "unless exposeToLAN is on"},
		{"198.18.0.9", true, "", "the host has no such address"},
		{"224.0.0.1", true, "", "the host has no such address"},
		{"fe80::1%eth0", true, "", "the host has no such address"},
	} {
		got, err := Policy{ExposeToLAN: tt.expose}.GuestHost(addr(tt.in), host, guest)
		assert.Equal(t, addr(tt.want), got, tt.in)
		if tt.refusal == "" {
			assert.NoError(t, err, tt.in)
			continue
		}
		require.ErrorContains(t, err, tt.refusal, tt.in)
		assert.ErrorContains(t, err, tt.in)
	}
}
