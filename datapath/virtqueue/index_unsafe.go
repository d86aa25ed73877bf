package virtqueue

import (
	"sync/atomic"
	"unsafe"
)

// The fields that both ends look at while they run are 16 bits wide, and Go has
// no 16-bit atomics. What there is suffices, without assembly:
//
//   - used flags and index are one aligned 32-bit word (the used ring is aligned
//     to 4), and the device writes both halves. One 32-bit atomic store.
//   - The available index always shares an aligned word inside its own part
//     with something else: with the flags before it where the ring is aligned
//     to 4, with ring[0] behind it where it is aligned to 2 only. We only read
//     it. One 32-bit atomic load, and a shift.
//   - avail_event is aligned to 4, but it is the last thing in the used ring:
//     the two bytes behind it belong to someone else. It has to be stored as 16
//     bits. used_event ends the available ring likewise, and is read as 16 bits
//     lest the read leave its part. Both are plain accesses, which amd64 and
//     arm64 make in one piece when they are aligned; their order comes from the
//     barriers around them.
//
// What the instructions promise:
//
//   - atomic load: acquire. MOV on amd64, LDAR on arm64.
//   - atomic store: release, and on amd64 a full barrier. XCHG, STLR.
//   - atomic store, then atomic load, of whatever words: full barrier. On arm64
//     everything before STLR is observed before it, LDAR is not performed before
//     an STLR that precedes it in program order, and nothing after LDAR is
//     performed before it (Arm ARM, B2.3, barrier-ordered-before). An atomic
//     exchange alone would not do: without LSE it is LDAXR and STLXR, and a
//     plain load may pass the STLXR.
//
// The compiler keeps the order of memory accesses around an atomic and does not
// repeat a load. Go's memory model promises order between atomics only; the
// guest is outside of it in any case.
//
// The race detector sees the 32-bit atomics and so checks that they order
// everything else: descriptors, used entries, what chains hold. load16 and
// store16 are hidden from it. With a driver in the same process it would report
// the event indexes, which race on purpose, and available entries, of which
// ring[0] may be read along with the index.

// word returns the four bytes of b at off as one word. off is aligned to 4.
func word(b []byte, off int) *uint32 {
	return (*uint32)(unsafe.Pointer(unsafe.SliceData(b[off : off+4])))
}

// half returns the two bytes of b at off as one half word. off is aligned to 2.
func half(b []byte, off int) *uint16 {
	return (*uint16)(unsafe.Pointer(unsafe.SliceData(b[off : off+2])))
}

// aligned reports whether b lies on a multiple of n bytes.
func aligned(b []byte, n uintptr) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%n == 0
}

//go:norace
func load16(p *uint16) uint16 { return *p }

//go:norace
func store16(p *uint16, v uint16) { *p = v }

// shared is what both ends look at while they run.
type shared struct {
	availWord  *uint32 // holds the available index
	availShift uint    // by how many bits
	availFlags *uint16
	usedEvent  *uint16 // in the available ring: when the driver wants a call
	usedWord   *uint32 // flags, index << 16
	availEvent *uint16 // in the used ring: when we want a kick

	fence atomic.Uint32 // for barriers only; its value means nothing
}

func (s *shared) init(r Vring) {
	if aligned(r.Avail, 4) {
		s.availWord, s.availShift = word(r.Avail, availFlags), 16 // flags, idx
	} else {
		s.availWord, s.availShift = word(r.Avail, availIdx), 0 // idx, ring[0]
	}
	s.availFlags = half(r.Avail, availFlags)
	s.usedEvent = half(r.Avail, availRing+availElem*int(r.Num))
	s.usedWord = word(r.Used, usedFlags)
	s.availEvent = half(r.Used, usedRing+usedElem*int(r.Num))
}

// loadAvail reads the available index. Entries and descriptors that it covers
// are read after it (acquire).
func (s *shared) loadAvail() uint16 {
	return uint16(atomic.LoadUint32(s.availWord) >> s.availShift)
}

// storeUsed writes flags and index of the used ring. Everything written before
// is seen no later than they are (release), and nothing after it is read before
// they are seen (full barrier).
func (s *shared) storeUsed(flags, idx uint16) {
	atomic.StoreUint32(s.usedWord, uint32(flags)|uint32(idx)<<16)
	s.fence.Load()
}

// storeAvailEvent writes avail_event. Nothing after it is read before it is
// seen (full barrier).
func (s *shared) storeAvailEvent(idx uint16) {
	store16(s.availEvent, idx)
	s.fence.Store(0)
	s.fence.Load()
}
