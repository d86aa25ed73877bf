package virtio

// Offloads is a set of things one side of a NIC leaves to the other.
type Offloads uint16

// The offloads, each named from the frame's point of view.
const (
	OffloadCSum Offloads = 1 << iota // checksum left partial (NEEDS_CSUM)
	OffloadTSO4                      // TCP super-frame over IPv4; needs OffloadCSum
	OffloadTSO6                      // TCP super-frame over IPv6; needs OffloadCSum
	OffloadECN                       // TCP super-frame with ECN bits; needs a TSO
	OffloadUSO4                      // UDP super-frame over IPv4; needs OffloadCSum
	OffloadUSO6                      // UDP super-frame over IPv6; needs OffloadCSum
)

var offloadNames = []string{"csum", "tso4", "tso6", "ecn", "uso4", "uso6"}

// Has reports whether every offload in want is in o.
func (o Offloads) Has(want Offloads) bool { return o&want == want }

// Names returns the set's names in a fixed order, as `culvert vms` shows them.
// It is empty, never nil, for no offloads.
func (o Offloads) Names() []string {
	names := []string{}
	for i, name := range offloadNames {
		if o&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}
