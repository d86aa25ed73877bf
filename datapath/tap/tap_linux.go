package tap

import (
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// device is the tun driver's control device, Documentation/networking/tuntap.rst.
const device = "/dev/net/tun"

// queueLen is the txqueuelen of an interface: how many frames of the guest wait
// for us before the kernel drops, in a ring of pointers for each queue. The
// default of 1000 is short of what our windows invite. A flow's window is at
// most 4 MiB (half of an 8 MiB receive buffer), which is 4 MiB / 1448 = 2897
// frames where nothing is segmented late and 4 MiB / 65160 = 65 super-frames
// where it is: 4096 holds the first and 63 flows of the second. The ring takes
// 4096 * 8 bytes = 32 KiB.
const queueLen = 4096

// errHeld says that a tap has its one user already.
var errHeld = errors.New("another program holds it: give culvert a tap of its own, or the VMM another attachment")

func open(cfg Config) (datapath.Attachment, error) {
	ns, err := openNamespace(cfg.NetNS)
	if err != nil {
		return nil, err
	}
	defer ns.close() // held no longer: a namespace ends with its last user
	var files []*os.File
	existing, err := find(ns, cfg.Name)
	switch {
	case err != nil:
		return nil, err
	case existing != nil:
		files, err = adopt(cfg, ns, existing)
	default:
		files, err = create(cfg, ns)
	}
	if err != nil {
		return nil, err
	}
	fromGuest, toGuest, err := setUpHeader(files[0])
	if err != nil {
		closeAll(files)
		return nil, err
	}
	info := datapath.Info{
		Transport: "tap", Name: cfg.Name, ToGuest: toGuest, FromGuest: fromGuest, Connected: true,
	}
	a, err := newAttachment(info, files, ns)
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return a, nil
}

// find returns the interface of that name, nil if there is none.
func find(ns *namespace, name string) (link netlink.Link, err error) {
	err = ns.do(func() error {
		link, err = netlink.LinkByName(name)
		return err
	})
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for interface: %w", err)
	}
	return link, nil
}

// adopt attaches to a persistent tap where it is.
func adopt(cfg Config, ns *namespace, link netlink.Link) (files []*os.File, err error) {
	tap, ok := link.(*netlink.Tuntap)
	if !ok || tap.Mode != netlink.TUNTAP_MODE_TAP {
		return nil, errors.New("an interface of that name exists and is not a tap: choose another name")
	}
	multi := tap.Flags&netlink.TUNTAP_MULTI_QUEUE != 0
	if cfg.Queues > 1 && !multi {
		return nil, fmt.Errorf("it exists with one queue, not %d: delete it, or make it with `ip tuntap add %s mode tap multi_queue`",
			cfg.Queues, cfg.Name)
	}
	// A tap of several queues lets several programs in, each with a share of
	// the guest's frames and none of them knowing.
	if tap.NonPersist || tap.Queues+tap.DisabledQueues > 0 {
		return nil, errHeld
	}
	flags := uint16(tapFlags)
	if multi {
		flags |= unix.IFF_MULTI_QUEUE
	}
	err = ns.do(func() error {
		if files, err = openQueues(device, cfg.Name, flags, cfg.Queues); err != nil {
			return err
		}
		return setUp(cfg, link)
	})
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

// create makes a tap that lives as long as the files, and moves it to ns.
func create(cfg Config, ns *namespace) (files []*os.File, err error) {
	// In our namespace it has a passing name: the one asked for may be in use
	// here, by the guest of another namespace or by the host.
	name := cfg.Name
	if ns != nil {
		name = "cv" + rand.Text()[:maxName-2]
	}
	flags := uint16(tapFlags)
	if cfg.Queues > 1 {
		flags |= unix.IFF_MULTI_QUEUE
	}
	files, err = openQueues(device, name, flags|unix.IFF_TUN_EXCL, cfg.Queues)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			closeAll(files) // and the interface with them
		}
	}()
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find new interface: %w", err)
	}
	if err := netlink.LinkSetHardwareAddr(link, hardwareAddr(cfg)); err != nil {
		return nil, fmt.Errorf("set MAC address: %w", err)
	}
	if ns != nil {
		if err := netlink.LinkSetNsFd(link, ns.fd); err != nil {
			return nil, fmt.Errorf("move interface to network namespace %s: %w", ns.path, err)
		}
	}
	err = ns.do(func() error {
		link, err := netlink.LinkByName(name) // its index may be another there
		if err != nil {
			return fmt.Errorf("find new interface: %w", err)
		}
		if name != cfg.Name {
			if err := netlink.LinkSetName(link, cfg.Name); err != nil {
				return fmt.Errorf("name interface: %w", err)
			}
		}
		return setUp(cfg, link)
	})
	if err != nil {
		return nil, err
	}
	return files, nil
}

