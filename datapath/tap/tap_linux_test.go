package tap

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

const patience = 10 * time.Second // see datapathtest: only ends tests that fail

// mustMakePersistent makes a tap in ns as `ip tuntap add` does.
func mustMakePersistent(t *testing.T, ns *datapathtest.NetNS, flags netlink.TuntapFlag) {
	t.Helper()
	require.NoError(t, ns.Do(func() error {
		tap := &netlink.Tuntap{
			LinkAttrs: netlink.LinkAttrs{Name: ifname}, Mode: netlink.TUNTAP_MODE_TAP, Flags: flags,
		}
		err := netlink.LinkAdd(tap)
		closeAll(tap.Fds)
		return err
	}))
}

// TestCreate: a new interface is up in the guest's namespace and nowhere else,
// with our queue length, the MTU asked for and an address that is the same when
// it is made again; Close deletes it.
func TestCreate(t *testing.T) {
	datapathtest.Leaks(t)
	ns := newGuestNS(t)
	var first net.HardwareAddr
	for range 2 {
		a, err := Open(Config{Name: ifname, NetNS: ns.Path(), MTU: 1400, Queues: 2})
		require.NoError(t, err)
		info := a.Info()
		assert.Equal(t, "tap", info.Transport)
		assert.Equal(t, ifname, info.Name)
		assert.True(t, info.Connected)
		assert.True(t, info.ToGuest.Has(offloadTCP), "%v", info.ToGuest.Names())
		assert.True(t, info.FromGuest.Has(offloadTCP), "%v", info.FromGuest.Names())
		assert.Len(t, a.QueuePairs(), 2)

		link := mustLink(t, ns).Attrs()
		assert.Equal(t, 1400, link.MTU)
		assert.Equal(t, queueLen, link.TxQLen)
		assert.NotZero(t, link.Flags&net.FlagUp)
		assert.EqualValues(t, 2, link.HardwareAddr[0]&3, "locally administered, unicast")
		if first == nil {
			first = link.HardwareAddr
		}
		assert.Equal(t, first, link.HardwareAddr)
		_, err = netlink.LinkByName(ifname)
		assert.ErrorAs(t, err, new(netlink.LinkNotFoundError), "it is in our own namespace")

		require.NoError(t, a.Close())
		found, err := find(&namespace{path: ns.Path(), fd: mustFD(t, ns)}, ifname)
		require.NoError(t, err)
		require.Nil(t, found, "Close left the interface behind")
	}
	assert.NotEqual(t, first, hardwareAddr(Config{Name: "guest1", NetNS: ns.Path()}))
	assert.NotEqual(t, first, hardwareAddr(Config{Name: ifname}))
}

// mustFD opens the namespace; the test's end closes it.
func mustFD(t *testing.T, ns *datapathtest.NetNS) int {
	t.Helper()
	f, err := os.Open(ns.Path())
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return int(f.Fd())
}

