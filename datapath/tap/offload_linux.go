package tap

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath/virtio"
)

// tunOffloads pairs the offloads with their bits of TUNSETOFFLOAD.
var tunOffloads = []struct {
	offload virtio.Offloads
	bit     int
}{
	{virtio.OffloadCSum, unix.TUN_F_CSUM},
	{virtio.OffloadTSO4, unix.TUN_F_TSO4},
	{virtio.OffloadTSO6, unix.TUN_F_TSO6},
	{virtio.OffloadECN, unix.TUN_F_TSO_ECN},
	{virtio.OffloadUSO4, unix.TUN_F_USO4},
	{virtio.OffloadUSO6, unix.TUN_F_USO6},
}

const (
	// offloadTCP is what every tap can do, since Linux 2.6.27.
	offloadTCP = virtio.OffloadCSum | virtio.OffloadTSO4 | virtio.OffloadTSO6 | virtio.OffloadECN
	// offloadUDP came with Linux 6.2, for both directions at once, and for both
	// families or none.
	offloadUDP = virtio.OffloadUSO4 | virtio.OffloadUSO6
)

// setOffload finds out which offloads the kernel has, by asking it for them.
//
// TUNSETOFFLOAD speaks of one direction only: what we take from the guest. The
// ioctl takes the whole set or, with EINVAL, nothing. In the other direction
// nothing is agreed: the kernel acts on the header of each frame we write, and
// knows the types of header that it also offers to send.
func setOffload(ioctl func(bits int) error) (fromGuest, toGuest virtio.Offloads, err error) {
	for _, set := range []virtio.Offloads{offloadTCP | offloadUDP, offloadTCP} {
		bits := 0
		for _, o := range tunOffloads {
			if set.Has(o.offload) {
				bits |= o.bit
			}
		}
		if err = ioctl(bits); err == nil {
			return set, set, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			break
		}
	}
	return 0, 0, fmt.Errorf("set offloads: %w", err)
}
