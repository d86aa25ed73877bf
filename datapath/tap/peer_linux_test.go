package tap

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// The topology of every test here; nothing of it is visible outside:
//
//	test ── Attachment ══ tap "guest0" ── AF_PACKET socket (peer)
//	  our namespace, or  │  the guest's namespace
//	  another of ours    │  made by NewNetNS
const ifname = "guest0"

// newGuestNS makes a namespace whose interfaces send nothing by themselves.
func newGuestNS(t *testing.T) *datapathtest.NetNS {
	t.Helper()
	_, err := os.Stat(device)
	datapathtest.Require(t, "tun", err == nil, "modprobe tun")
	ns := datapathtest.NewNetNS(t)
	require.NoError(t, ns.Do(func() error {
		// Without IPv6 an interface comes up in silence. /proc/sys/net is that of
		// the reading thread's namespace.
		for _, dir := range []string{"all", "default"} {
			err := os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", dir, "disable_ipv6"), []byte("1"), 0)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		return nil
	}))
	return ns
}

// mustOpen opens a tap whose guest end is in ns; the test's end closes it.
func mustOpen(t *testing.T, ns *datapathtest.NetNS, cfg Config) datapath.Attachment {
	t.Helper()
	cfg.Name, cfg.NetNS = ifname, ns.Path()
	a, err := Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	return a
}

// A peer plays the guest with a packet socket on the interface.
type peer struct {
	sock *os.File
	mtu  int
	once sync.Once
	gone func() error // makes the guest go
	left error
}

// newPeer opens a packet socket on the interface in ns, with virtio-net headers
// (packet(7), PACKET_VNET_HDR) if vnet is set.
func newPeer(t *testing.T, ns *datapathtest.NetNS, vnet bool) *peer {
	t.Helper()
	p := &peer{gone: func() error { return nil }}
	err := ns.Do(func() error {
		link, err := netlink.LinkByName(ifname)
		if err != nil {
			return err
		}
		p.mtu = link.Attrs().MTU
		const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // htons
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		p.sock = os.NewFile(uintptr(fd), "packet socket")
		for _, opt := range []struct {
			level, name, value int
			set                bool
		}{
			{unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64 << 20, true},
			{unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1, true},
			{unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1, vnet},
		} {
			if !opt.set {
				continue
			}
			if err := unix.SetsockoptInt(fd, opt.level, opt.name, opt.value); err != nil {
				return fmt.Errorf("set socket option %d: %w", opt.name, err)
			}
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index})
	})
	if p.sock != nil {
		t.Cleanup(func() { _ = p.sock.Close() })
	}
	datapathtest.Require(t, "netns", !errors.Is(err, unix.EPERM), "run as root: SO_RCVBUFFORCE is not for user namespaces")
	require.NoError(t, err)
	return p
}

func (p *peer) MaxFrame() int { return p.mtu + etherHeader }

// NeverFull: the kernel hands what we write to the guest's stack at once.
func (p *peer) NeverFull() bool { return true }

func (p *peer) Send(frame []byte) error {
	_, err := p.sock.Write(frame)
	return err
}

func (p *peer) Recv(timeout time.Duration) ([]byte, error) {
	if err := p.sock.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	b := make([]byte, 10+datapath.MaxFrame)
	n, err := p.sock.Read(b)
	return b[:max(n, 0)], err
}

func (p *peer) Leave() error {
	p.once.Do(func() { p.left = p.gone() })
	return p.left
}

// deleteLink deletes the interface, if it is still there.
func deleteLink(ns *datapathtest.NetNS) error {
	return ns.Do(func() error {
		link, err := netlink.LinkByName(ifname)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			return nil
		}
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	})
}

// mustLink returns the interface as the guest sees it.
func mustLink(t *testing.T, ns *datapathtest.NetNS) (link netlink.Link) {
	t.Helper()
	require.NoError(t, ns.Do(func() (err error) {
		link, err = netlink.LinkByName(ifname)
		return err
	}))
	return link
}