// TestOwnNamespace: without NetNS the interface is made where we are, and the
// same name may be in use by another guest elsewhere.
func TestOwnNamespace(t *testing.T) {
	datapathtest.Leaks(t)
	here, there := newGuestNS(t), newGuestNS(t)
	var a, b datapath.Attachment
	require.NoError(t, here.Do(func() (err error) {
		if a, err = Open(Config{Name: ifname}); err != nil {
			return err
		}
		b, err = Open(Config{Name: ifname, NetNS: there.Path()})
		return err
	}))
	assert.NotZero(t, mustLink(t, here).Attrs().Flags&net.FlagUp)
	assert.NotZero(t, mustLink(t, there).Attrs().Flags&net.FlagUp)
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// TestAdopt: a persistent tap keeps its addresses, its MAC and a queue length
// longer than ours, has its header form put right, and stays when we close.
func TestAdopt(t *testing.T) {
	datapathtest.Leaks(t)
	ns := newGuestNS(t)
	mustMakePersistent(t, ns, netlink.TUNTAP_DEFAULTS)
	mac := net.HardwareAddr{2, 1, 2, 3, 4, 5}
	require.NoError(t, ns.Do(func() error {
		link, err := netlink.LinkByName(ifname)
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr("198.18.0.2/24")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
		if err := netlink.LinkSetTxQLen(link, queueLen+1); err != nil {
			return err
		}
		if err := netlink.LinkSetHardwareAddr(link, mac); err != nil {
			return err
		}
		// An earlier holder of the tap that wanted the longer header.
		f, err := openQueue(device, ifname, tapFlags)
		if err != nil {
			return err
		}
		return withFD(f, func(fd int) error { return unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, 12) })
	}))
	for range 2 {
		a, err := Open(Config{Name: ifname, NetNS: ns.Path(), MTU: 1400})
		require.NoError(t, err)
		link := mustLink(t, ns)
		assert.Equal(t, mac, link.Attrs().HardwareAddr)
		assert.Equal(t, 1400, link.Attrs().MTU)
		assert.Equal(t, queueLen+1, link.Attrs().TxQLen)
		assert.NotZero(t, link.Attrs().Flags&net.FlagUp)
		require.NoError(t, ns.Do(func() error {
			addrs, err := netlink.AddrList(link, netlink.FAMILY_V4)
			assert.Len(t, addrs, 1)
			return err
		}))
		p := newPeer(t, ns, false)
		frame := make([]byte, 60)
		frame[12] = 0x88
		n, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{{Segs: [][]byte{frame}, N: 60}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		got, err := p.Recv(patience)
		require.NoError(t, err)
		assert.Equal(t, frame, got, "the header's form is not the one that was left behind")
		require.NoError(t, a.Close())
		mustLink(t, ns)
	}
}

// withFD closes f after g has had its descriptor.
func withFD(f *os.File, g func(fd int) error) (err error) {
	raw, err := f.SyscallConn()
	if err == nil {
		ctlErr := raw.Control(func(fd uintptr) { err = g(int(fd)) })
		if ctlErr != nil {
			err = ctlErr
		}
	}
	_ = f.Close()
	return err
}

// TestAdoptOneQueue: a tap of several queues serves a guest that asks for one.
func TestAdoptOneQueue(t *testing.T) {
	ns := newGuestNS(t)
	mustMakePersistent(t, ns, netlink.TUNTAP_MULTI_QUEUE_DEFAULTS)
	a := mustOpen(t, ns, Config{})
	assert.Len(t, a.QueuePairs(), 1)
}

// TestConfig: what cannot be is refused before anything is made.
func TestConfig(t *testing.T) {
	for _, test := range []struct {
		name string
		cfg  Config
		want string // in the message; empty if it is fine
	}{
		{"shortest name", Config{Name: "t"}, ""},
		{"longest name", Config{Name: "tap-89012345678"[:15]}, ""},
		{"other bytes", Config{Name: "täp.0@x"}, ""},
		{"no name", Config{}, "empty"},
		{"name of 16", Config{Name: "tap-890123456789"}, `"tap-890123456789" is 16 bytes long; an interface's name has at most 15`},
		{"slash", Config{Name: "a/b"}, `"a/b"`},
		{"colon", Config{Name: "a:1"}, `"a:1"`},
		{"pattern", Config{Name: "tap%d"}, `"tap%d"`},
		{"space", Config{Name: "a b"}, `"a b"`},
		{"control", Config{Name: "a\n"}, `"a\n"`},
		{"dot", Config{Name: "."}, `"."`},
		{"dots", Config{Name: ".."}, `".."`},
		{"one queue", Config{Name: "t", Queues: 1}, ""},
		{"all queues", Config{Name: "t", Queues: 256}, ""},
		{"too many queues", Config{Name: "t", Queues: 257}, "257 queues: 1 to 256"},
		{"negative queues", Config{Name: "t", Queues: -1}, "-1 queues"},
		{"smallest MTU", Config{Name: "t", MTU: 68}, ""},
		{"largest MTU", Config{Name: "t", MTU: 65521}, ""},
		{"MTU too small", Config{Name: "t", MTU: 67}, "MTU 67: 68 to 65521"},
		{"MTU too large", Config{Name: "t", MTU: 65522}, "MTU 65522"},
		{"negative MTU", Config{Name: "t", MTU: -1}, "MTU -1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.want == "" {
				if test.cfg.Queues == 0 {
					test.cfg.Queues = 1 // Open's default
				}
				assert.NoError(t, test.cfg.check())
				return
			}
			_, err := Open(test.cfg)
			assert.ErrorContains(t, err, test.want)
		})
	}
}

