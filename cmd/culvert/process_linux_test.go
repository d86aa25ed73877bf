package main_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestProcess is the daemon as systemd runs it: told of each state
// (sd_notify(3)), sent SIGHUP and SIGTERM (C-51).
func TestProcess(t *testing.T) {
	d := newDaemon(t, "unixgram:"+filepath.Join(shortTempDir(t), "vm.sock"), []string{"0:80"})
	dir := filepath.Dir(d.api)
	config := filepath.Join(dir, "culvert.yaml")
	before, err := os.ReadFile(config)
	require.NoError(t, err)

	notified := filepath.Join(shortTempDir(t), "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notified, Net: "unixgram"})
	require.NoError(t, err)
	defer systemd.Close()
	told := func(want string) {
		t.Helper()
		buf := make([]byte, 4096)
		require.NoError(t, systemd.SetReadDeadline(time.Now().Add(20*time.Second)))
		n, err := systemd.Read(buf)
		require.NoError(t, err, "waiting for %s\n%s", want, d.logs.tail(10))
		require.True(t, strings.HasPrefix(string(buf[:n]), want), "%q", buf[:n])
	}
	t.Setenv("NOTIFY_SOCKET", notified) // which start hands on
	d.start(t)
	require.NoError(t, os.Unsetenv("NOTIFY_SOCKET")) // t.Setenv restores it
	told("READY=1")

	// All the descriptors there are.
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", d.cmd.Process.Pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(limits)) {
		if fields := strings.Fields(line); strings.HasPrefix(line, "Max open files") {
			require.Equal(t, fields[4], fields[3], line)
		}
	}

	// A broken config changes nothing, and says where.
	require.NoError(t, os.WriteFile(config, []byte("nonsense: 1\n"), 0o600))
	require.NoError(t, d.cmd.Process.Signal(syscall.SIGHUP))
	told("RELOADING=1\nMONOTONIC_USEC=")
	told("READY=1")
	require.Eventually(t, func() bool { return strings.Contains(d.logs.String(), "culvert.yaml:1:1: unknown field") },
		10*time.Second, 10*time.Millisecond, "its log comes by a pipe")
	require.Len(t, d.ls(t), 1)
	out, code := d.cli("daemon", "--config", config)
	require.Equal(t, 2, code, out)
	require.Contains(t, out, "    nonsense: 1\n    ^")

	// A second daemon is refused, and the first goes on.
	require.NoError(t, os.WriteFile(config, before, 0o600))
	out, code = d.cli("daemon", "--config", config)
	require.Equal(t, 1, code)
	require.Contains(t, out, "another daemon owns "+d.api)
	require.Len(t, d.ls(t), 1)

	pid := d.cmd.Process.Pid
	d.stop(t)
	told("STOPPING=1")
	require.Error(t, syscall.Kill(pid, 0))
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "the config alone")

	// Killed in the middle, it leaves its socket behind; the next one takes it.
	d.start(t)
	d.kill()
	require.FileExists(t, d.api)
	d.start(t)
	d.stop(t)
}

// TestInterrupted is a command that waits when ^C comes: it ends at once, and
// not by the signal.
func TestInterrupted(t *testing.T) {
	d := newDaemon(t, "unixgram:"+filepath.Join(shortTempDir(t), "vm.sock"), nil)
	d.start(t)
	cmd := exec.Command(d.binary, "wait", "--api", d.api, "--timeout", "1h")
	said := new(console)
	cmd.Stderr = said
	require.NoError(t, cmd.Start())
	// It waits when its connection is there.
	require.Eventually(t, func() bool {
		fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", cmd.Process.Pid))
		for _, fd := range fds {
			if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", cmd.Process.Pid, fd.Name())); strings.HasPrefix(to, "socket:") {
				return true
			}
		}
		return false
	}, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	_ = cmd.Wait()
	require.Equal(t, 1, cmd.ProcessState.ExitCode(), said.String())
	require.Equal(t, "culvert: interrupted\n", said.String())
	d.stop(t)
}
