package vhostuser

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// mapShared maps a descriptor from its start up to end: not each one's memory
// (huge pages) can be mapped from any offset. The memory is the guest's and so
// shared; none is set aside for what it has not touched.
func mapShared(fd int, end uint64) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("look at its descriptor: %w", err)
	}
	// A page beyond the file's end faults when it is touched. A file can still be
	// cut short later; that is for whoever touches it to survive.
	if st.Mode&unix.S_IFMT == unix.S_IFREG && (st.Size < 0 || end > uint64(st.Size)) {
		return nil, fmt.Errorf("its file has %d bytes, the region ends at %d", st.Size, end)
	}
	// mmap(2) rounds up to a page, of whatever size the file's are, but munmap(2)
	// wants a whole number of huge ones. st_blksize is that size where it matters.
	length := end
	if page := uint64(st.Blksize); page > 0 && page&(page-1) == 0 && end <= math.MaxUint64-page {
		length = (end + page - 1) &^ (page - 1)
	}
	if length > math.MaxInt {
		return nil, fmt.Errorf("%d bytes do not fit this system's address space", length)
	}
	return unix.Mmap(fd, 0, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
}

func unmap(mapping []byte) { _ = unix.Munmap(mapping) }
