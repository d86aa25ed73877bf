package listener

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mustUDP returns a socket that is not in service: the test reads it.
func mustUDP(tb testing.TB, ap netip.AddrPort) *Socket {
	tb.Helper()
	s, err := mustGroup(tb, &funcs{}).bind(UDP, ap, nil, 0)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, s.Close()) })
	return s
}

// mustRead waits for datagrams at a socket that is not in service.
func mustRead(tb testing.TB, r *Reader, s *Socket) []Message {
	tb.Helper()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}, int(patience/time.Millisecond))
	require.NoError(tb, err)
	require.Equal(tb, 1, n, "no datagram")
	messages, err := r.Read(s)
	require.NoError(tb, err)
	return messages
}

// split is what messages hold, cut apart.
func split(messages []Message) (datagrams []string) {
	for _, m := range messages {
		for more := true; more; {
			var d []byte
			d, more = m.Next()
			datagrams = append(datagrams, string(d))
		}
	}
	return datagrams
}

// inPieces makes datagrams of texts, each cut in two.
func inPieces(texts ...string) (datagrams [][2][]byte) {
	for _, t := range texts {
		datagrams = append(datagrams, [2][]byte{[]byte(t[:len(t)/3]), []byte(t[len(t)/3:])})
	}
	return datagrams
}

func mustAddrPort(a net.Addr) netip.AddrPort { return netip.MustParseAddrPort(a.String()) }

// FB-038, FB-037: the answer leaves from the address that was asked.
func TestFB038ReplySource(t *testing.T) {
	r := NewReader()
	g := mustGroup(t, &funcs{readable: func(s *Socket) {
		messages, err := r.Read(s)
		if assert.NoError(t, err) {
			m := &messages[0]
			n, err := s.Send([][2][]byte{{m.Data}}, m.Client, m.Local)
			assert.NoError(t, err)
			assert.Equal(t, 1, n)
		}
	}})
	for _, tt := range []struct{ listen, to string }{
		{"0.0.0.0:0", "127.0.0.1"}, {"0.0.0.0:0", "127.0.0.2"}, {"[::]:0", "::1"}, {"127.0.0.3:0", "127.0.0.3"},
	} {
		s := mustListen(t, g, UDP, netip.MustParseAddrPort(tt.listen))
		c := mustDial(t, UDP, netip.AddrPortFrom(addr(tt.to), s.Addr().Port())) // connected: takes answers from there only
		for range 100 {
			_, err := c.Write([]byte("ping"))
			require.NoError(t, err)
			b := make([]byte, 64)
			n, err := c.Read(b)
			require.NoError(t, err, tt)
			require.Equal(t, "ping", string(b[:n]))
		}
	}
}

// FB-039, C-21: datagrams of every size pass whole.
func TestFB039DatagramSizes(t *testing.T) {
	for _, ap := range []netip.AddrPort{anyPort4, anyPort6} {
		s, r := mustUDP(t, ap), NewReader()
		client := mustDial(t, UDP, s.Addr())
		b := make([]byte, 65536)
		_, err := r.Read(s)
		require.ErrorIs(t, err, ErrWouldBlock)
		for _, size := range []int{0, 1, 1472, 1473, 2944, 9000, 65507} {
			sent := bytes.Repeat([]byte{byte(size), 7, 11}, size/3+1)[:size]
			_, err := client.Write(sent)
			require.NoError(t, err)
			messages := mustRead(t, r, s)
			require.Len(t, messages, 1)
			m := messages[0]
			assert.Equal(t, client.LocalAddr().String(), m.Client.String())
			assert.Equal(t, ap.Addr(), m.Local)
			datagram, more := m.Next()
			assert.True(t, bytes.Equal(sent, datagram), size)
			assert.False(t, more)

			n, err := s.Send(inPieces(string(sent)), m.Client, m.Local)
			require.NoError(t, err)
			assert.Equal(t, 1, n)
			n, err = client.Read(b)
			require.NoError(t, err)
			assert.True(t, bytes.Equal(sent, b[:n]), size)
		}
		n, err := s.Send([][2][]byte{{}, {make([]byte, 65536)}, {}}, mustAddrPort(client.LocalAddr()), ap.Addr())
		require.ErrorIs(t, err, syscall.EMSGSIZE)
		assert.Equal(t, 1, n)
	}
}

// What a client gives the kernel merged arrives merged, and is cut where the
// client had it cut; datagrams one by one keep their boundaries as well.
func TestReadMerged(t *testing.T) {
	for _, ap := range []netip.AddrPort{anyPort4, anyPort6} {
		s, r := mustUDP(t, ap), NewReader()
		client := mustDial(t, UDP, s.Addr()).(*net.UDPConn)
		raw, err := client.SyscallConn()
		require.NoError(t, err)
		var want []string
		for i := range 5 {
			want = append(want, fmt.Sprintf("%01000d", i))
		}
		want = append(want, "the last is shorter")
		require.NoError(t, raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000)
		}))
		require.NoError(t, err)
		_, err = client.Write([]byte(strings.Join(want, "")))
		require.NoError(t, err)
		messages := mustRead(t, r, s)
		assert.Equal(t, want, split(messages))
		assert.Len(t, messages, 1, "this kernel merges")

		require.NoError(t, raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 0)
		}))
		require.NoError(t, err)
		for _, text := range want {
			_, err := client.Write([]byte(text))
			require.NoError(t, err)
		}
		assert.Equal(t, want, split(mustRead(t, r, s)), "all are there, in one call")
	}
}

