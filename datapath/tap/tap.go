package tap

import (
	"fmt"
	"strings"

	"github.com/culvertnet/culvert/datapath"
)

// Config says which tap to attach to.
type Config struct {
	// Name is the interface's name in the guest's namespace: 1 to 15 bytes
	// (IFNAMSIZ-1) without '/', ':', '%' and white space.
	Name string
	// NetNS is a path of the guest's network namespace, such as
	// /run/netns/NAME or /proc/PID/ns/net. Empty means our own.
	NetNS string
	// Queues is the number of queue pairs, at most 256 (the kernel's
	// MAX_TAP_QUEUES). 0 means 1.
	Queues int
	// MTU is set on the interface, in bytes, 68 to 65521: the kernel's limits
	// for a tap, ETH_MIN_MTU and 65535 less the Ethernet header. 0 leaves what it
	// has, 1500 when it is new.
	MTU int
}

const (
	maxName   = 15                  // IFNAMSIZ-1, netdevice(7)
	maxQueues = 256                 // MAX_TAP_QUEUES, drivers/net/tun.c
	minMTU    = 68                  // ETH_MIN_MTU
	maxMTU    = 65535 - etherHeader // tun_net_init, drivers/net/tun.c

	etherHeader = 14
)

// Check reports whether this process can make a tap at all, without leaving
// one: what is wrong then (no /dev/net/tun, no CAP_NET_ADMIN) no waiting mends,
// and is worth knowing before anything else is started.
func Check(cfg Config) error { return check(cfg) }

// Open creates the tap, or adopts a persistent one of that name, sets it up and
// attaches to it. The interface's name is Info.Name. A new interface has a MAC
// address made from its name and namespace path, so the guest's address is the
// same when it is made again. It is deleted on Close; an adopted one stays.
//
// Open needs CAP_NET_ADMIN, in the guest's namespace too, and CAP_SYS_ADMIN to
// enter that. Its errors say what to do about a missing /dev/net/tun or
// namespace, missing rights, a tap that another program holds and one whose
// queues do not fit. On systems other than Linux it returns
// errors.ErrUnsupported.
func Open(cfg Config) (datapath.Attachment, error) {
	if cfg.Queues == 0 {
		cfg.Queues = 1
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	a, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("open tap %s: %w", cfg.Name, err)
	}
	return a, nil
}

// check refuses what the kernel would refuse, in words that say why, and what
// it would take for something else: a '%' makes a pattern of the name.
func (cfg Config) check() error {
	switch name := cfg.Name; {
	case name == "":
		return fmt.Errorf("tap name is empty")
	case len(name) > maxName:
		return fmt.Errorf("tap name %q is %d bytes long; an interface's name has at most %d", name, len(name), maxName)
	case name == "." || name == ".." || strings.ContainsFunc(name, badInName):
		return fmt.Errorf("tap name %q is not an interface's name: '/', ':', '%%' and white space are not allowed", name)
	}
	if cfg.Queues < 1 || cfg.Queues > maxQueues {
		return fmt.Errorf("tap %s with %d queues: 1 to %d are possible", cfg.Name, cfg.Queues, maxQueues)
	}
	if cfg.MTU != 0 && (cfg.MTU < minMTU || cfg.MTU > maxMTU) {
		return fmt.Errorf("tap %s with MTU %d: %d to %d are possible", cfg.Name, cfg.MTU, minMTU, maxMTU)
	}
	return nil
}

func badInName(r rune) bool {
	return strings.ContainsRune("/:%", r) || r <= ' ' || r == 0x7f || r == 0xa0 // 0xa0: isspace in the kernel's Latin-1
}
