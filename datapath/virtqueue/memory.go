package virtqueue

// Memory resolves guest-physical addresses to the bytes that lie there. It is
// safe for concurrent use.
type Memory interface {
	// Slice returns the bytes at gpa: n of them, n > 0, when they lie in one
	// region of guest memory, else as many as are left in the region that holds
	// gpa, at least one. The caller goes on at gpa+len for the rest, which lies
	// in another region or in none. When gpa itself lies in no region, the
	// error is ErrFault or wraps it.
	//
	// The bytes are the guest's, which writes to them at any time. They are
	// good until the caller lets the memory's owner unmap them.
	Slice(gpa uint64, n uint32) ([]byte, error)
}