// TestOpenErrors: each obstacle is named, with what to do, and nothing is left
// behind.
func TestOpenErrors(t *testing.T) {
	datapathtest.Leaks(t)
	ns := newGuestNS(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))

	t.Run("MissingNamespace", func(t *testing.T) {
		_, err := Open(Config{Name: ifname, NetNS: filepath.Join(dir, "none")})
		assert.ErrorIs(t, err, os.ErrNotExist)
		assert.ErrorContains(t, err, "none does not exist: make it with `ip netns add`")
	})
	t.Run("NotANamespace", func(t *testing.T) {
		_, err := Open(Config{Name: ifname, NetNS: file})
		assert.ErrorContains(t, err, file+" is not a network namespace")
	})
	t.Run("OtherNamespace", func(t *testing.T) {
		_, err := Open(Config{Name: ifname, NetNS: "/proc/self/ns/uts"})
		assert.ErrorContains(t, err, "/proc/self/ns/uts is not a network namespace")
	})
	t.Run("MissingDevice", func(t *testing.T) {
		_, err := openQueue(filepath.Join(dir, "tun"), ifname, tapFlags)
		assert.ErrorIs(t, err, os.ErrNotExist)
		assert.ErrorContains(t, err, "load the driver with `modprobe tun`")
	})
	t.Run("DeviceWithoutDriver", func(t *testing.T) {
		err := explainOpen(device, unix.ENODEV)
		assert.ErrorContains(t, err, "modprobe tun")
	})
	t.Run("DeviceDenied", func(t *testing.T) {
		err := explainOpen(device, unix.EACCES)
		assert.ErrorContains(t, err, "run as root")
	})
	t.Run("NotATap", func(t *testing.T) {
		_, err := Open(Config{Name: "lo", NetNS: ns.Path()})
		assert.ErrorContains(t, err, "is not a tap")
	})
	t.Run("ATun", func(t *testing.T) {
		ns := newGuestNS(t)
		require.NoError(t, ns.Do(func() error {
			tun := &netlink.Tuntap{
				LinkAttrs: netlink.LinkAttrs{Name: ifname}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_DEFAULTS,
			}
			err := netlink.LinkAdd(tun)
			closeAll(tun.Fds)
			return err
		}))
		_, err := Open(Config{Name: ifname, NetNS: ns.Path()})
		assert.ErrorContains(t, err, "is not a tap")
	})
	t.Run("TooFewQueues", func(t *testing.T) {
		ns := newGuestNS(t)
		mustMakePersistent(t, ns, netlink.TUNTAP_DEFAULTS)
		_, err := Open(Config{Name: ifname, NetNS: ns.Path(), Queues: 2})
		assert.ErrorContains(t, err, "it exists with one queue, not 2")
		assert.ErrorContains(t, err, "multi_queue")
	})
	for _, queues := range []int{1, 2} {
		t.Run("HeldByAnother", func(t *testing.T) {
			ns := newGuestNS(t)
			holder := mustOpen(t, ns, Config{Queues: queues})
			_, err := Open(Config{Name: ifname, NetNS: ns.Path(), Queues: queues})
			assert.ErrorIs(t, err, errHeld)
			require.NoError(t, holder.Close())
			mustOpen(t, ns, Config{Queues: queues})
		})
		t.Run("PersistentHeldByAnother", func(t *testing.T) {
			ns := newGuestNS(t)
			flags := netlink.TUNTAP_DEFAULTS
			if queues > 1 {
				flags = netlink.TUNTAP_MULTI_QUEUE_DEFAULTS
			}
			mustMakePersistent(t, ns, flags)
			holder := mustOpen(t, ns, Config{Queues: queues})
			_, err := Open(Config{Name: ifname, NetNS: ns.Path(), Queues: queues})
			assert.ErrorIs(t, err, errHeld)
			require.NoError(t, holder.Close())
			mustOpen(t, ns, Config{Queues: queues})
		})
	}
	t.Run("NoCapability", func(t *testing.T) {
		err := ns.Do(func() error {
			if err := dropNetAdmin(); err != nil {
				return err
			}
			_, err := Open(Config{Name: ifname})
			return err
		})
		assert.ErrorIs(t, err, os.ErrPermission)
		assert.ErrorContains(t, err, "CAP_NET_ADMIN is needed")
	})
}

