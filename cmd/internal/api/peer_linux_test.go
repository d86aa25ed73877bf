package api

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// connectAs connects to socket as another user. Credentials are a thread's own
// in the kernel; this one is thrown away.
func connectAs(t *testing.T, socket string, uid int) int {
	t.Helper()
	type result struct {
		fd  int
		err error
	}
	got := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			// The system call itself: the package's function sets all threads'.
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
				err = errno
			}
		}
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		}
		got <- result{fd, err}
	}()
	r := <-got
	require.NoError(t, r.err)
	t.Cleanup(func() { _ = unix.Close(r.fd) })
	return r.fd
}

// TestPeerAllowed has a socket whose mode somebody has opened to all: another
// user is still not let in.
func TestPeerAllowed(t *testing.T) {
	datapathtest.Require(t, "root", os.Geteuid() == 0, "run the test as root")
	c := serve(t, &fake{})
	require.NoError(t, os.Chmod(c.socket, 0o666))
	require.NoError(t, os.Chmod(filepath.Dir(c.socket), 0o755))

	_, err := c.VMs(t.Context())
	require.NoError(t, err, "our own user is")

	const nobody = 65534
	fd := connectAs(t, c.socket, nobody)
	n, err := unix.Read(fd, make([]byte, 1))
	assert.Zero(t, n, "it is hung up on")
	assert.NoError(t, err)

	assert.False(t, peerAllowed(new(net.TCPConn)))
}
