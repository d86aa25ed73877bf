package names

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestMain fails the package when a test left a goroutine.
func TestMain(m *testing.M) {
	// Fuzzing waits for signals, and who has once waits for ever.
	c := make(chan os.Signal, 1)
	signal.Notify(c, os.Interrupt)
	signal.Stop(c)
	before := runtime.NumGoroutine()
	code := m.Run()
	for i := 0; code == 0 && runtime.NumGoroutine() > before; i++ {
		if i == 300 {
			buf := make([]byte, 1<<16)
			fmt.Printf("FAIL: %d goroutines, were %d\n%s\n", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
			code = 1
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	os.Exit(code)
}

// TestServerTaken: C-38, a taken port is an error that names who has it.
func TestServerTaken(t *testing.T) {
	l, pc, err := listen(localhost)
	require.NoError(t, err)
	defer pc.Close()
	defer l.Close()
	o := Options{Listen: l.Addr().(*net.TCPAddr).AddrPort(), Zone: "culvert.internal", Table: newTable(), Log: slog.New(slog.DiscardHandler)}
	for _, proto := range []string{"tcp", "udp"} {
		_, err := New(o)
		require.ErrorIs(t, err, listener.ErrInUse)
		require.ErrorIs(t, err, syscall.EADDRINUSE)
		assert.ErrorContains(t, err, fmt.Sprintf("DNS server: host port %s/%s is in use by ", o.Listen, proto))
		if runtime.GOOS == "linux" {
			assert.ErrorContains(t, err, fmt.Sprintf("names.test (pid %d)", os.Getpid()))
		}
		l.Close() // then it is UDP's that is taken
	}
	pc.Close()
	s, err := New(o)
	require.NoError(t, err, "and nothing was left open")
	assert.Equal(t, o.Listen, s.Addr())
	require.NoError(t, s.Close(), "without Serve")
	require.NoError(t, s.Serve(), "after Close")
}

// TestServerOptions: what is refused, with its reason.
func TestServerOptions(t *testing.T) {
	for _, zone := range []string{"", ".", "a..b", "cul vert", "ünder", `a\.b`, ".culvert", "*.x", strings.Repeat("a", 64), strings.Repeat("a.", 95) + "a"} {
		_, err := New(Options{Listen: localhost, Zone: zone})
		assert.ErrorContains(t, err, "zone ", "%q", zone)
	}
	for text, want := range map[string]string{"culvert.internal": "culvert.internal", "Culvert.": "culvert", "a_b.c-d": "a_b.c-d"} {
		got, err := ParseZone(text)
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
	for text, want := range map[string]string{
		"192.0.2.53": "192.0.2.53:53", "192.0.2.53:5353": "192.0.2.53:5353", "2001:db8::53": "[2001:db8::53]:53",
		"[2001:db8::53]": "[2001:db8::53]:53", "[2001:db8::53]:54": "[2001:db8::53]:54", "::ffff:192.0.2.1": "192.0.2.1:53",
	} {
		got, err := ParseUpstream(text)
		require.NoError(t, err)
		assert.Equal(t, want, got.String())
	}
	for _, text := range []string{"", "dns.example.com", "192.0.2.53:", "192.0.2.53:0", "192.0.2.53:x", "0.0.0.0", "[::]:53", "tcp://192.0.2.1"} {
		_, err := ParseUpstream(text)
		assert.ErrorContains(t, err, "upstream ", "%q", text)
	}
	_, err := New(Options{Zone: "culvert.internal"})
	assert.ErrorContains(t, err, "no address to listen at")
	l, pc, err := listen(localhost)
	require.NoError(t, err)
	own := l.Addr().(*net.TCPAddr).AddrPort()
	l.Close()
	pc.Close()
	_, err = New(Options{Listen: own, Zone: "culvert.internal", Upstreams: []netip.AddrPort{own}})
	assert.ErrorContains(t, err, "it would be asked by itself")
	s, err := New(Options{Listen: own, Zone: "culvert.internal"})
	require.NoError(t, err, "its sockets were closed")
	require.NoError(t, s.Close())
}

// TestServerClose: whenever it comes, with queries under way too.
func TestServerClose(t *testing.T) {
	elsewhere := newUpstream(t, func(string, *dns.Msg) *dns.Msg { return nil })
	for i := range 50 {
		s, err := New(Options{
			Listen: localhost, Zone: "culvert.internal", Table: newTable(), Upstreams: []netip.AddrPort{elsewhere.addr},
			Log: slog.New(slog.DiscardHandler),
		})
		require.NoError(t, err)
		served, asked := make(chan error, 1), make(chan error, 1)
		go func() { served <- s.Serve() }()
		before := elsewhere.packets()
		go func() {
			c := &dns.Client{Net: []string{"udp", "tcp"}[i/2%2], Timeout: 100 * time.Millisecond}
			_, _, err := c.Exchange(question("example.com.", dns.TypeA), s.Addr().String())
			asked <- err
		}()
		if i%2 == 0 {
			require.Eventually(t, func() bool { return elsewhere.packets() > before }, 10*time.Second, time.Millisecond)
		}
		require.NoError(t, s.Close())
		require.NoError(t, <-served)
		require.NoError(t, s.Close(), "twice")
		<-asked
	}
}

// TestServerConns: connections that say nothing keep others waiting, no longer
// than they are waited for, and are bounded.
func TestServerConns(t *testing.T) {
	tab := newTable()
	tab.set(t, shop)
	s := start(t, tab)
	for range maxConns + 10 {
		c, err := net.Dial("tcp", s.Addr().String())
		require.NoError(t, err)
		defer c.Close()
	}
	assert.Equal(t, "NOERROR aa 127.0.0.1", says(ask(t, s, "udp", question("web.culvert.internal.", dns.TypeA))))
	assert.Equal(t, "NOERROR aa 127.0.0.1", says(ask(t, s, "tcp", question("web.culvert.internal.", dns.TypeA))))
	assert.LessOrEqual(t, len(s.tcp.Listener.(*boundedListener).open), maxConns)
}

// TestServerGarbage: what is no DNS is answered by FORMERR or by nothing, and
// does not end the server.
func TestServerGarbage(t *testing.T) {
	tab := newTable()
	tab.set(t, shop)
	s := start(t, tab)
	c, err := net.Dial("udp", s.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	wire, err := question("web.culvert.internal.", dns.TypeA).Pack()
	require.NoError(t, err)
	for n := range len(wire) {
		_, err := c.Write(wire[:n])
		require.NoError(t, err)
	}
	require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	buf := make([]byte, 1000)
	for n := 12; n < len(wire); n++ { // shorter ones have no header to answer to
		got, err := c.Read(buf)
		require.NoError(t, err)
		var m dns.Msg
		require.NoError(t, m.Unpack(buf[:got]))
		assert.Equal(t, dns.RcodeFormatError, m.Rcode)
	}
	assert.Equal(t, "NOERROR aa 127.0.0.1", says(ask(t, s, "udp", question("web.culvert.internal.", dns.TypeA))))
}

// TestServerAcceptRests: a listener without descriptors is not asked in a loop.
func TestServerAcceptRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newBoundedListener(failing{})
		began := time.Now()
		for range 3 {
			_, err := l.Accept()
			assert.ErrorIs(t, err, syscall.EMFILE)
		}
		assert.Equal(t, 3*acceptPause, time.Since(began))
		assert.Empty(t, l.open)
		require.NoError(t, l.Close())
		_, err := l.Accept()
		assert.Error(t, err)
		assert.Equal(t, 3*acceptPause, time.Since(began), "and not at all once it is closed")
	})
}

type failing struct{ net.Listener }

func (failing) Accept() (net.Conn, error) { return nil, syscall.EMFILE }
func (failing) Close() error              { return nil }

// TestServerDig: what people type.
func TestServerDig(t *testing.T) {
	dig, err := exec.LookPath("dig")
	datapathtest.Require(t, "dig", err == nil, "apt-get install bind9-dnsutils")
	tab := newTable()
	tab.set(t, shop)
	s := start(t, tab)
	for args, want := range map[string]string{
		"+short web.culvert.internal":           "127.0.0.1",
		"+short web.culvert.internal aaaa":      "::1",
		"+short +tcp x.web.culvert.internal":    "127.0.0.1",
		"+short -x 127.77.1.2":                  "my_app.culvert.internal.",
		"+short +noedns db.project":             "127.77.3.4",
		"+short web":                            "127.0.0.1",
		"+short culvert.internal soa":           "culvert.internal. hostmaster.culvert.internal. 1 3600 600 86400 0",
		"+noall +comments web.culvert.internal": "status: NOERROR",
		"+noall +comments no.culvert.internal":  "status: NXDOMAIN",
		"+noall +comments example.com":          "status: REFUSED",
	} {
		args := append([]string{"@" + s.Addr().Addr().String(), "-p", fmt.Sprint(s.Addr().Port())}, strings.Fields(args)...)
		out, err := exec.Command(dig, args...).CombinedOutput()
		var exit *exec.ExitError
		require.False(t, errors.As(err, &exit), "%s", out)
		if strings.HasPrefix(want, "status") {
			assert.Contains(t, string(out), want)
		} else {
			assert.Equal(t, want+"\n", string(out), "%s", args)
		}
	}
}
