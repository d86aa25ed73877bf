package virtqueue

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// MaxNum is the largest queue size, in descriptors (virtio 1.3, 2.7).
const MaxNum = 32768

// Offsets and sizes in bytes (virtio 1.3, 2.7.5, 2.7.6 and 2.7.8).
const (
	descSize = 16 // le64 addr, le32 len, le16 flags, le16 next

	availFlags = 0 // le16
	availIdx   = 2 // le16
	availRing  = 4 // le16 each, then le16 used_event
	availElem  = 2

	usedFlags = 0 // le16
	usedIdx   = 2 // le16
	usedRing  = 4 // le32 id, le32 len each, then le16 avail_event
	usedElem  = 8
)

// Alignments in bytes (virtio 1.3, 2.7).
const (
	descAlign  = 16
	availAlign = 2
	usedAlign  = 4
)

// DescSize returns the size in bytes of the descriptor table of a queue of num
// descriptors.
func DescSize(num uint16) int { return descSize * int(num) }

// AvailSize returns the size in bytes of the available ring, used_event
// included.
func AvailSize(num uint16) int { return availRing + availElem*int(num) + 2 }

// UsedSize returns the size in bytes of the used ring, avail_event included.
func UsedSize(num uint16) int { return usedRing + usedElem*int(num) + 2 }

// A Vring is where the three parts of a queue lie in our address space.
type Vring struct {
	// Num is the queue size in descriptors: a power of two, 1 to MaxNum.
	Num uint16
	// Desc is the descriptor table, DescSize(Num) bytes, aligned to 16. We only
	// read it.
	Desc []byte
	// Avail is the available ring (driver area), AvailSize(Num) bytes, aligned
	// to 2. We only read it.
	Avail []byte
	// Used is the used ring (device area), UsedSize(Num) bytes, aligned to 4.
	// Only we write it.
	Used []byte
}

// UsedIndex returns the used index that lies in the ring now: how many chains
// the device has returned so far, modulo 65536. A device that returns chains in
// order may resume there. The ring has to be one that New accepts.
func (r Vring) UsedIndex() uint16 { return binary.LittleEndian.Uint16(r.Used[usedIdx:]) }

// check refuses a ring that New could not work with. Alignment is that of our
// own addresses: a mapping is aligned to pages, so that they have it when the
// guest-physical addresses do.
func (r Vring) check() error {
	if r.Num == 0 || r.Num > MaxNum || r.Num&(r.Num-1) != 0 {
		return fmt.Errorf("queue size %d is no power of two up to %d", r.Num, MaxNum)
	}
	for _, part := range []struct {
		name  string
		bytes []byte
		size  int
		align uintptr
	}{
		{"descriptor table", r.Desc, DescSize(r.Num), descAlign},
		{"available ring", r.Avail, AvailSize(r.Num), availAlign},
		{"used ring", r.Used, UsedSize(r.Num), usedAlign},
	} {
		if len(part.bytes) != part.size {
			return fmt.Errorf("%s of %d entries has %d bytes, not %d", part.name, r.Num, len(part.bytes), part.size)
		}
		if !aligned(part.bytes, part.align) {
			return fmt.Errorf("%s is not aligned to %d bytes", part.name, part.align)
		}
	}
	// The ring's indexes are little-endian and accessed as words.
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return fmt.Errorf("big-endian host: %w", errors.ErrUnsupported)
	}
	return nil
}