// setUp sets what the interface needs to carry frames, and sets it up. It runs
// inside the guest's namespace. Who only owns a persistent tap may open it and
// set nothing: its administrator has then, or is told what to set.
func setUp(cfg Config, link netlink.Link) error {
	if link.Attrs().TxQLen < queueLen { // an administrator's longer one stays
		// One that stays short drops sooner under load, and that is all.
		if err := netlink.LinkSetTxQLen(link, queueLen); err != nil && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("set txqueuelen %d: %w", queueLen, err)
		}
	}
	if cfg.MTU != 0 && cfg.MTU != link.Attrs().MTU {
		if err := netlink.LinkSetMTU(link, cfg.MTU); err != nil {
			return notSet(fmt.Sprintf("mtu %d", cfg.MTU), cfg.Name, err)
		}
	}
	if link.Attrs().Flags&net.FlagUp == 0 {
		if err := netlink.LinkSetUp(link); err != nil {
			return notSet("up", cfg.Name, err)
		}
	}
	return nil
}

// notSet is why an interface's setting could not be made, in ip's words.
func notSet(what, name string, err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("set interface %s: %w: CAP_NET_ADMIN is needed, or `ip link set %s %s` beforehand", what, err, name, what)
	}
	return fmt.Errorf("set interface %s: %w", what, err)
}

// hardwareAddr makes a locally administered unicast address (IEEE 802, the low
// two bits of the first byte are 10) that names the same tap each time. It need
// not be unique beyond the link, whose other end we are.
func hardwareAddr(cfg Config) net.HardwareAddr {
	h := fnv.New64a()
	_, _ = h.Write([]byte(cfg.NetNS + "\x00" + cfg.Name))
	sum := h.Sum(nil)
	return append(net.HardwareAddr{sum[0]&^1 | 2}, sum[1:6]...)
}

// tapFlags: a frame without the tun driver's own prefix, behind a virtio-net
// header.
const tapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// openQueues opens n queues of the interface in the calling thread's namespace.
func openQueues(path, name string, flags uint16, n int) (files []*os.File, err error) {
	for range n {
		f, err := openQueue(path, name, flags)
		if err != nil {
			closeAll(files)
			return nil, err
		}
		files = append(files, f)
		flags &^= unix.IFF_TUN_EXCL // the first made it; the others join
	}
	return files, nil
}

func openQueue(path, name string, flags uint16) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, explainOpen(path, err)
	}
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		ifr.SetUint16(flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, explainAttach(err)
	}
	// Only now the runtime may poll it: before TUNSETIFF a tun file answers the
	// poller with an error.
	return os.NewFile(uintptr(fd), path), nil
}

// explainOpen says what to do when the control device cannot be opened.
func explainOpen(path string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return fmt.Errorf("open %s: %w: load the driver with `modprobe tun`; in a container pass the device in", path, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("open %s: %w: run as root, or let this user read and write it", path, err)
	}
	return fmt.Errorf("open %s: %w", path, err)
}

// explainAttach says what to do when TUNSETIFF fails.
func explainAttach(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("attach to interface: %w: CAP_NET_ADMIN is needed, or a persistent tap that this user owns", err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("attach to interface: %w: %w", err, errHeld)
	case errors.Is(err, unix.E2BIG):
		return fmt.Errorf("attach to interface: %w: the kernel allows no more queues", err)
	}
	return fmt.Errorf("attach to interface: %w", err)
}

// setUpHeader sets the form of the virtio-net header, which belongs to the
// interface (an adopted one may come with another holder's), and the offloads.
//
// The form is the 10-byte one: num_buffers, the two bytes more of the other,
// mean nothing to a tap, which skips them without a look on the way in and
// leaves them unwritten on the way out. The byte order is little-endian on any
// host, as NetHdr writes it.
func setUpHeader(f *os.File) (fromGuest, toGuest virtio.Offloads, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	ctlErr := raw.Control(func(fd uintptr) {
		if err = unix.IoctlSetPointerInt(int(fd), unix.TUNSETVNETHDRSZ, virtio.HdrSize); err != nil {
			err = fmt.Errorf("set virtio-net header size: %w", err)
			return
		}
		if err = unix.IoctlSetPointerInt(int(fd), unix.TUNSETVNETLE, 1); err != nil {
			err = fmt.Errorf("set virtio-net header byte order: %w", err)
			return
		}
		fromGuest, toGuest, err = setOffload(func(bits int) error {
			return unix.IoctlSetInt(int(fd), unix.TUNSETOFFLOAD, bits)
		})
	})
	return fromGuest, toGuest, errors.Join(ctlErr, err)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
