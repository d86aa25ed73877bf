//go:build linux

package listener

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// accept4 takes a client (accept4(2)), without a wait. x/sys has a call that asks the
// socket for its protocol each time.
func accept4(fd int) (int, netip.AddrPort, error) {
	var name unix.RawSockaddrInet6 // the larger; an IPv4 socket fills a RawSockaddrInet4
	size := uint32(unsafe.Sizeof(name))
	client, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(&name)), uintptr(unsafe.Pointer(&size)),
		unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, netip.AddrPort{}, errno
	}
	return int(client), nameOf(&name), nil
}

// nameOf reads an address of the kernel's.
func nameOf(name *unix.RawSockaddrInet6) netip.AddrPort {
	if name.Family == unix.AF_INET {
		name4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
		return netip.AddrPortFrom(netip.AddrFrom4(name4.Addr), swap(name4.Port))
	}
	return netip.AddrPortFrom(withScope(netip.AddrFrom16(name.Addr), name.Scope_id), swap(name.Port))
}
