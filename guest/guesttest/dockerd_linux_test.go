package guesttest_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/guest/guesttest"
)

// What runs, mounts and cgroups name the bed's directory or group by.
func leftovers(t *testing.T, dir string) []string {
	t.Helper()
	var left []string
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/self/mounts"} {
		paths, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, p := range paths {
			if text, err := os.ReadFile(p); err == nil && strings.Contains(string(text), dir) {
				left = append(left, p+": "+strings.ReplaceAll(string(text), "\x00", " "))
			}
		}
	}
	if _, err := os.Stat(dir); err == nil {
		left = append(left, dir)
	}
	return left
}

func TestDockerdLeavesNothing(t *testing.T) {
	var dir string
	t.Run("life", func(t *testing.T) {
		d := guesttest.NewDockerd(t, guesttest.DockerdOptions{})
		dir = filepath.Dir(d.Socket())
		run := func(name string, more ...string) {
			d.Docker(append(append([]string{"run", "-d", "--name", name, "--stop-timeout", "1"}, more...), guesttest.Image, "sleep", "1000")...)
		}
		names := func() []string { return strings.Fields(d.Docker("ps", "--format", "{{.Names}}")) }
		run("plain")
		run("policy", "--restart", "always", "-p", "8080:80")
		assert.ElementsMatch(t, []string{"plain", "policy"}, names())

		d.Restart()
		assert.Equal(t, []string{"policy"}, names(), "live-restore is off")
		d.Kill()
		_, err := d.TryDocker("ps")
		require.Error(t, err)
		d.Start()
		require.Eventually(t, func() bool { return len(names()) == 1 }, 30*time.Second, 100*time.Millisecond)
		assert.NotEmpty(t, leftovers(t, dir), "or the check below sees nothing")
	})
	if dir == "" {
		t.Skip("dockerd is missing")
	}
	assert.Empty(t, leftovers(t, dir))
	groups, err := filepath.Glob("/sys/fs/cgroup/*/culvert-test-*")
	require.NoError(t, err)
	for _, g := range groups {
		assert.NotContains(t, g, "-"+strconv.Itoa(os.Getpid())+"-")
	}
}
