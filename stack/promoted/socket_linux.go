package promoted

import (
	"io"
	"sync"

	"golang.org/x/sys/unix"
)

// errAgain says that a socket has nothing, or no room.
var errAgain error = unix.EAGAIN

// Supported reports whether this kernel lets a flow look into a client's socket from
// where it has looked last: SO_PEEK_OFF works for TCP since Linux 6.9.
var Supported = sync.OnceValue(func() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0) == nil
})

// read takes bytes from the client's socket; io.EOF is the end of its stream.
func (c *Conn) read(p []byte) (int, error) {
	n, err := received(recv(c.fd, p, 0))
	c.peekOff = max(c.peekOff-n, 0) // as the kernel does
	return n, err
}

// peek looks at the bytes that begin at off in the client's socket, and leaves them.
func (c *Conn) peek(p []byte, off int) (int, error) {
	if !c.peekSet {
		// Urgent data would be a hole that no offset knows of (tcp(7), SO_OOBINLINE).
		if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1); err != nil {
			return 0, err
		}
	}
	if !c.peekSet || c.peekOff != off {
		if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, off); err != nil {
			return 0, err
		}
		c.peekSet, c.peekOff = true, off
	}
	n, err := received(recv(c.fd, p, unix.MSG_PEEK))
	c.peekOff += n
	return n, err
}

// discard takes what the guest has acknowledged from the client's socket.
func (c *Conn) discard() {
	for c.spent > 0 && c.client != nil {
		n, err := received(discard(c.fd, c.spent))
		if err != nil {
			return // it was reset, which a read tells
		}
		c.spent -= n
		c.peekOff = max(c.peekOff-n, 0) // as the kernel does
	}
}

// readFull reads what is known to be there.
func (c *Conn) readFull(p []byte) bool {
	for len(p) > 0 {
		n, err := c.read(p)
		if err != nil {
			return false
		}
		p = p[n:]
	}
	return true
}

// write gives the client what it takes of pieces.
func (c *Conn) write(pieces [][]byte) (int, error) { return send(c.fd, pieces) }

// received gives recv(2)'s answer the meaning of io.Reader's.
func received(n int, err error) (int, error) {
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return max(n, 0), err
}
