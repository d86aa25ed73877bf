package listener

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestExplain(t *testing.T) {
	ap := netip.MustParseAddrPort("127.0.0.1:1") // nobody listens there
	for _, tt := range []struct {
		err    error
		state  State
		cause  error
		detail string
	}{
		{syscall.EADDRINUSE, Failed, ErrInUse, "host port 127.0.0.1:1/tcp is in use by another process"},
		{syscall.EACCES, Failed, ErrDenied, deniedSentence(1, unprivilegedPortStart())},
		{syscall.EPERM, Failed, ErrDenied, deniedSentence(1, unprivilegedPortStart())},
		{syscall.EADDRNOTAVAIL, Failed, ErrNoAddress, "the host has no address 127.0.0.1"},
		{syscall.EAFNOSUPPORT, Failed, ErrNoAddress, "the host has no IPv4, for address 127.0.0.1"},
		{syscall.EMFILE, Failed, syscall.EMFILE, "host port 127.0.0.1:1/tcp needs more file descriptors than the daemon may have; raise its limit (RLIMIT_NOFILE, LimitNOFILE= in a systemd unit)"},
		{syscall.ENFILE, Failed, syscall.ENFILE, "host port 127.0.0.1:1/tcp needs more open files than the system allows; raise fs.file-max"},
		{syscall.ENOSPC, Failed, syscall.ENOSPC, "host port 127.0.0.1:1/tcp needs more epoll watches than the user may have; raise fs.epoll.max_user_watches"},
		{syscall.ENOBUFS, Failed, syscall.ENOBUFS, "host port 127.0.0.1:1/tcp: listen tcp 127.0.0.1:1: bind: no buffer space available"},
		{errors.ErrUnsupported, Skipped, errors.ErrUnsupported, "host port 127.0.0.1:1/tcp: listening is not supported on this system yet"},
	} {
		err := opError(TCP, ap, "bind", tt.err)
		state, detail, cause := Explain(TCP, ap, err)
		assert.Equal(t, tt.state, state, tt.err)
		assert.Equal(t, tt.detail, detail)
		assert.ErrorIs(t, cause, tt.cause)
		assert.ErrorIs(t, cause, tt.err)
	}
}

func TestDeniedSentence(t *testing.T) {
	assert.Equal(t, "host port 80 needs CAP_NET_BIND_SERVICE or net.ipv4.ip_unprivileged_port_start <= 80 (now 1024)", deniedSentence(80, 1024))
	assert.Contains(t, deniedSentence(80, 80), "security policy")
	assert.Equal(t, "host port 80 is not permitted", deniedSentence(80, -1))
}

// C-7: EADDRINUSE names the process that holds the port, EACCES the sysctl and
// its value.
func TestExplainNamesTheHolder(t *testing.T) {
	comm, err := os.ReadFile("/proc/self/comm")
	require.NoError(t, err)
	self := fmt.Sprintf("%s (pid %d)", comm[:len(comm)-1], os.Getpid())
	g := mustGroup(t, &funcs{})
	for _, tt := range []struct{ held, asked string }{
		{"127.0.0.1", "127.0.0.1"}, {"127.0.0.1", "0.0.0.0"}, {"0.0.0.0", "127.0.0.1"}, {"::1", "::1"}, {"::1", "::"},
	} {
		for _, proto := range []Proto{TCP, UDP} {
			s := mustListen(t, g, proto, netip.AddrPortFrom(addr(tt.held), 0))
			ap := netip.AddrPortFrom(addr(tt.asked), s.Addr().Port())
			_, err := g.listen(proto, ap, nil)
			state, detail, cause := Explain(proto, ap, err)
			assert.Equal(t, Failed, state)
			assert.ErrorIs(t, cause, ErrInUse)
			assert.Equal(t, fmt.Sprintf("host port %s/%s is in use by %s", ap, proto, self), detail)
		}
	}

	// A server of both families on the v6 wildcard keeps IPv4 out too.
	l, err := net.Listen("tcp", "[::]:0")
	require.NoError(t, err)
	defer l.Close()
	ap := netip.AddrPortFrom(loopback4, mustAddrPort(l.Addr()).Port())
	_, err = g.ListenTCP(ap, nil)
	_, detail, _ := Explain(TCP, ap, err)
	assert.Equal(t, fmt.Sprintf("host port %s/tcp is in use by %s", ap, self), detail)
}

