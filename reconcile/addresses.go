package reconcile

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/culvertnet/culvert/stack/listener"
)

// ownNetwork is where containers get a loopback address of their own (C-37).
var ownNetwork = netip.MustParsePrefix("127.77.0.0/16")

// ownAddresses is how many addresses ownNetwork has without its first and last,
// which look like a network's and a broadcast address.
const ownAddresses = 1<<16 - 2

// Addresses gives owners loopback addresses of their own, for `address:
// loopback`. One serves all VMs. All methods are safe for concurrent use.
//
// An owner's address is found by hashing who it is, and another is looked for
// where that is taken. So it is the same after a restart of the
// container, and of the daemon, but for the few whose hashes met: of 1 000 owners
// some 8 (1000² / 2 / 65534).
type Addresses struct {
	mu    sync.Mutex
	taken map[uint16]listener.Owner
	held  map[listener.Owner]*ownAddress
}

type ownAddress struct {
	host  uint16
	times int
}

// NewAddresses returns one with every address free.
func NewAddresses() *Addresses {
	return &Addresses{taken: make(map[uint16]listener.Owner), held: make(map[listener.Owner]*ownAddress)}
}

// Acquire returns the owner's address and keeps it for the owner until Release
// was called as often: a source of one life of a VM may still hold it while that
// of the next takes it up. It is false when there is no address left.
func (a *Addresses) Acquire(o listener.Owner) (netip.Addr, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if own := a.held[o]; own != nil {
		own.times++
		return own.addr(), true
	}
	if len(a.taken) >= ownAddresses {
		return netip.Addr{}, false
	}
	h := sha256.Sum256([]byte(o.Kind + "\x00" + o.VM + "\x00" + o.ID))
	// An odd step comes past all of the 2^16, and each owner's is another: no
	// queues form where hashes met.
	host, step := binary.BigEndian.Uint16(h[:]), binary.BigEndian.Uint16(h[2:])|1
	for !a.free(host) {
		host += step
	}
	own := &ownAddress{host, 1}
	a.taken[host], a.held[o] = o, own
	return own.addr(), true
}

// free says whether an address of the network can be given away.
func (a *Addresses) free(host uint16) bool {
	_, is := a.taken[host]
	return !is && host != 0 && host != 1<<16-1
}

// Release takes back one Acquire. An owner without an address is no error.
func (a *Addresses) Release(o listener.Owner) {
	a.mu.Lock()
	defer a.mu.Unlock()
	own := a.held[o]
	if own == nil {
		return
	}
	if own.times--; own.times == 0 {
		delete(a.taken, own.host)
		delete(a.held, o)
	}
}

func (own *ownAddress) addr() netip.Addr {
	b := ownNetwork.Addr().As4()
	binary.BigEndian.PutUint16(b[2:], own.host)
	return netip.AddrFrom4(b)
}
