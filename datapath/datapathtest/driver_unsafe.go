package datapathtest

import (
	"sync/atomic"
	"unsafe"
)

// The driver's side of what virtqueue/index_unsafe.go does on the device's, by
// the same rules: an index is accessed as an aligned 32-bit word of which the
// driver owns both halves (or only reads), an event index as 16 bits that the
// race detector does not see, and an atomic store followed by an atomic load is
// a full barrier.

func word(b []byte, off int) *uint32 {
	return (*uint32)(unsafe.Pointer(unsafe.SliceData(b[off : off+4])))
}

//go:norace
func load16(b []byte, off int) uint16 {
	return *(*uint16)(unsafe.Pointer(unsafe.SliceData(b[off : off+2])))
}

//go:norace
func store16(b []byte, off int, v uint16) {
	*(*uint16)(unsafe.Pointer(unsafe.SliceData(b[off : off+2]))) = v
}

// storeBytes writes b at off without the race detector's knowledge: for a driver
// that changes what it has handed over.
//
//go:norace
func storeBytes(dst []byte, off int, b ...byte) {
	for i, v := range b {
		dst[off+i] = v
	}
}

// fence is a word for barriers.
var fence atomic.Uint32

// storeAvail writes flags and index of the available ring; everything written
// before is seen no later, and nothing after it is read before it is seen.
func storeAvail(avail []byte, flags, idx uint16) {
	if uintptr(unsafe.Pointer(unsafe.SliceData(avail)))%4 == 0 {
		atomic.StoreUint32(word(avail, 0), uint32(flags)|uint32(idx)<<16)
	} else { // aligned to 2: the index shares its word with ring[0]
		store16(avail, 0, flags)
		atomic.StoreUint32(word(avail, 2), uint32(idx)|uint32(load16(avail, 4))<<16)
	}
	fence.Load()
}

// loadUsed reads flags and index of the used ring; what they cover is read after.
func loadUsed(used []byte) (flags, idx uint16) {
	w := atomic.LoadUint32(word(used, 0))
	return uint16(w), uint16(w >> 16)
}

// storeUsedEvent writes used_event at off; nothing after it is read before it is
// seen.
func storeUsedEvent(avail []byte, off int, idx uint16) {
	store16(avail, off, idx)
	fence.Store(0)
	fence.Load()
}