// Datagrams arrive with the boundaries and in the order they were given, whatever
// lengths follow each other.
func TestSendKeepsBoundaries(t *testing.T) {
	text := func(n int) string { return fmt.Sprintf("%0*d", max(n, 1), n)[:n] }
	var many []string
	for i := range 200 {
		many = append(many, fmt.Sprintf("%03d", i))
	}
	for _, texts := range [][]string{
		{""}, {"", "", ""}, {"a", "", "b"}, {"one", "two", "six", "last is longer"}, {"equal", "equal", "end"}, {"same", "end", "end", "end"},
		{text(1400), text(1400), text(1400), text(64), text(64)}, {text(30000), text(30000), text(30000)}, {text(65507), text(65507)}, many,
	} {
		for _, ap := range []netip.AddrPort{anyPort4, anyPort6} {
			s := mustUDP(t, ap)
			client := mustDial(t, UDP, s.Addr())
			n, err := s.Send(inPieces(texts...), mustAddrPort(client.LocalAddr()), ap.Addr())
			require.NoError(t, err)
			assert.Equal(t, len(texts), n)
			b := make([]byte, 65536)
			for _, want := range texts {
				n, err := client.Read(b)
				require.NoError(t, err)
				require.Equal(t, want, string(b[:n]))
			}
		}
	}
}

func TestMergeable(t *testing.T) {
	sized := func(sizes ...int) (d [][2][]byte) {
		for _, n := range sizes {
			d = append(d, [2][]byte{make([]byte, n/2), make([]byte, n-n/2)})
		}
		return d
	}
	same := func(n, size int) (sizes []int) {
		for range n {
			sizes = append(sizes, size)
		}
		return sizes
	}
	for _, tt := range []struct {
		sizes       []int
		limit, want int
	}{
		{same(1, 100), maxPayload, 1},
		{same(3, 100), maxPayload, 3},
		{[]int{100, 100, 99, 100}, maxPayload, 3},
		{[]int{100, 101}, maxPayload, 1},
		{[]int{100, 0, 100}, maxPayload, 1},
		{same(3, 0), maxPayload, 1},
		{same(70, 1), maxPayload, 64},
		{same(60, 1400), maxPayload, 46}, // 46 × 1400 = 64400, 47 × 1400 = 65800
		{same(3, 100), 99, 1},
		{same(3, 100), 100, 3},
		{same(3, 100), 0, 1},
	} {
		assert.Equal(t, tt.want, mergeable(sized(tt.sizes...), tt.limit), tt)
	}
}

// Where a path takes no merged datagrams of some length, those go one by one,
// and shorter ones merged still.
func TestMergeRefused(t *testing.T) {
	inNetNS(t, "small MTU", nil, func(t *testing.T) {
		s := mustUDP(t, anyPort4)
		client := mustDial(t, UDP, s.Addr())
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		defer unix.Close(fd)
		lo, err := unix.NewIfreq("lo")
		require.NoError(t, err)
		lo.SetUint32(1500)
		require.NoError(t, unix.IoctlIfreq(fd, unix.SIOCSIFMTU, lo))

		// 2000 + 28 > 1500: the kernel cuts no datagrams that it would have to
		// fragment then.
		long, short := strings.Repeat("x", 2000), strings.Repeat("y", 1000)
		texts := []string{short, short, long, long, long, short, short}
		n, err := s.Send(inPieces(texts...), mustAddrPort(client.LocalAddr()), addr("127.0.0.1"))
		require.NoError(t, err)
		assert.Equal(t, len(texts), n)
		assert.EqualValues(t, 1999, s.merge.Load())
		b := make([]byte, 65536)
		for _, want := range texts {
			n, err := client.Read(b)
			require.NoError(t, err)
			require.Equal(t, want, string(b[:n]))
		}
	})
}

func TestSendRefuses(t *testing.T) {
	s := mustUDP(t, anyPort4)
	to := s.Addr()
	one := [][2][]byte{{}}
	refused := func(client netip.AddrPort, local netip.Addr, why ...any) {
		n, err := s.Send(one, client, local)
		assert.Error(t, err, why...)
		assert.Zero(t, n)
	}
	refused(netip.AddrPort{}, netip.Addr{})
	refused(to, addr("198.18.255.1"), "not an address of ours")
	refused(netip.MustParseAddrPort("[::1]:1"), netip.Addr{}, "other family")
	refused(netip.MustParseAddrPort("[fe80::1%eth0]:1"), netip.Addr{}, "zone by name")
	n, err := s.Send(one, to, netip.Addr{})
	assert.NoError(t, err)
	assert.Equal(t, 1, n)
}

func TestDatagramsDoNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, whose sync.Pool drops at random")
	}
	for _, ap := range []netip.AddrPort{anyPort4, anyPort6} {
		s, r := mustUDP(t, ap), NewReader()
		datagrams := inPieces("header and payload", "header and payload", "short")
		assert.Zero(t, testing.AllocsPerRun(100, func() {
			if _, err := s.Send(datagrams, s.Addr(), ap.Addr()); err != nil {
				panic(err)
			}
			if _, err := r.Read(s); err != nil {
				panic(err)
			}
		}))
		assert.Zero(t, testing.AllocsPerRun(100, func() {
			if _, err := r.Read(s); err != ErrWouldBlock {
				panic(err)
			}
		}), "nothing there")
	}
}