func TestExplainDenied(t *testing.T) {
	inNetNS(t, "low port", map[string]string{"ipv4/ip_unprivileged_port_start": "900"}, func(t *testing.T) {
		// The thread's capabilities; it ends with the test.
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		require.NoError(t, unix.Capget(&hdr, &caps[0]))
		caps[0].Effective &^= 1 << unix.CAP_NET_BIND_SERVICE
		require.NoError(t, unix.Capset(&hdr, &caps[0]))

		g := mustGroup(t, &funcs{})
		o := Open(g, mustSpec(t, "899:80"), Policy{}, nil)
		defer o.Close()
		assert.Equal(t, Failed, o.Outcome().State)
		assert.ErrorIs(t, o.Outcome().Err, ErrDenied)
		assert.Equal(t, "host port 899 needs CAP_NET_BIND_SERVICE or net.ipv4.ip_unprivileged_port_start <= 899 (now 900)"+
			"; 1 more of 2 sockets could not be bound", o.Outcome().Detail)
		o = Open(g, mustSpec(t, "900:80"), Policy{}, nil)
		defer o.Close()
		assert.Equal(t, Forwarded, o.Outcome().State)
	})
}

func TestFamilyAbsent(t *testing.T) {
	wrap := func(err error) error { return opError(TCP, anyPort6, "bind", err) }
	assert.True(t, familyAbsent(loopback6, wrap(syscall.EAFNOSUPPORT)))
	assert.True(t, familyAbsent(addr("::"), wrap(syscall.EAFNOSUPPORT)))
	assert.True(t, familyAbsent(loopback6, wrap(syscall.EADDRNOTAVAIL)))
	assert.False(t, familyAbsent(addr("fd00::1"), wrap(syscall.EADDRNOTAVAIL)), "an address, not the family")
	assert.False(t, familyAbsent(loopback6, wrap(syscall.EADDRINUSE)))
	assert.False(t, familyAbsent(loopback6, nil))
}

// C-8 holds on macOS only.
func TestLowPortSkipped(t *testing.T) {
	for _, tt := range []struct {
		goos string
		uid  int
		ap   string
		skip bool
	}{
		{"darwin", 501, "127.0.0.1:80", true},
		{"darwin", 501, "[::1]:1023", true},
		{"darwin", 501, "127.0.0.1:1024", false},
		{"darwin", 501, "127.0.0.1:0", false},
		{"darwin", 501, "0.0.0.0:80", false},
		{"darwin", 501, "[::]:80", false},
		{"darwin", 0, "127.0.0.1:80", false},
		{"linux", 1000, "127.0.0.1:80", false},
	} {
		got := lowPortSkipped(tt.goos, tt.uid, netip.MustParseAddrPort(tt.ap))
		assert.Equal(t, tt.skip, got != "", "%+v: %s", tt, got)
	}
}

func TestParseSocketLine(t *testing.T) {
	const tail = " 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 "
	// As a little-endian kernel prints 127.0.0.1:80 and [::1]:53.
	for line, want := range map[string]string{
		"   0: 0100007F:0050" + tail + "4711 1 0000000000000000 100 0 0 10 0":                                                                                  "127.0.0.1:80",
		"   1: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 00": "[::1]:53",
	} {
		local, state, inode, ok := parseSocketLine(line)
		require.True(t, ok, line)
		assert.Equal(t, want, local.String())
		assert.Equal(t, stateListen, state)
		assert.Equal(t, "4711", inode)
	}
	for _, line := range []string{
		"", "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode",
		"0: 0100007F:0050", "0: 0100007:0050" + tail + "1", "0: 0100007F:10050" + tail + "1", "0: 0100007F" + tail + "1",
		"0: 0100007F00:0050" + tail + "1", "0: 0100007F:0050" + tail + "x",
	} {
		_, _, _, ok := parseSocketLine(line)
		assert.False(t, ok, line)
	}
}

func FuzzParseSocketLine(f *testing.F) {
	f.Add("   0: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1")
	f.Fuzz(func(t *testing.T, line string) {
		local, _, inode, ok := parseSocketLine(line)
		if !ok {
			require.Zero(t, local)
			require.Empty(t, inode)
			return
		}
		require.True(t, local.IsValid())
		_, err := strconv.ParseUint(inode, 10, 64)
		require.NoError(t, err)
	})
}

// A process chooses its name; it does not choose what our terminal does.
func TestHolderNameIsPrintable(t *testing.T) {
	assert.Equal(t, "evil?[31m?name", printable("evil\x1b[31m\nname"))
	assert.Equal(t, "a?b", printable("a\xffb"))
}
