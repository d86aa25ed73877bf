package stack

import (
	"fmt"
	"syscall"

	"github.com/culvertnet/culvert/stack/listener"
)

// A share keeps the guest of one VM from taking the descriptors that the others'
// host ports and clients need (C-29, C-53): what engines and clusters publish is
// the guest's to say, and may be without end. The sockets that are open for the
// guest of a VM are at most as many as it leaves, of Limits.Descriptors, to all
// that are no other guest's sockets: half of them where it is the only one, and
// some are always left. What the host's user publishes is not counted.
//
// It belongs to the Forwarder, whose mu is held.
type share struct {
	most  int // 0 for no bound
	guest map[string]int
	all   int // of guests
}

// errShare is a constant sentence: a row that is tried again in vain is no news.
var errShare = fmt.Errorf("the VM's containers and Services have the most host ports that one VM may have, "+
	"or other VMs and clients would lack file descriptors; raise the daemon's limit (RLIMIT_NOFILE, LimitNOFILE= in a systemd unit): %w", syscall.EMFILE)

func newShare(descriptors uintptr) share {
	return share{most: int(descriptors), guest: make(map[string]int)}
}

// allows reports whether r may have n sockets.
func (s *share) allows(r *row, n int) bool {
	more := n - r.sockets
	return s.most == 0 || more <= 0 || !ofGuest(r.owner) || s.guest[r.spec.Target.VM]+more <= s.most-s.all-more
}

// set notes that r has n sockets; one that is partly open counts as a whole.
func (s *share) set(r *row, n int) {
	if !ofGuest(r.owner) {
		return
	}
	more := n - r.sockets
	r.sockets = n
	s.all += more
	if s.guest[r.spec.Target.VM] += more; s.guest[r.spec.Target.VM] == 0 {
		delete(s.guest, r.spec.Target.VM)
	}
}

// ofGuest says whether an owner is there because a guest said so.
func ofGuest(o listener.Owner) bool {
	return o.Kind == listener.KindDocker || o.Kind == listener.KindKubernetes
}
