package reconcile

import (
	"net/netip"
	"sync"

	"github.com/culvertnet/culvert/stack/listener"
)

// Names is the table of names: who has each, and where it leads (C-37). The
// Loop keeps it equal to what is wanted. All methods are safe for concurrent
// use.
type Names struct {
	mu sync.Mutex
}

// A NameView is a name, for people.
type NameView struct {
	Name   string
	VM     string           // of the owner it leads to
	Owners []listener.Owner // the newest first
	Addrs  []netip.Addr
}

func newNames() *Names { return &Names{} }

// set makes the names in force those of wants.
func (n *Names) set(wants []Want) {}
