//go:build linux

package netstack

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// iovec describes p to writev(2).
func iovec(p []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(p)}
	v.SetLen(len(p))
	return v
}

// writev writes what vecs describe. Their memory is the caller's to keep alive.
func writev(fd int, vecs []unix.Iovec) (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(vecs))), uintptr(len(vecs)))
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}
