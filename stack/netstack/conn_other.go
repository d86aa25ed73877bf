//go:build !linux

package netstack

import (
	"io"
	"syscall"
)

// A rawSocket copies a socket without the fast paths of Linux.
type rawSocket struct{ raw syscall.RawConn }

func (s rawSocket) Read(p []byte) (n int, err error) {
	rerr := s.raw.Read(func(fd uintptr) bool {
		n, err = syscall.Read(int(fd), p)
		return err != syscall.EAGAIN
	})
	if rerr != nil {
		return 0, rerr
	}
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return max(n, 0), err
}

func (s rawSocket) Write(p []byte) (total int, err error) {
	for total < len(p) {
		var n int
		werr := s.raw.Write(func(fd uintptr) bool {
			n, err = syscall.Write(int(fd), p[total:])
			return err != syscall.EAGAIN
		})
		if werr != nil {
			return total, werr
		}
		if err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}

func (c *Conn) readFromSocket(raw syscall.RawConn) (int64, error) {
	return c.readFromReader(rawSocket{raw})
}

func (c *Conn) writeToSocket(raw syscall.RawConn) (int64, error) {
	return c.writeToWriter(rawSocket{raw})
}
