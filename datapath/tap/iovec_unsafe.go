//go:build linux

package tap

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// readv and writev are unix.Readv and unix.Writev over a list of iovecs that is
// filled once and used again: those make a new one for each call, on the heap
// beyond eight segments. iov must not be empty.

func readv(fd uintptr, iov []unix.Iovec) (int, unix.Errno) {
	n, _, errno := unix.Syscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
	return int(n), errno
}

func writev(fd uintptr, iov []unix.Iovec) (int, unix.Errno) {
	n, _, errno := unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&iov[0])), uintptr(len(iov)))
	return int(n), errno
}
