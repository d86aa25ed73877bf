package api

import (
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// peerAllowed reports whether c's other end is the daemon's own user or root
// (unix(7), SO_PEERCRED). The socket's mode says the same; this holds also when
// somebody changed it.
func peerAllowed(c net.Conn) bool {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return false
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return false
	}
	allowed := false
	err = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		allowed = err == nil && (cred.Uid == 0 || int(cred.Uid) == os.Geteuid())
	})
	return err == nil && allowed
}
