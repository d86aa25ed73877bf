//go:build linux

package listener

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// recvMsg and sendMsg are recvmsg(2) and sendmsg(2) with packet info (ip(7)
// IP_PKTINFO, ipv6(7) IPV6_PKTINFO). x/sys has them too, but allocates each
// address. All that the kernel is pointed to lies on this goroutine's stack or
// belongs to the caller; it is done with it when the call returns.

// control has room for one message: a header of 16 bytes and the larger of the
// two infos, in6_pktinfo's 20, come to 36, rounded up to 40 as CMSG_SPACE does.
// Words, for the header's alignment.
type control [5]uint64

const headerLen = unix.SizeofCmsghdr

func recvMsg(fd int, b []byte) (n int, client netip.AddrPort, local netip.Addr, trunc bool, err error) {
	var (
		name unix.RawSockaddrInet6 // the larger; an IPv4 socket fills a RawSockaddrInet4
		ctl  control
		iov  unix.Iovec
		hdr  unix.Msghdr
	)
	iov.Base = unsafe.SliceData(b)
	iov.SetLen(len(b))
	hdr.Name = (*byte)(unsafe.Pointer(&name))
	hdr.Namelen = uint32(unsafe.Sizeof(name))
	hdr.Iov = &iov
	hdr.SetIovlen(1)
	hdr.Control = (*byte)(unsafe.Pointer(&ctl))
	hdr.SetControllen(int(unsafe.Sizeof(ctl)))
	r, _, errno := unix.Syscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&hdr)), 0)
	if errno != 0 {
		return 0, netip.AddrPort{}, netip.Addr{}, false, errno
	}
	if name.Family == unix.AF_INET {
		name4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&name))
		client = netip.AddrPortFrom(netip.AddrFrom4(name4.Addr), swap(name4.Port))
	} else {
		client = netip.AddrPortFrom(withScope(netip.AddrFrom16(name.Addr), name.Scope_id), swap(name.Port))
	}
	return int(r), client, localAddr(&ctl, int(hdr.Controllen)), hdr.Flags&unix.MSG_TRUNC != 0, nil
}

// localAddr reads the one control message there can be: no other is switched on.
func localAddr(ctl *control, length int) netip.Addr {
	h := (*unix.Cmsghdr)(unsafe.Pointer(ctl))
	data := unsafe.Add(unsafe.Pointer(ctl), headerLen)
	switch {
	case length >= headerLen+unix.SizeofInet4Pktinfo && h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO:
		// Spec_dst, not Addr: it is the address to answer from, also when the
		// datagram was broadcast.
		return netip.AddrFrom4((*unix.Inet4Pktinfo)(data).Spec_dst)
	case length >= headerLen+unix.SizeofInet6Pktinfo && h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO:
		info := (*unix.Inet6Pktinfo)(data)
		return withScope(netip.AddrFrom16(info.Addr), info.Ifindex)
	}
	return netip.Addr{}
}

func sendMsg(fd int, segs [][]byte, client netip.AddrPort, local netip.Addr) error {
	var (
		name unix.RawSockaddrInet6
		ctl  control
		iovs [64]unix.Iovec // 45 fragments of 1500 bytes make the largest datagram
		hdr  unix.Msghdr
	)
	scope, err := scopeID(client.Addr())
	if err != nil {
		return err
	}
	switch a := client.Addr(); {
	case a.Is4():
		name4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&name))
		name4.Family, name4.Port, name4.Addr = unix.AF_INET, swap(client.Port()), a.As4()
		hdr.Namelen = unix.SizeofSockaddrInet4
	case a.Is6():
		name.Family, name.Port, name.Addr = unix.AF_INET6, swap(client.Port()), a.As16()
		name.Scope_id = scope
		hdr.Namelen = unix.SizeofSockaddrInet6
	default:
		return unix.EAFNOSUPPORT
	}
	hdr.Name = (*byte)(unsafe.Pointer(&name))
	if local.IsValid() {
		n, err := putLocalAddr(&ctl, local)
		if err != nil {
			return err
		}
		hdr.Control = (*byte)(unsafe.Pointer(&ctl))
		hdr.SetControllen(n)
	}
	iov := iovs[:0]
	for _, seg := range segs {
		if len(seg) == 0 {
			continue
		}
		v := unix.Iovec{Base: unsafe.SliceData(seg)}
		v.SetLen(len(seg))
		iov = append(iov, v)
	}
	hdr.Iov = unsafe.SliceData(iov)
	hdr.SetIovlen(len(iov))
	_, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&hdr)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// putLocalAddr writes the control message that sets the source address, and
// returns its length.
func putLocalAddr(ctl *control, local netip.Addr) (int, error) {
	h := (*unix.Cmsghdr)(unsafe.Pointer(ctl))
	data := unsafe.Add(unsafe.Pointer(ctl), headerLen)
	if local.Is4() {
		h.Level, h.Type = unix.IPPROTO_IP, unix.IP_PKTINFO
		h.SetLen(headerLen + unix.SizeofInet4Pktinfo)
		(*unix.Inet4Pktinfo)(data).Spec_dst = local.As4()
		return unix.CmsgSpace(unix.SizeofInet4Pktinfo), nil
	}
	scope, err := scopeID(local)
	if err != nil {
		return 0, err
	}
	h.Level, h.Type = unix.IPPROTO_IPV6, unix.IPV6_PKTINFO
	h.SetLen(headerLen + unix.SizeofInet6Pktinfo)
	info := (*unix.Inet6Pktinfo)(data)
	info.Addr, info.Ifindex = local.As16(), scope
	return unix.CmsgSpace(unix.SizeofInet6Pktinfo), nil
}

// swap turns a port from network byte order to the host's, or back.
func swap(port uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&port))
	return uint16(b[0])<<8 | uint16(b[1])
}
