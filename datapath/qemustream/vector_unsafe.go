//go:build linux

package qemustream

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// A vector is the argument of readv(2) and writev(2), kept between calls: the
// functions of x/sys/unix make a new one each time. It holds no buffer after a
// call.
type vector struct{ iov [maxVec]unix.Iovec }

func (v *vector) readv(fd uintptr, bufs [][]byte) (int, error) {
	return v.call(unix.SYS_READV, fd, bufs)
}

func (v *vector) writev(fd uintptr, bufs [][]byte) (int, error) {
	return v.call(unix.SYS_WRITEV, fd, bufs)
}

// call hands at most maxVec buffers, none empty, to the kernel.
func (v *vector) call(trap, fd uintptr, bufs [][]byte) (int, error) {
	iov := v.iov[:len(bufs)]
	for i, b := range bufs {
		iov[i].Base = unsafe.SliceData(b)
		iov[i].SetLen(len(b))
	}
	defer clear(iov)
	for {
		n, _, errno := unix.Syscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
