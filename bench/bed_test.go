package bench

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/attach"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/tap"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/netstack"
	"github.com/culvertnet/culvert/stack/promoted"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

const (
	guestPort = 5201
	node      = "198.18.0.2"
	gateway   = "198.18.0.1/24"
	mtu       = 1500
)

// A bed is one way from a client to a server.
type bed struct {
	host, guest *datapathtest.NetNS // where client and server run
	server      string              // the server's address
	serverPort  int                 // and port, for both TCP and UDP
	client      string              // where the client finds it
	port        int                 // for both TCP and UDP
	serve       func(testing.TB)    // starts a server for one run of iperf3; nil: one is there for all
	publish     func(int) error     // on the host publishes a port of TCP under its own number; nil: cannot while it runs
	relay       processes           // nil: the kernel's
	forwarder   *stack.Forwarder    // culvert's
	stack       *netstack.Stack     // culvert's
	single      string              // why it is not for thousands of flows
	peer        bool                // somebody else's
	failed      bool                // a measurement of it has been left out
}

// address returns where the bed's client connects to.
func (b *bed) address() string { return net.JoinHostPort(b.client, strconv.Itoa(b.port)) }

// inGuest returns where the bed's server listens.
func (b *bed) inGuest() string { return net.JoinHostPort(b.server, strconv.Itoa(b.serverPort)) }

// A path is a way under measurement.
type path struct {
	name string
	peer bool // somebody else's: what it cannot do is left out
	open func(testing.TB) *bed
}

// ownPaths are culvert's, after what the rest is compared with.
var ownPaths = []path{
	{"loopback", false, openLoopback},
	{"culvert-tap", false, openTap},
	{"culvert-tap-promoted", false, openTapPromoted},
}

// eachPath measures every path of the table on one bed of its own.
func eachPath(b *testing.B, measure func(*testing.B, *bed)) {
	paths := ownPaths
	if withPeers {
		paths = slices.Concat(ownPaths, peerPaths)
	}
	eachOf(b, paths, measure)
}

// eachOf measures each of paths.
func eachOf(b *testing.B, paths []path, measure func(*testing.B, *bed)) {
	for _, p := range paths {
		b.Run("path="+p.name, func(b *testing.B) {
			bed := p.open(b)
			bed.peer = p.peer
			measure(b, bed)
		})
	}
}

// check ends a benchmark that err befell: ours fail, somebody else's are left out.
func (b *bed) check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil && b.peer {
		b.failed = true
		leaveOut(tb, err.Error())
	}
	require.NoError(tb, err)
}

// tries is how often a measurement of somebody else's is begun at most.
const tries = 2

// try measures once and returns what befell it. Of somebody else's it begins again
// until nothing does, and says in a line how often and why: a peer that stumbles
// now and then has a figure so, which is one to be measured against. Nothing of a
// try that failed may count in the one that passed. Ours has one try.
func (b *bed) try(tb testing.TB, once func() error) error {
	tb.Helper()
	err := once()
	first, again := err, 0
	for ; b.peer && err != nil && again < tries-1; again++ {
		err = once()
	}
	if again > 0 {
		fmt.Printf("tried-again: %s: %d: %s\n", tb.Name(), again, oneLine(first.Error()))
	}
	return err
}

// leaveOut ends a benchmark with a line that says why it is missing.
func leaveOut(tb testing.TB, why string) {
	tb.Helper()
	fmt.Printf("left-out: %s: %s\n", tb.Name(), oneLine(why))
	tb.SkipNow()
}

// oneLine has a reason fit into a line of the raw output.
func oneLine(why string) string { return fmt.Sprintf("%.200s", strings.Join(strings.Fields(why), " ")) }

// openLoopback is the baseline: client and server in one namespace, no relay.
//
//	client ── lo ── server
func openLoopback(tb testing.TB) *bed {
	ns := datapathtest.NewNetNS(tb)
	return &bed{host: ns, guest: ns, server: "127.0.0.1", serverPort: guestPort, client: "127.0.0.1", port: guestPort}
}

// openTap is culvert over a tap: the whole of the daemon's data plane, in this
// process.
//
//	client ── lo ── listener ── netstack ── tap ┊ tap0 ── server
//	                this process                ┊ guest namespace
func openTap(tb testing.TB) *bed {
	return openTapAs(tb, func(att datapath.Attachment) datapath.Attachment { return att })
}

// openTapPromoted is openTap with promoted flows.
func openTapPromoted(tb testing.TB) *bed {
	datapathtest.Require(tb, "peekoff", promoted.Supported(), "promoted flows take SO_PEEK_OFF for TCP, which Linux has since 6.9")
	return openTapAs(tb, func(att datapath.Attachment) datapath.Attachment { return att }, func(o *netstack.Options) { o.Promoted = true })
}

