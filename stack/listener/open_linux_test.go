package listener

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func mustOpen(tb testing.TB, g *Group, s Spec, p Policy) *Opened {
	tb.Helper()
	o := Open(g, s, p, "row")
	tb.Cleanup(o.Close)
	require.Equal(tb, Forwarded, o.Outcome().State, o.Outcome().Detail)
	return o
}

func checkEcho(t *testing.T, proto Proto, ap netip.AddrPort) {
	t.Helper()
	c := mustDial(t, proto, ap)
	_, err := c.Write([]byte("ping"))
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 4))
	require.NoError(t, err)
	c.Close()
}

// echoes serves both protocols.
func echoes() *funcs {
	return &funcs{accepted: echo, readable: func(s *Socket) {
		if messages, err := NewReader().Read(s); err == nil {
			_, _ = s.Send([][2][]byte{{messages[0].Data}}, messages[0].Client, messages[0].Local)
		}
	}}
}

// freePorts returns the first of n ports in a row that nobody uses on the
// policy's addresses right now. They lie below the usual ephemeral ports, so
// that no client takes them meanwhile.
func freePorts(t *testing.T, g *Group, proto Proto, n uint16) uint16 {
	t.Helper()
	for first := uint16(20000); first < 32000; first += n {
		o := Open(g, Spec{Proto: proto, Host: netip.AddrPortFrom(netip.Addr{}, first), Ports: n,
			Target: Target{Addr: netip.MustParseAddrPort("10.0.2.2:1")}}, Policy{}, nil)
		state := o.Outcome().State
		o.Close()
		if state == Forwarded {
			return first
		}
	}
	require.FailNow(t, "no free ports")
	return 0
}

// FB-056, C-6: both families open and close together, on one number.
func TestFB056BothFamilies(t *testing.T) {
	g := mustGroup(t, echoes())
	for _, proto := range []string{"tcp", "udp"} {
		for _, p := range []Policy{{}, {ExposeToLAN: true}} {
			o := mustOpen(t, g, mustSpec(t, "0:80/"+proto), p)
			bound := o.Outcome().Bound
			require.Len(t, bound, 2)
			assert.Equal(t, p.Addrs(netip.Addr{}), []netip.Addr{bound[0].Addr(), bound[1].Addr()})
			assert.Equal(t, bound[0].Port(), bound[1].Port())
			assert.NotZero(t, bound[0].Port())
			assert.Empty(t, o.Outcome().Detail)
			assert.NoError(t, o.Outcome().Err)
			for _, s := range o.Sockets() {
				assert.Equal(t, "row", s.Token())
				assert.Contains(t, bound, s.Addr(), "FB-065: as getsockname tells")
			}
			for range 20 {
				checkEcho(t, o.spec.Proto, netip.AddrPortFrom(loopback4, bound[0].Port()))
				checkEcho(t, o.spec.Proto, netip.AddrPortFrom(loopback6, bound[0].Port()))
				o.Close()
				assert.Empty(t, o.Sockets())
				assert.Empty(t, o.Outcome().Bound)
				// C-27: the same number again.
				assert.Equal(t, bound, o.Retry().Bound)
			}
		}
	}
}

// FB-058: one address is exactly that address.
func TestFB058OneAddress(t *testing.T) {
	g := mustGroup(t, echoes())
	o := mustOpen(t, g, mustSpec(t, "[::1]:0:80"), Policy{ExposeToLAN: true})
	require.Len(t, o.Outcome().Bound, 1)
	ap := o.Outcome().Bound[0]
	assert.Equal(t, loopback6, ap.Addr())
	checkEcho(t, TCP, ap)
	_, err := net.Dial("tcp", netip.AddrPortFrom(loopback4, ap.Port()).String())
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
}

// FB-076, C-9: a range is one publish, every port of it knows its place, and
// none has a goroutine.
func TestFB076Range(t *testing.T) {
	g := mustGroup(t, echoes())
	const n = 200
	for _, proto := range []Proto{TCP, UDP} {
		first := freePorts(t, g, proto, n)
		goroutines := runtime.NumGoroutine()
		o := mustOpen(t, g, mustSpec(t, fmt.Sprintf("%d-%d:7000-7199/%s", first, first+n-1, proto)), Policy{})
		assert.LessOrEqual(t, runtime.NumGoroutine(), goroutines)
		sockets := o.Sockets()
		require.Len(t, sockets, 2*n)
		for _, s := range sockets {
			assert.Equal(t, first+s.Index(), s.Addr().Port())
		}
		assert.Equal(t, []netip.AddrPort{netip.AddrPortFrom(loopback4, first), netip.AddrPortFrom(loopback6, first)}, o.Outcome().Bound)
		for _, i := range []uint16{0, 1, n / 2, n - 1} {
			checkEcho(t, proto, netip.AddrPortFrom(loopback4, first+i))
			checkEcho(t, proto, netip.AddrPortFrom(loopback6, first+i))
		}
		o.Close()
		o.Close()
		l := Open(g, o.spec, Policy{}, nil)
		assert.Equal(t, Forwarded, l.Outcome().State, "free again")
		l.Close()
	}
}

