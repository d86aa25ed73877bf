package bench

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/tap"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/netstack"
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
	client      string              // where the client finds it
	port        int
	serve       func(testing.TB) // starts a server for one run of iperf3; nil: one is there for all
	forwarder   *stack.Forwarder
	stack       *netstack.Stack
}

// A path is a way under measurement; relays says that this process works for it.
type path struct {
	name   string
	relays bool
	open   func(testing.TB) *bed
}

var paths = []path{
	{"loopback", false, openLoopback},
	{"culvert-tap", true, openTap},
}

// openLoopback is the baseline: client and server in one namespace, no relay.
//
//	client ── lo ── server
func openLoopback(tb testing.TB) *bed {
	ns := datapathtest.NewNetNS(tb)
	return &bed{host: ns, guest: ns, server: "127.0.0.1", client: "127.0.0.1", port: guestPort}
}

// openTap is culvert over a tap: the whole of the daemon's data plane, in this
// process.
//
//	client ── lo ── listener ── netstack ── tap ┊ tap0 ── server
//	                this process                ┊ guest namespace
func openTap(tb testing.TB) *bed {
	return openTapAs(tb, func(att datapath.Attachment) datapath.Attachment { return att })
}

// openTapAs is openTap with the tap as wrap makes of it.
func openTapAs(tb testing.TB, wrap func(datapath.Attachment) datapath.Attachment) *bed {
	tb.Helper()
	guest := datapathtest.NewNetNS(tb)
	att, err := tap.Open(tap.Config{Name: "tap0", NetNS: guest.Path(), MTU: mtu})
	require.NoError(tb, err)
	require.NoError(tb, guest.Do(func() error {
		link, err := netlink.LinkByName("tap0")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(node + "/24")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	}))
	b := mustRelay(tb, wrap(att), node, gateway, 5*time.Second)
	b.guest, b.server = guest, node
	return b
}

// mustRelay publishes the iperf3 port of the guest at att, which has to answer
// within patience.
func mustRelay(tb testing.TB, att datapath.Attachment, node, gateway string, patience time.Duration) *bed {
	tb.Helper()
	s, err := netstack.New(att, netstack.Options{
		Node: netip.MustParseAddr(node), Gateway: netip.MustParsePrefix(gateway), MTU: mtu, Seed: "bench",
	})
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
	return &bed{
		client: "127.0.0.1", port: mustPublish(tb, f, "127.0.0.1:0:"+strconv.Itoa(guestPort)), forwarder: f, stack: s,
	}
}

// mustPublish publishes spec and returns the host port the kernel picked.
func mustPublish(tb testing.TB, f *stack.Forwarder, text string) int {
	tb.Helper()
	spec, err := listener.ParseSpec(text)
	require.NoError(tb, err)
	spec.Target.VM = "guest"
	out := f.Publish(context.Background(), listener.Owner{Kind: listener.KindCLI, ID: text}, []listener.Spec{spec})
	require.Len(tb, out, 1)
	require.Equal(tb, listener.Forwarded, out[0].State, out[0].Detail)
	return int(out[0].Bound[0].Port())
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

// processCPU returns the processor time this process has used.
func processCPU(tb testing.TB) time.Duration {
	tb.Helper()
	var u syscall.Rusage
	require.NoError(tb, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
