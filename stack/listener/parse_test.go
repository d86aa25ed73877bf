package listener

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseSpec(t *testing.T) {
	for _, tt := range []struct {
		in        string
		proto     Proto
		host      string // "" for none
		hostPort  uint16
		n         uint16
		guest     string
		guestPort uint16
		canonical string
	}{
		{"8080:80", TCP, "", 8080, 1, "", 80, "8080:80/tcp"},
		{"8080:80/tcp", TCP, "", 8080, 1, "", 80, "8080:80/tcp"},
		{"8080:80/TCP", TCP, "", 8080, 1, "", 80, "8080:80/tcp"},
		{"53:53/Udp", UDP, "", 53, 1, "", 53, "53:53/udp"},
		{"0:80", TCP, "", 0, 1, "", 80, "0:80/tcp"},
		{"127.0.0.1:0:80", TCP, "127.0.0.1", 0, 1, "", 80, "127.0.0.1:0:80/tcp"},
		{"127.0.0.1:8080:80/tcp", TCP, "127.0.0.1", 8080, 1, "", 80, "127.0.0.1:8080:80/tcp"},
		{"[::1]:5353:53/udp", UDP, "::1", 5353, 1, "", 53, "[::1]:5353:53/udp"},
		{"8080:10.0.2.7:80", TCP, "", 8080, 1, "10.0.2.7", 80, "8080:10.0.2.7:80/tcp"},
		{"8080:[fd00::7]:80", TCP, "", 8080, 1, "fd00::7", 80, "8080:[fd00::7]:80/tcp"},
		{"[::1]:1:[fd00::7]:65535", TCP, "::1", 1, 1, "fd00::7", 65535, "[::1]:1:[fd00::7]:65535/tcp"},
		{"127.0.0.1:1:10.0.2.7:2", TCP, "127.0.0.1", 1, 1, "10.0.2.7", 2, "127.0.0.1:1:10.0.2.7:2/tcp"},
		{"6000-6009:7000-7009", TCP, "", 6000, 10, "", 7000, "6000-6009:7000-7009/tcp"},
		{"1-65535:1-65535/udp", UDP, "", 1, 65535, "", 1, "1-65535:1-65535/udp"},
		{"80-80:81-81", TCP, "", 80, 1, "", 81, "80:81/tcp"},
		{"80-80:81", TCP, "", 80, 1, "", 81, "80:81/tcp"},
		// One listener, one spec: the forms of "everywhere" are equal (C-5, C-6).
		{"0.0.0.0:8080:80", TCP, "", 8080, 1, "", 80, "8080:80/tcp"},
		{"[::]:8080:80", TCP, "", 8080, 1, "", 80, "8080:80/tcp"},
		{"[::ffff:127.0.0.1]:8080:80", TCP, "127.0.0.1", 8080, 1, "", 80, "127.0.0.1:8080:80/tcp"},
		{"[::ffff:255.255.255.254]:10000-10009:[2001:db8:1111:2222:3333:4444:5555:6666]:10000-10009/udp", UDP,
			"255.255.255.254", 10000, 10, "2001:db8:1111:2222:3333:4444:5555:6666", 10000,
			"255.255.255.254:10000-10009:[2001:db8:1111:2222:3333:4444:5555:6666]:10000-10009/udp"},
	} {
		t.Run(tt.in, func(t *testing.T) {
			got, err := ParseSpec(tt.in)
			require.NoError(t, err)
			want := Spec{Proto: tt.proto, Ports: tt.n,
				Host:   netip.AddrPortFrom(addr(tt.host), tt.hostPort),
				Target: Target{Addr: netip.AddrPortFrom(addr(tt.guest), tt.guestPort)}}
			assert.Equal(t, want, got)
			assert.Equal(t, tt.canonical, got.String())
			assert.NoError(t, got.Validate())
			again, err := ParseSpec(got.String())
			require.NoError(t, err)
			assert.Equal(t, got, again)
		})
	}
}

