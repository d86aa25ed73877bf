//go:build linux

package listener

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawReader and rawSender are recvmmsg(2) and sendmmsg(2) with packet info (ip(7)
// IP_PKTINFO, ipv6(7) IPV6_PKTINFO) and merged datagrams (udp(7)). x/sys has
// neither call. All that the kernel is pointed to lies in the two, on the heap,
// or belongs to the caller; it is done with it when the call returns.

// control has room for two messages: a header of 16 bytes and the larger of the
// two infos, in6_pktinfo's 20, come to 36, rounded up to 40 as CMSG_SPACE does;
// a header and a size, of 2 bytes to the kernel and 4 from it, to 24. Words, for
// the header's alignment.
type control [8]uint64

const headerLen = unix.SizeofCmsghdr

type rawReader struct {
	headers  [readBatch]unix.Mmsghdr
	iovs     [readBatch]unix.Iovec
	names    [readBatch]unix.RawSockaddrInet6 // the larger; an IPv4 socket fills a RawSockaddrInet4
	controls [readBatch]control
	memory   []byte
}

func newRawReader() *rawReader {
	r := &rawReader{memory: make([]byte, readBatch*readStride)}
	for i := range r.headers {
		r.iovs[i].Base = &r.memory[i*readStride]
		r.iovs[i].SetLen(readStride)
		h := &r.headers[i].Hdr
		h.Name = (*byte)(unsafe.Pointer(&r.names[i]))
		h.Iov = &r.iovs[i]
		h.SetIovlen(1)
		h.Control = (*byte)(unsafe.Pointer(&r.controls[i]))
		r.arm(i)
	}
	return r
}

// arm makes header i fit for another call, which overwrites these.
func (r *rawReader) arm(i int) {
	h := &r.headers[i].Hdr
	h.Namelen = uint32(unsafe.Sizeof(r.names[i]))
	h.SetControllen(int(unsafe.Sizeof(r.controls[i])))
}

// recv takes what is there.
func (r *rawReader) recv(fd int, messages *[readBatch]Message) (int, error) {
	got, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&r.headers)), readBatch, 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	for i := range int(got) {
		h, m := &r.headers[i], &messages[i]
		name := &r.names[i]
		if name.Family == unix.AF_INET {
			name4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
			m.Client = netip.AddrPortFrom(netip.AddrFrom4(name4.Addr), swap(name4.Port))
		} else {
			m.Client = netip.AddrPortFrom(withScope(netip.AddrFrom16(name.Addr), name.Scope_id), swap(name.Port))
		}
		n := int(h.Len)
		m.Data = r.memory[i*readStride:][:n:n]
		m.Local, m.Size = parseControl(&r.controls[i], int(h.Hdr.Controllen))
		if m.Size <= 0 {
			m.Size = max(n, 1)
		}
		r.arm(i)
	}
	return int(got), nil
}

// parseControl reads the control messages that are switched on.
func parseControl(ctl *control, length int) (local netip.Addr, size int) {
	for at := 0; at+headerLen <= length; {
		h := (*unix.Cmsghdr)(unsafe.Add(unsafe.Pointer(ctl), at))
		data := unsafe.Add(unsafe.Pointer(ctl), at+headerLen)
		n := int(h.Len)
		if n < headerLen || at+n > length {
			break
		}
		switch n -= headerLen; {
		case n >= unix.SizeofInet4Pktinfo && h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO:
			// Spec_dst, not Addr: it is the address to answer from, also when the
			// datagram was broadcast.
			local = netip.AddrFrom4((*unix.Inet4Pktinfo)(data).Spec_dst)
		case n >= unix.SizeofInet6Pktinfo && h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO:
			info := (*unix.Inet6Pktinfo)(data)
			local = withScope(netip.AddrFrom16(info.Addr), info.Ifindex)
		case n >= 4 && h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO:
			size = int(*(*int32)(data))
		}
		at += unix.CmsgSpace(n)
	}
	return local, size
}

type rawSender struct {
	name     unix.RawSockaddrInet6
	nameLen  uint32
	info     control // packet info, the same for all
	infoLen  int
	headers  [maxMerged]unix.Mmsghdr
	counts   [maxMerged]int // datagrams in each
	iovs     [2 * maxMerged]unix.Iovec
	controls [maxMerged]control
}

// address sets where to and where from, before any send.
func (s *rawSender) address(client netip.AddrPort, local netip.Addr) error {
	scope, err := scopeID(client.Addr())
	if err != nil {
		return err
	}
	s.name = unix.RawSockaddrInet6{}
	switch a := client.Addr(); {
	case a.Is4():
		name4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&s.name))
		name4.Family, name4.Port, name4.Addr = unix.AF_INET, swap(client.Port()), a.As4()
		s.nameLen = unix.SizeofSockaddrInet4
	case a.Is6():
		s.name.Family, s.name.Port, s.name.Addr = unix.AF_INET6, swap(client.Port()), a.As16()
		s.name.Scope_id = scope
		s.nameLen = unix.SizeofSockaddrInet6
	default:
		return unix.EAFNOSUPPORT
	}
	s.info, s.infoLen = control{}, 0
	if local.IsValid() {
		s.infoLen, err = putLocalAddr(&s.info, local)
	}
	return err
}

// send hands over as many datagrams as one call takes. The error, of the first
// that was not sent, says with merged that several were to go as one there.
func (s *rawSender) send(fd int, datagrams [][2][]byte, limit int) (sent int, merged bool, err error) {
	datagrams = datagrams[:min(len(datagrams), maxMerged)] // two iovecs each
	n, iovs := 0, 0
	for ; len(datagrams) > 0; n++ {
		count := mergeable(datagrams, limit)
		s.counts[n] = count
		h := &s.headers[n].Hdr
		h.Name, h.Namelen = (*byte)(unsafe.Pointer(&s.name)), s.nameLen
		first := iovs
		for _, d := range datagrams[:count] {
			for _, piece := range d {
				if len(piece) > 0 {
					s.iovs[iovs].Base = unsafe.SliceData(piece)
					s.iovs[iovs].SetLen(len(piece))
					iovs++
				}
			}
		}
		h.Iov = nil
		if iovs > first {
			h.Iov = &s.iovs[first]
		}
		h.SetIovlen(iovs - first)
		s.putControl(n, lengthOf(datagrams[0]))
		datagrams = datagrams[count:]
	}
	done, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&s.headers)), uintptr(n), 0, 0, 0)
	clear(s.iovs[:iovs]) // the memory is the caller's again
	if errno != 0 {
		return 0, s.counts[0] > 1, errno
	}
	for _, count := range s.counts[:done] {
		sent += count
	}
	return sent, false, nil
}

// putControl makes message n's control messages: packet info, and the length of
// the datagrams to cut it into, if there are several.
func (s *rawSender) putControl(n, size int) {
	h := &s.headers[n].Hdr
	ctl, length := &s.controls[n], s.infoLen
	*ctl = s.info
	if s.counts[n] > 1 {
		c := (*unix.Cmsghdr)(unsafe.Add(unsafe.Pointer(ctl), length))
		c.Level, c.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
		c.SetLen(headerLen + 2)
		*(*uint16)(unsafe.Add(unsafe.Pointer(c), headerLen)) = uint16(size)
		length += unix.CmsgSpace(2)
	}
	h.Control = nil
	if length > 0 {
		h.Control = (*byte)(unsafe.Pointer(ctl))
	}
	h.SetControllen(length)
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
