package datapathtest

import (
	"fmt"

	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// A Region is a piece of guest memory: Bytes lie at guest-physical address GPA.
type Region struct {
	GPA   uint64
	Bytes []byte
}

// GuestMemory is a VM's memory. It resolves addresses as the device does
// (virtqueue.Memory) and hands out memory to drivers. Slice is safe for
// concurrent use, Alloc is not.
type GuestMemory struct {
	regions []Region
	free    []uint64 // offset of the first free byte of each region
}

var _ virtqueue.Memory = (*GuestMemory)(nil)

// NewGuestMemory returns a memory of the given regions, which do not overlap.
// A region's bytes may be a mapping that another process, or our own end of a
// vhost-user connection, has too; both ends then see the same. They are aligned
// to at least 16 bytes, as any mapping is and anything from 64 KiB that make
// returns. The memory of the regions is not changed, and remains the caller's.
func NewGuestMemory(regions ...Region) *GuestMemory {
	return &GuestMemory{regions: regions, free: make([]uint64, len(regions))}
}

// Regions returns the regions the memory was made of.
func (m *GuestMemory) Regions() []Region { return m.regions }

// Slice is the device's look-up: see virtqueue.Memory.
func (m *GuestMemory) Slice(gpa uint64, n uint32) ([]byte, error) {
	for _, r := range m.regions {
		if off := gpa - r.GPA; gpa >= r.GPA && off < uint64(len(r.Bytes)) {
			end := min(off+uint64(n), uint64(len(r.Bytes)))
			return r.Bytes[off:end:end], nil
		}
	}
	return nil, virtqueue.ErrFault
}

// Alloc takes n bytes, aligned to align (a power of two), from the first region
// that has them left, and returns where they lie. There is no way to give them
// back. It panics when no region has them: the test's memory is too small.
func (m *GuestMemory) Alloc(n, align int) uint64 {
	for i, r := range m.regions {
		gpa := (r.GPA + m.free[i] + uint64(align) - 1) &^ (uint64(align) - 1)
		if end := gpa - r.GPA + uint64(n); end <= uint64(len(r.Bytes)) {
			m.free[i] = end
			return gpa
		}
	}
	panic(fmt.Sprintf("guest memory has no %d bytes left", n))
}

// Bytes returns the n bytes at gpa as the guest sees them. They lie in one
// region; Bytes panics if they do not.
func (m *GuestMemory) Bytes(gpa uint64, n int) []byte {
	b, err := m.Slice(gpa, uint32(n))
	if err != nil || len(b) != n {
		panic(fmt.Sprintf("guest memory has no %d bytes at %#x", n, gpa))
	}
	return b
}