// Every refusal quotes what is wrong and says what was expected.
func TestParseSpecRefuses(t *testing.T) {
	for _, tt := range []struct{ in, says string }{
		{"", "expected [hostIP:]hostPort"},
		{"80", `"80" alone has no guest port`},
		{":", `host port ""`},
		{"8080:", `guest port ""; expected a number in 1-65535`},
		{":80", `host port ""`},
		{":8080:80", `host address "" is empty`},
		{"8080::80", `guest address "" is empty`},
		{"127.0.0.1::80", `host port ""`},
		{"127.0.0.1:80", `host port "127.0.0.1"`},
		{"::1:8080:80", "IPv6 addresses in brackets"},
		{"1:2:3:4:5", "5 parts between colons"},
		{"127.0.0.1:1::2", "or an empty one"},
		{"65536:80", `host port "65536"; expected a number in 0-65535`},
		{"8080:65536", `guest port "65536"; expected a number in 1-65535`},
		{"8080:0", `guest port "0"; expected a number in 1-65535`},
		{"-1:80", `host port ""`},
		{"+80:80", `host port "+80"`},
		{" 80:80", `host port " 80"`},
		{"0x50:80", `host port "0x50"`},
		{"99999999999999999999:80", `host port "99999999999999999999"`},
		{"0-9:80-89", `host range "0-9" starts at 0`},
		{"6009-6000:7000-7009", `host range "6009-6000" goes down`},
		{"6000-6009:7009-7000", `guest range "7009-7000" goes down`},
		{"6000-:7000-7009", `host port ""`},
		{"6000-6009-6010:7000", `host port "6009-6010"`},
		{"65530-65540:1-11", `host port "65540"`},
		{"6000-6009:7000-7008", `guest ports "7000-7008" are 9, host ports "6000-6009" are 10`},
		{"6000-6009:7000", `guest ports "7000" are 1, host ports "6000-6009" are 10`},
		{"6000:7000-7009", `guest ports "7000-7009" are 10`},
		{"8080:80/", `protocol ""; expected tcp or udp`},
		{"8080:80/sctp", `protocol "sctp"; expected tcp or udp`},
		{"8080:80/tcp/udp", `protocol "tcp/udp"`},
		{"localhost:8080:80", `host address "localhost"; expected IPv4, or IPv6 in brackets`},
		{"8080:web:80", `guest address "web"`},
		{"[127.0.0.1]:8080:80", `host address "[127.0.0.1]"`},
		{"[::1:8080:80", `no closing bracket`},
		{"[::1]8080:80", `"8080:80" after the address "[::1]"; expected a colon`},
		{"[::1]", `"[::1]" alone has no guest port`},
		{"[fe80::1%eth0]:8080:80", `"[fe80::1%eth0]": host address has a zone`},
		{"8080:[fe80::1%2]:80", `guest address has a zone`},
		{"224.0.0.1:8080:80", `"224.0.0.1": host address is no single host's`},
		{"8080:0.0.0.0:80", `"0.0.0.0": guest address is no single host's`},
		{"8080:127.0.0.1:80", `guest's own loopback`},
		{"8080:[::ffff:127.0.0.1]:80", `guest's own loopback`},
		{"8080:80\n", `guest port "80\n"`},
		{strings.Repeat("1", 1000) + ":80", "1003 bytes long"},
	} {
		t.Run(tt.in, func(t *testing.T) {
			got, err := ParseSpec(tt.in)
			require.Error(t, err)
			assert.Zero(t, got)
			assert.Contains(t, err.Error(), tt.says)
			assert.Less(t, len(err.Error()), 512)
			assert.NotContains(t, err.Error(), "\n")
		})
	}
}

func TestValidateRefuses(t *testing.T) {
	good := mustSpec(t, "127.0.0.1:8080:10.0.2.7:80")
	for name, spoil := range map[string]func(*Spec){
		"no protocol":         func(s *Spec) { s.Proto = 0 },
		"unknown protocol":    func(s *Spec) { s.Proto = 3 },
		"no ports":            func(s *Spec) { s.Ports = 0 },
		"range from 0":        func(s *Spec) { s.Host = netip.AddrPortFrom(s.Host.Addr(), 0); s.Ports = 2 },
		"host range too long": func(s *Spec) { s.Ports = 65535 },
		"guest too long":      func(s *Spec) { s.Target.Addr = netip.MustParseAddrPort("10.0.2.7:65535"); s.Ports = 2 },
		"guest port 0":        func(s *Spec) { s.Target.Addr = netip.MustParseAddrPort("10.0.2.7:0") },
		"host zone":           func(s *Spec) { s.Host = netip.MustParseAddrPort("[fe80::1%1]:80") },
		"guest multicast":     func(s *Spec) { s.Target.Addr = netip.MustParseAddrPort("[ff02::1]:80") },
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, good.Validate())
			s := good
			spoil(&s)
			assert.Error(t, s.Validate())
		})
	}
}

func TestSpecStrings(t *testing.T) {
	node := netip.MustParseAddr("10.0.2.2")
	for _, tt := range []struct{ in, local, exposed, guest string }{
		{"8080:80", "127.0.0.1:8080", "0.0.0.0:8080", "10.0.2.2:80"},
		{"0.0.0.0:8080:80", "127.0.0.1:8080", "0.0.0.0:8080", "10.0.2.2:80"},
		{"6000-6009:7000-7009", "127.0.0.1:6000-6009", "0.0.0.0:6000-6009", "10.0.2.2:7000-7009"},
		{"[::1]:53:53/udp", "[::1]:53", "[::1]:53", "10.0.2.2:53"},
		{"198.18.0.1:80:[fd00::7]:80", "198.18.0.1:80", "198.18.0.1:80", "[fd00::7]:80"},
	} {
		s := mustSpec(t, tt.in)
		assert.Equal(t, tt.local, s.HostString(Policy{}))
		assert.Equal(t, tt.exposed, s.HostString(Policy{ExposeToLAN: true}))
		assert.Equal(t, tt.guest, s.GuestString(node))
	}
	assert.Equal(t, "80", mustSpec(t, "80:80").GuestString(netip.Addr{}))
}

// FuzzParseSpec: an error or a value, never both; and a value survives its own
// text.
func FuzzParseSpec(f *testing.F) {
	for _, s := range []string{"8080:80", "[::1]:5353:53/udp", "8080:10.0.2.7:80", "6000-6009:7000-7009/TCP", "0:80",
		"[::ffff:1.2.3.4]:1-2:[fd00::1]:3-4/udp", "[::]:1:1", "]:[", "1:[::1", "::", "80-:1", "/", "[fe80::1%1]:1:2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		s, err := ParseSpec(in)
		if err != nil {
			require.Zero(t, s)
			return
		}
		require.NoError(t, s.Validate(), "%q", in)
		require.LessOrEqual(t, len(in), maxSpecLen)
		again, err := ParseSpec(s.String())
		require.NoError(t, err, "%q gave %q", in, s)
		require.Equal(t, s, again)
		require.Equal(t, s, s.Canonical())
		require.LessOrEqual(t, int(s.Host.Port())+int(s.Ports)-1, maxPort)
	})
}

func mustSpec(tb testing.TB, s string) Spec {
	tb.Helper()
	spec, err := ParseSpec(s)
	require.NoError(tb, err)
	return spec
}

// addr parses an address; "" is the zero address.
func addr(s string) netip.Addr {
	if s == "" {
		return netip.Addr{}
	}
	return netip.MustParseAddr(s)
}