// C-5: what cannot be bound makes the row failed and is named; the others carry
// traffic. FB-069: when it is free a retry binds it and touches nothing else.
func TestFB069PartOfARangeIsTaken(t *testing.T) {
	g := mustGroup(t, echoes())
	first := freePorts(t, g, TCP, 5)
	foreign, err := net.Listen("tcp4", netip.AddrPortFrom(loopback4, first+3).String())
	require.NoError(t, err)
	o := Open(g, mustSpec(t, fmt.Sprintf("%d-%d:1-5", first, first+4)), Policy{}, nil)
	defer o.Close()
	for range 2 { // a retry that changes nothing
		out := o.Outcome()
		assert.Equal(t, Failed, out.State)
		assert.ErrorIs(t, out.Err, ErrInUse)
		assert.ErrorIs(t, out.Err, syscall.EADDRINUSE)
		assert.Contains(t, out.Detail, fmt.Sprintf("host port 127.0.0.1:%d/tcp is in use by ", first+3))
		assert.NotContains(t, out.Detail, "more of")
		assert.Len(t, out.Bound, 2)
		require.Len(t, o.Sockets(), 9)
		checkEcho(t, TCP, netip.AddrPortFrom(loopback4, first+4))
		checkEcho(t, TCP, netip.AddrPortFrom(loopback6, first+3))
		o.Retry()
	}
	before := o.Sockets()
	foreign.Close()
	assert.Equal(t, Forwarded, o.Retry().State)
	assert.Empty(t, o.Outcome().Detail)
	require.Len(t, o.Sockets(), 10)
	assert.Equal(t, before, o.Sockets()[:9])
	added := o.Sockets()[9]
	assert.Equal(t, uint16(3), added.Index())
	checkEcho(t, TCP, added.Addr())
	assert.Equal(t, Forwarded, o.Retry().State)
}

// One taken port in each family: the first is named, the other counted.
func TestOpenNamesTheFirstAndCountsTheRest(t *testing.T) {
	g := mustGroup(t, echoes())
	port := freePorts(t, g, UDP, 1)
	foreign := mustOpen(t, g, mustSpec(t, fmt.Sprintf("%d:1/udp", port)), Policy{})
	o := Open(g, mustSpec(t, fmt.Sprintf("%d:2/udp", port)), Policy{}, nil)
	defer o.Close()
	assert.Regexp(t, fmt.Sprintf(`^host port 127\.0\.0\.1:%d/udp is in use by .*; 1 more of 2 sockets could not be bound$`, port), o.Outcome().Detail)
	assert.Empty(t, o.Outcome().Bound)
	foreign.Close()
	assert.Equal(t, Forwarded, o.Retry().State)
}

func TestOpenSkipsWhatIsNotValid(t *testing.T) {
	g := mustGroup(t, echoes())
	s := mustSpec(t, "8080:80")
	s.Ports = 0
	o := Open(g, s, Policy{}, nil)
	assert.Equal(t, Skipped, o.Outcome().State)
	assert.Equal(t, "no ports", o.Outcome().Detail)
	o.Close()
	assert.Equal(t, Skipped, o.Retry().State)
	assert.Empty(t, o.Sockets())
}

func TestOpenOnNoAddressOfTheHost(t *testing.T) {
	g := mustGroup(t, echoes())
	for _, port := range []string{"0", "8080"} {
		o := Open(g, mustSpec(t, "198.18.255.1:"+port+":80"), Policy{}, nil)
		assert.Equal(t, Failed, o.Outcome().State)
		assert.ErrorIs(t, o.Outcome().Err, ErrNoAddress)
		assert.Equal(t, "the host has no address 198.18.255.1", o.Outcome().Detail)
		o.Close()
	}
}

func TestOpenAfterTheGroupIsClosed(t *testing.T) {
	g := mustGroup(t, echoes())
	require.NoError(t, g.Close())
	fds := openFDs()
	for _, spec := range []string{"0:80", "20000-20009:1-10/udp"} {
		o := Open(g, mustSpec(t, spec), Policy{}, nil)
		assert.Equal(t, Failed, o.Outcome().State)
		assert.ErrorIs(t, o.Outcome().Err, net.ErrClosed)
		assert.Empty(t, o.Sockets())
	}
	assert.Equal(t, fds, openFDs())
}

// C-53: a range that does not fit into the descriptors takes none of them.
func TestOpenMoreThanThereAreDescriptors(t *testing.T) {
	g := mustGroup(t, echoes())
	first := freePorts(t, g, TCP, 50)
	small := mustOpen(t, g, mustSpec(t, "0:80"), Policy{})
	restore := lowerDescriptors(t, 30)
	defer restore()
	o := Open(g, mustSpec(t, fmt.Sprintf("%d-%d:1-50", first, first+49)), Policy{}, nil)
	defer o.Close()
	assert.Equal(t, Failed, o.Outcome().State)
	assert.ErrorIs(t, o.Outcome().Err, syscall.EMFILE)
	assert.Contains(t, o.Outcome().Detail, "LimitNOFILE")
	assert.Empty(t, o.Sockets())
	// FB-161: the others go on.
	checkEcho(t, TCP, small.Outcome().Bound[0])
	restore()
	assert.Equal(t, Forwarded, o.Retry().State)
	assert.Len(t, o.Sockets(), 100)
}

