//go:build linux

package unixgram

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxVec is the most buffers one sendmsg or recvmsg takes (UIO_MAXIOV).
const maxVec = 1024

// A message is the argument of recvmsg(2) and sendmsg(2), kept between calls:
// the functions of x/sys/unix make a new one each time. It holds no buffer after
// reset.
type message struct {
	hdr  unix.Msghdr
	iov  [maxVec]unix.Iovec
	n    int // of iov, in use
	from address
}

// set makes bufs what is sent or filled, as far as maxVec buffers go.
func (m *message) set(bufs [][]byte) {
	for _, b := range bufs[:min(len(bufs), maxVec)] {
		m.iov[m.n].Base = unsafe.SliceData(b)
		m.iov[m.n].SetLen(len(b))
		m.n++
	}
}

// setFirst is set for the first n bytes of bufs, at most maxVec buffers.
func (m *message) setFirst(bufs [][]byte, n int) {
	m.set(bufs)
	for i, b := range bufs {
		k := min(n, len(b))
		m.iov[i].SetLen(k)
		n -= k
	}
}

func (m *message) reset() {
	clear(m.iov[:m.n])
	m.n = 0
}

// recvmsg takes one datagram, without waiting, and its sender into from.
func (m *message) recvmsg(fd uintptr, flags int) (int, error) {
	m.from = address{}
	m.hdr = unix.Msghdr{Name: (*byte)(unsafe.Pointer(&m.from.raw)), Namelen: unix.SizeofSockaddrUnix, Iov: &m.iov[0]}
	m.hdr.SetIovlen(m.n)
	n, err := m.call(unix.SYS_RECVMSG, fd, flags)
	m.from.len = min(m.hdr.Namelen, unix.SizeofSockaddrUnix)
	return n, err
}

// receive is set, recvmsg and reset.
func (m *message) receive(fd uintptr, bufs [][]byte, flags int) (int, error) {
	m.set(bufs)
	defer m.reset()
	return m.recvmsg(fd, flags)
}

// truncated says that the datagram received last was longer than its buffers.
func (m *message) truncated() bool { return m.hdr.Flags&unix.MSG_TRUNC != 0 }

// sendmsg sends one datagram, whole or not at all.
func (m *message) sendmsg(fd uintptr) error {
	m.hdr = unix.Msghdr{Iov: &m.iov[0]}
	m.hdr.SetIovlen(m.n)
	_, err := m.call(unix.SYS_SENDMSG, fd, unix.MSG_NOSIGNAL)
	return err
}

func (m *message) call(trap, fd uintptr, flags int) (int, error) {
	for {
		n, _, errno := unix.Syscall(trap, fd, uintptr(unsafe.Pointer(&m.hdr)), uintptr(flags|unix.MSG_DONTWAIT))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// An address is that of a unix socket as the kernel gives it: a path, an
// abstract name of any bytes, or none. It is kept as it is, since reading it as
// text would lose names with a NUL in them.
type address struct {
	raw unix.RawSockaddrUnix
	len uint32
}

// unspecified is the address that dissolves a connection (connect(2)).
func unspecified() address {
	return address{raw: unix.RawSockaddrUnix{Family: unix.AF_UNSPEC}, len: uint32(unsafe.Sizeof(unix.RawSockaddrUnix{}.Family))}
}

// named says that the socket is bound.
func (a address) named() bool { return a.len > unspecified().len }

// String returns the name, quoted.
func (a address) String() string {
	if !a.named() {
		return "an unbound socket"
	}
	name := unsafe.Slice((*byte)(unsafe.Pointer(&a.raw.Path)), a.len-unspecified().len)
	if last := len(name) - 1; name[0] != 0 && name[last] == 0 {
		name = name[:last] // a path's terminator
	}
	return fmt.Sprintf("%q", name)
}

func connect(fd uintptr, to *address) error {
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&to.raw)), uintptr(to.len))
	if errno != 0 {
		return fmt.Errorf("connect to %s: %w", *to, errno)
	}
	return nil
}
