package vhostuser

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/culvertnet/culvert/datapath/virtqueue"
)

var _ virtqueue.Memory = (*memTable)(nil)

// maxRegions is how many regions we map: what a machine can have memory modules
// (ACPI_MAX_RAM_SLOTS in QEMU).
const maxRegions = 256

var errMemory = errors.New("guest memory")

// A memTable is the guest's memory as the front-end shares it: its regions,
// mapped, and in the order of their guest-physical addresses. It implements
// virtqueue.Memory for as long as its owner, a device, keeps it from being
// changed.
//
// There are two look-ups. Rings lie at addresses of the front-end's, buffers at
// guest-physical addresses.
type memTable struct {
	regions []mapped
	last    atomic.Uint32 // index of the region that slice hit last, or beyond
}

// A mapped region's bytes are memory[0:size] at gpa and at user.
type mapped struct {
	region
	memory  []byte
	mapping []byte // what is to be unmapped: memory and the offset before it
	adds    int    // how often it was added, and so is to be removed
}

// Slice returns the bytes at gpa, as virtqueue.Memory says.
func (t *memTable) Slice(gpa uint64, n uint32) ([]byte, error) {
	i := int(t.last.Load())
	if i >= len(t.regions) || gpa-t.regions[i].gpa >= t.regions[i].size { // unsigned: below is beyond
		if i = t.find(gpa); i < 0 {
			return nil, virtqueue.ErrFault
		}
		t.last.Store(uint32(i))
	}
	r := &t.regions[i]
	from := gpa - r.gpa
	to := min(from+uint64(n), r.size)
	return r.memory[from:to:to], nil
}

// find returns the index of the region that has gpa, -1 if none has.
func (t *memTable) find(gpa uint64) int {
	i, exact := slices.BinarySearchFunc(t.regions, gpa, func(r mapped, gpa uint64) int {
		switch {
		case r.gpa < gpa:
			return -1
		case r.gpa > gpa:
			return 1
		}
		return 0
	})
	if !exact {
		i-- // the last one that begins before
	}
	if i < 0 || gpa-t.regions[i].gpa >= t.regions[i].size {
		return -1
	}
	return i
}

// atUser returns the n bytes at an address of the front-end's, which lie in one
// region.
func (t *memTable) atUser(user uint64, n int) ([]byte, error) {
	for i := range t.regions {
		r := &t.regions[i]
		from := user - r.user
		if from < r.size && uint64(n) <= r.size-from {
			return r.memory[from : from+uint64(n) : from+uint64(n)], nil
		}
	}
	return nil, fmt.Errorf("%w: no %d bytes at the front-end's address %#x", errMemory, n, user)
}

// set replaces all regions. It takes over the descriptors, one a region. With an
// error the table is empty.
func (t *memTable) set(regions []region, fds []int) error {
	t.clear()
	for i, r := range regions {
		if err := t.add(r, fds[i]); err != nil {
			closeFDs(fds[i+1:])
			t.clear()
			return err
		}
	}
	return nil
}

// add maps one more region, or the same anew: a front-end that keeps a state for
// each pair of queues (QEMU 7.2) adds every region once a pair, and removes it as
// often. It takes over the descriptor, which nothing needs once it is mapped.
func (t *memTable) add(r region, fd int) error {
	defer closeFDs([]int{fd})
	const end = ^uint64(0)
	switch {
	case r.size == 0:
		return fmt.Errorf("%w: empty region at %#x", errMemory, r.gpa)
	case r.gpa > end-r.size, r.user > end-r.size, r.offset > end-r.size:
		return fmt.Errorf("%w: region of %#x bytes at %#x, %#x, offset %#x wraps around", errMemory, r.size, r.gpa, r.user, r.offset)
	}
	i := 0
	for ; i < len(t.regions) && t.regions[i].gpa < r.gpa; i++ {
	}
	again := i < len(t.regions) && t.regions[i].region == r
	if !again && (i > 0 && r.gpa-t.regions[i-1].gpa < t.regions[i-1].size ||
		i < len(t.regions) && t.regions[i].gpa-r.gpa < r.size) {
		return fmt.Errorf("%w: region of %#x bytes at %#x overlaps another", errMemory, r.size, r.gpa)
	}
	if !again && len(t.regions) == maxRegions {
		return fmt.Errorf("%w: more than %d regions", errMemory, maxRegions)
	}
	mapping, err := mapShared(fd, r.offset+r.size)
	if err != nil {
		return fmt.Errorf("%w: map region of %#x bytes at %#x: %w", errMemory, r.size, r.gpa, err)
	}
	m := mapped{r, mapping[r.offset:][:r.size:r.size], mapping, 1}
	if again {
		m.adds += t.regions[i].adds
		unmap(t.regions[i].mapping)
		t.regions[i] = m
		return nil
	}
	t.regions = slices.Insert(t.regions, i, m)
	return nil
}

// remove unmaps the region that has r's addresses and size, when it has been
// removed as often as it was added.
func (t *memTable) remove(r region) error {
	i := slices.IndexFunc(t.regions, func(m mapped) bool {
		return m.gpa == r.gpa && m.user == r.user && m.size == r.size
	})
	if i < 0 {
		return fmt.Errorf("%w: no region of %#x bytes at %#x to remove", errMemory, r.size, r.gpa)
	}
	if t.regions[i].adds--; t.regions[i].adds > 0 {
		return nil
	}
	unmap(t.regions[i].mapping)
	t.regions = slices.Delete(t.regions, i, i+1)
	return nil
}

func (t *memTable) clear() {
	for i := range t.regions {
		unmap(t.regions[i].mapping)
	}
	t.regions = nil
}