// FB-059: without IPv6 the IPv4 half is forwarded, and the row says so.
func TestFB059NoIPv6(t *testing.T) {
	inNetNS(t, "disable_ipv6", map[string]string{"ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/lo/disable_ipv6": "1"}, func(t *testing.T) {
		g := mustGroup(t, echoes())
		for _, spec := range []string{"0:80", "8080:80/udp", "6000-6009:7000-7009"} {
			o := mustOpen(t, g, mustSpec(t, spec), Policy{})
			assert.Equal(t, "::1 skipped: the host has no IPv6", o.Outcome().Detail)
			assert.NoError(t, o.Outcome().Err)
			require.Len(t, o.Outcome().Bound, 1)
			checkEcho(t, o.spec.Proto, o.Outcome().Bound[0])
		}
		// Asked for by name it is a failure like any other.
		o := Open(g, mustSpec(t, "[::1]:8080:80"), Policy{}, nil)
		assert.Equal(t, Failed, o.Outcome().State)
		assert.ErrorIs(t, o.Outcome().Err, ErrNoAddress)
		o.Close()
	})
	inNetNS(t, "back again", map[string]string{"ipv6/conf/lo/disable_ipv6": "0"}, func(t *testing.T) {
		mustOpen(t, mustGroup(t, echoes()), mustSpec(t, "[::1]:8080:80"), Policy{})
	})
}

// C-6: port 0 is one number in both families, however many are taken in one.
func TestOpenPicksOneNumber(t *testing.T) {
	for _, proto := range []Proto{TCP, UDP} {
		inNetNS(t, proto.String(), map[string]string{"ipv4/ip_local_port_range": "40000 40007"}, func(t *testing.T) {
			g := mustGroup(t, &funcs{})
			var taken []*Socket
			for i := range uint16(8) {
				taken = append(taken, mustListen(t, g, proto, netip.AddrPortFrom(loopback6, 40000+i)))
			}
			o := Open(g, Spec{Proto: proto, Ports: 1, Target: Target{Addr: netip.MustParseAddrPort("10.0.2.2:80")}}, Policy{}, nil)
			defer o.Close()
			assert.Equal(t, Failed, o.Outcome().State)
			assert.ErrorIs(t, o.Outcome().Err, ErrInUse)
			assert.Equal(t, "no host port was found that is free on 127.0.0.1 and ::1", o.Outcome().Detail)
			assert.Empty(t, o.Sockets(), "half a pair is worth nothing")

			for i, s := range taken {
				if i == 1 || i == 6 {
					require.NoError(t, s.Close())
				}
			}
			require.Equal(t, Forwarded, o.Retry().State, o.Outcome().Detail)
			require.Len(t, o.Outcome().Bound, 2)
			assert.Equal(t, o.Outcome().Bound[0].Port(), o.Outcome().Bound[1].Port())

			// The earlier number is gone meanwhile: another one, no failure.
			was := o.Outcome().Bound[0]
			o.Close()
			mustListen(t, g, proto, was)
			require.Equal(t, Forwarded, o.Retry().State, o.Outcome().Detail)
			assert.NotEqual(t, was, o.Outcome().Bound[0])
		})
	}
}

// FB-105, FB-061: one number, four listeners.
func TestFB105OneNumberFourListeners(t *testing.T) {
	type hit struct {
		proto Proto
		addr  netip.Addr
		token any
	}
	hits := make(chan hit, 4)
	g := mustGroup(t, &funcs{
		accepted: func(s *Socket, c *Conn) { hits <- hit{TCP, s.Addr().Addr(), s.Token()}; c.Close() },
		readable: func(s *Socket) {
			_, err := NewReader().Read(s)
			if !errors.Is(err, ErrWouldBlock) {
				hits <- hit{UDP, s.Addr().Addr(), s.Token()}
			}
		},
	})
	port := freePorts(t, g, TCP, 1)
	for _, a := range []netip.Addr{loopback4, loopback6} {
		for _, proto := range []Proto{TCP, UDP} {
			s := Spec{Proto: proto, Host: netip.AddrPortFrom(a, port), Ports: 1, Target: Target{Addr: netip.MustParseAddrPort("10.0.2.2:80")}}
			o := Open(g, s, Policy{}, s.String())
			defer o.Close()
			require.Equal(t, Forwarded, o.Outcome().State, o.Outcome().Detail)
		}
	}
	for _, a := range []netip.Addr{loopback4, loopback6} {
		for _, proto := range []Proto{TCP, UDP} {
			ap := netip.AddrPortFrom(a, port)
			c := mustDial(t, proto, ap)
			_, err := c.Write([]byte("x"))
			require.NoError(t, err)
			select {
			case got := <-hits:
				assert.Equal(t, hit{proto, a, fmt.Sprintf("%s:10.0.2.2:80/%s", ap, proto)}, got)
			case <-time.After(patience):
				require.FailNow(t, "nothing arrived", ap)
			}
		}
	}
}
