package listener

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// inNetNS runs f as a subtest in a network namespace of its own:
//
//	lo: 127.0.0.1/8 and, unless f's sysctls say otherwise, ::1
//
// The goroutine keeps its thread, which ends with it, and the namespace with
// the thread and the last socket.
func inNetNS(t *testing.T, name string, sysctls map[string]string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			if slices.Contains(strings.Split(os.Getenv("CULVERT_TEST_REQUIRE"), ","), "netns") {
				require.NoError(t, err, "network namespaces are required")
			}
			runtime.UnlockOSThread()
			t.Skipf("no network namespace (%v): run as root, or with CAP_SYS_ADMIN", err)
		}
		for key, value := range sysctls {
			require.NoError(t, os.WriteFile("/proc/sys/net/"+key, []byte(value), 0))
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		defer unix.Close(fd)
		lo, err := unix.NewIfreq("lo")
		require.NoError(t, err)
		require.NoError(t, unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, lo))
		lo.SetUint16(lo.Uint16() | unix.IFF_UP)
		require.NoError(t, unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo))
		f(t)
	})
}