// dropNetAdmin takes the right to set interfaces from this thread, which the
// caller has for itself and ends.
func dropNetAdmin() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	return unix.Capset(&hdr, &data[0])
}

// TestAdoptUnprivileged: a persistent tap that is set up already needs no
// capability; of one that is not, the error says what to set.
func TestAdoptUnprivileged(t *testing.T) {
	ns := newGuestNS(t)
	mustMakePersistent(t, ns, netlink.TUNTAP_DEFAULTS)
	open := func(cfg Config) (a datapath.Attachment, err error) {
		err = ns.Do(func() (err error) {
			if err := dropNetAdmin(); err != nil {
				return err
			}
			a, err = Open(cfg)
			return err
		})
		return a, err
	}
	_, err := open(Config{Name: ifname})
	assert.ErrorIs(t, err, os.ErrPermission)
	assert.ErrorContains(t, err, "or `ip link set "+ifname+" up` beforehand")
	require.NoError(t, ns.Do(func() error {
		link, err := netlink.LinkByName(ifname)
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	}))
	_, err = open(Config{Name: ifname, MTU: 9000})
	assert.ErrorContains(t, err, "or `ip link set "+ifname+" mtu 9000` beforehand")
	a, err := open(Config{Name: ifname, MTU: 1500})
	require.NoError(t, err)
	require.NoError(t, a.Close())
}

// TestSetOffload: a kernel without USO is asked again without it; any other
// refusal is an error.
func TestSetOffload(t *testing.T) {
	const tcp, udp = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN, unix.TUN_F_USO4 | unix.TUN_F_USO6
	var asked []int
	kernel := func(has int) func(int) error {
		asked = nil
		return func(bits int) error {
			asked = append(asked, bits)
			if bits&^has != 0 {
				return unix.EINVAL
			}
			return nil
		}
	}
	from, to, err := setOffload(kernel(tcp | udp))
	require.NoError(t, err)
	assert.Equal(t, offloadTCP|offloadUDP, from)
	assert.Equal(t, offloadTCP|offloadUDP, to)
	assert.Equal(t, []int{tcp | udp}, asked)

	from, to, err = setOffload(kernel(tcp | unix.TUN_F_UFO))
	require.NoError(t, err)
	assert.Equal(t, offloadTCP, from)
	assert.Equal(t, offloadTCP, to)
	assert.Equal(t, []int{tcp | udp, tcp}, asked)

	_, _, err = setOffload(kernel(unix.TUN_F_CSUM))
	assert.ErrorIs(t, err, unix.EINVAL)
	_, _, err = setOffload(func(int) error { return unix.EBADFD })
	assert.ErrorIs(t, err, unix.EBADFD)
}

// TestGoneUnwatched: with nobody reading or writing, the end is noticed all the
// same, and tells who waits for room.
func TestGoneUnwatched(t *testing.T) {
	datapathtest.Leaks(t)
	ns := newGuestNS(t)
	a := mustOpen(t, ns, Config{Queues: 2})
	require.NoError(t, deleteLink(ns))
	for _, qp := range a.QueuePairs() {
		select {
		case <-qp.Room():
		case <-time.After(patience):
			require.Fail(t, "Room did not fire")
		}
		_, err := qp.WriteBatch([]datapath.Frame{{Segs: [][]byte{make([]byte, 60)}, N: 60}})
		assert.ErrorIs(t, err, datapath.ErrPeerGone)
	}
}

// TestWriteFindsGone: the first write after the end says so, whoever noticed.
func TestWriteFindsGone(t *testing.T) {
	datapathtest.Leaks(t)
	ns := newGuestNS(t)
	a := mustOpen(t, ns, Config{})
	require.NoError(t, deleteLink(ns))
	n, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{{Segs: [][]byte{make([]byte, 60)}, N: 60}})
	assert.ErrorIs(t, err, datapath.ErrPeerGone)
	assert.Zero(t, n)
}
