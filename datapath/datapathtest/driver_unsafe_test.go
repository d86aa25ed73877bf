package datapathtest

import "unsafe"

// within reports whether b is a part of whole, in the same memory.
func within(b, whole []byte) bool {
	off := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - uintptr(unsafe.Pointer(unsafe.SliceData(whole)))
	return off <= uintptr(len(whole)) && off+uintptr(len(b)) <= uintptr(len(whole))
}
