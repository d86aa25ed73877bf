package listener

import (
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// newConn takes over an accepted, non-blocking descriptor; it resets the client
// when it cannot.
func newConn(fd int, listen, remote netip.AddrPort) (*Conn, error) {
	local := listen
	if listen.Addr().IsUnspecified() {
		sa, err := unix.Getsockname(fd)
		if err != nil {
			resetFD(fd)
			return nil, os.NewSyscallError("getsockname", err)
		}
		local = addrPort(sa)
	}
	file := os.NewFile(uintptr(fd), "client")
	c := &Conn{file: file, local: local, remote: remote}
	raw, err := file.SyscallConn()
	if c.raw.file = raw; err == nil {
		err = pollable(file)
	}
	if err != nil { // the user's epoll watches have run out (epoll(7), max_user_watches)
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		file.Close()
		return nil, fmt.Errorf("poll client: %w", err)
	}
	return c, nil
}

// goneFD asks poll(2) for what it always tells. A reset leaves the socket
// closed, POLLHUP, with its error, POLLERR. A FIN is POLLRDHUP and POLLIN, and
// not asked for.
func goneFD(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	for {
		n, err := unix.Poll(p, 0)
		if err != unix.EINTR {
			return n > 0 && p[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
		}
	}
}

func (c *Conn) shutdownRead() error {
	return c.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_RD) })
}

func (c *Conn) shutdownWrite() error {
	return c.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

func (c *Conn) keepAlive() error {
	return c.control(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1) })
}

// endInOrder makes close(2) end the stream instead of resetting it, as sockets
// do unless told otherwise (socket(7), SO_LINGER).
func (c *Conn) endInOrder() {
	_ = c.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
	})
}

func (c *Conn) control(f func(fd int) error) error {
	var err error
	if closed := c.raw.Control(func(fd uintptr) { err = f(int(fd)) }); closed != nil {
		return closed
	}
	return err
}
