package vhostuser

import (
	"sync/atomic"
	"unsafe"
)

// Both ends of a ring look at these words while they run. Each pair of 16-bit
// fields is one aligned 32-bit word; index_unsafe.go of package virtqueue says
// more.

func loadPair(b []byte) (low, high uint16) {
	v := atomic.LoadUint32((*uint32)(unsafe.Pointer(&b[0])))
	return uint16(v), uint16(v >> 16)
}

func storePair(b []byte, low, high uint16) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&b[0])), uint32(low)|uint32(high)<<16)
}

// fence orders what was stored before against what is loaded after.
func fence() { fenceWord.Store(0); fenceWord.Load() }

var fenceWord atomic.Uint32