// openTapAs is openTap with the tap as wrap makes of it.
func openTapAs(tb testing.TB, wrap func(datapath.Attachment) datapath.Attachment, with ...func(*netstack.Options)) *bed {
	tb.Helper()
	guest := datapathtest.NewNetNS(tb)
	att, err := tap.Open(tap.Config{Name: "tap0", NetNS: guest.Path(), MTU: mtu})
	require.NoError(tb, err)
	setUp(tb, guest, "tap0", node+"/24")
	b := mustRelay(tb, wrap(att), node, gateway, 5*time.Second, with...)
	b.guest, b.server = guest, node
	return b
}

// framePaths are culvert by transports that know no offloads, to a guest at native
// speed. Every frame passes one by one, and most of what it costs is the system calls
// of both ends.
var framePaths = []path{
	{"culvert-stream", false, func(tb testing.TB) *bed { return openNIC(tb, "qemu:unix:", "stream") }},
	{"culvert-unixgram", false, func(tb testing.TB) *bed { return openNIC(tb, "unixgram:", "dgram") }},
}

// openNIC is culvert behind a socket, with a VMM that is nothing but its NIC.
//
//	client ── lo ── listener ── netstack ── socket ── nic ── tap0 ── server
//	                this process                      ┊ guest namespace
func openNIC(tb testing.TB, scheme, kind string) *bed {
	tb.Helper()
	guest := datapathtest.NewNetNS(tb)
	path := socketPath(tb)
	spec, err := attach.ParseSpec(scheme + path)
	require.NoError(tb, err)
	l, err := attach.Listen(spec, attach.Options{})
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = l.Close() })
	startRole(tb, guest, "nic", node+"/24", kind, path, socketPath(tb))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	att, err := l.Accept(ctx)
	require.NoError(tb, err)
	b := mustRelay(tb, att, node, gateway, patience)
	b.guest, b.server = guest, node
	return b
}

// setUp gives a link of ns an address and sets it up.
func setUp(tb testing.TB, ns *datapathtest.NetNS, name, prefix string) {
	tb.Helper()
	require.NoError(tb, ns.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(prefix)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	}))
}

// mustRelay publishes the port of the guest at att, which has to answer within
// patience, in a namespace of its own.
func mustRelay(tb testing.TB, att datapath.Attachment, node, gateway string, patience time.Duration, with ...func(*netstack.Options)) *bed {
	tb.Helper()
	o := netstack.Options{
		Node: netip.MustParseAddr(node), Gateway: netip.MustParsePrefix(gateway), MTU: mtu, Seed: "bench",
	}
	for _, set := range with {
		set(&o)
	}
	s, err := netstack.New(att, o)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = s.Close() })
	require.Eventually(tb, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := s.Probe(ctx) // asks once
		return err == nil
	}, patience, 10*time.Millisecond, "the guest does not answer")

	f, err := stack.New(stack.Options{})
	require.NoError(tb, err)
	tb.Cleanup(func() { f.Shutdown(context.Background()) })
	f.AttachVM("guest", stack.VM{Guest: s, Node: netip.MustParseAddr(node)})
	b := &bed{
		host: datapathtest.NewNetNS(tb), serverPort: guestPort, client: "127.0.0.1", port: publishedPort,
		relay: self, forwarder: f, stack: s,
	}
	b.publish = func(port int) error { return b.put(own(port)) }
	for _, proto := range []string{"tcp", "udp"} {
		b.mustPut(tb, fmt.Sprintf("127.0.0.1:%d:%d/%s", publishedPort, guestPort, proto))
	}
	return b
}

// own is the text of a port under its own number.
func own(port int) string { return fmt.Sprintf("127.0.0.1:%d:%d", port, port) }

// publishedPort is guestPort's on the host.
const publishedPort = 15201

// put has culvert publish text, in Docker's form, in the namespace it is called in.
func (b *bed) put(text string) error {
	spec, err := listener.ParseSpec(text)
	if err != nil {
		return err
	}
	spec.Target.VM = "guest"
	o := b.forwarder.Publish(context.Background(), listener.Owner{Kind: listener.KindCLI, ID: text}, []listener.Spec{spec})[0]
	if o.State != listener.Forwarded {
		return fmt.Errorf("%s: %s: %s", text, o.State, o.Detail)
	}
	return nil
}

// mustPut does so on the bed's host.
func (b *bed) mustPut(tb testing.TB, text string) {
	tb.Helper()
	require.NoError(tb, b.host.Do(func() error { return b.put(text) }))
}

// take has culvert withdraw text.
func (b *bed) take(text string) {
	b.forwarder.Withdraw(context.Background(), listener.Owner{Kind: listener.KindCLI, ID: text})
}

// another returns the bed with the nth port after the first in its place: of the
// same relay, and with a server of its own. Only culvert's and loopback's have any.
func (b *bed) another(tb testing.TB, n int) *bed {
	tb.Helper()
	other := *b
	other.port += n
	other.serverPort += n
	if b.forwarder != nil {
		b.mustPut(tb, fmt.Sprintf("127.0.0.1:%d:%d", other.port, other.serverPort))
	}
	return &other
}

// socketPath returns one that fits in the 107 bytes of sun_path, without characters
// that mean something to QEMU or DPDK: tb.TempDir's has the benchmark's name.
func socketPath(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "vm.sock")
}
