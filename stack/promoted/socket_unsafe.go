//go:build linux

package promoted

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// None of these calls waits: the sockets are non-blocking. So none tells the
// scheduler of itself, which costs more than it takes.

// recv receives from a socket (recv(2)).
func recv(fd int, p []byte, flags int) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
			uintptr(flags|unix.MSG_DONTWAIT), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// discard takes n bytes that are there from a socket and copies none (tcp(7),
// MSG_TRUNC).
func discard(fd, n int) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), 0, uintptr(n), unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// send sends pieces, 2*maxGathered at most, to a socket (sendmsg(2)).
func send(fd int, pieces [][]byte) (int, error) {
	var iov [2 * maxGathered]unix.Iovec
	for i, p := range pieces {
		iov[i] = iovec(p)
	}
	msg := unix.Msghdr{Iov: &iov[0]}
	msg.SetIovlen(len(pieces))
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// iovec describes p.
func iovec(p []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(p)}
	v.SetLen(len(p))
	return v
}

// epollWait returns which of an epoll set's descriptors have events, without waiting,
// and a negative number for a set that is no more (epoll_wait(2)).
func epollWait(epfd int, events []unix.EpollEvent) int {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), 0, 0, 0)
		switch errno {
		case 0:
			return int(n)
		case unix.EINTR:
		default:
			return -1
		}
	}
}
