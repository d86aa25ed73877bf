package socketfile

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// mustBind binds a socket of a type at path, as a program without locks does,
// and returns its descriptor.
func mustBind(t *testing.T, typ int, path string) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, typ|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, Private(uintptr(fd)))
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	if typ != unix.SOCK_DGRAM {
		require.NoError(t, unix.Listen(fd, 1))
	}
	return fd
}

func assertEmpty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func TestClaimBindRelease(t *testing.T) {
	datapathtest.Leaks(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	for range 2 {
		c, err := New(path)
		require.NoError(t, err)
		fd := mustBind(t, unix.SOCK_DGRAM, path)
		require.NoError(t, c.Bound())
		info, err := os.Lstat(path)
		require.NoError(t, err)
		assert.Equal(t, fs.ModeSocket|0o600, info.Mode())
		require.NoError(t, unix.Close(fd))
		require.NoError(t, c.Release())
		require.NoError(t, c.Release())
		assertEmpty(t, dir)
	}
}

// TestFB122StaleReplacedLiveRefused, for each type of socket that may be there.
func TestFB122StaleReplacedLiveRefused(t *testing.T) {
	for name, typ := range map[string]int{"stream": unix.SOCK_STREAM, "dgram": unix.SOCK_DGRAM, "seqpacket": unix.SOCK_SEQPACKET} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			path := filepath.Join(t.TempDir(), "s")
			fd := mustBind(t, typ, path)
			_, err := New(path)
			require.ErrorIs(t, err, ErrInUse)
			require.ErrorContains(t, err, path)
			require.FileExists(t, path)
			require.NoFileExists(t, path+".lock")

			require.NoError(t, unix.Close(fd)) // and leaves its file, as when killed
			require.NoError(t, os.WriteFile(path+".lock", nil, 0o600))
			c, err := New(path)
			require.NoError(t, err)
			require.NoFileExists(t, path)
			require.NoError(t, c.Release())
			require.NoFileExists(t, path+".lock")
		})
	}
}

// TestAskingDoesNotDisturb: a live listener gets no connection from the probe.
func TestAskingDoesNotDisturb(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	fd := mustBind(t, unix.SOCK_STREAM, path)
	defer func() { assert.NoError(t, unix.Close(fd)) }()
	_, err := New(path)
	require.ErrorIs(t, err, ErrInUse)
	require.NoError(t, unix.SetNonblock(fd, true))
	_, _, err = unix.Accept(fd)
	assert.Equal(t, unix.EAGAIN, err)
}

// TestFB116TwoStarts: of many starts at the same moment exactly one wins, each
// time, also while the winner before lets go.
func TestFB116TwoStarts(t *testing.T) {
	datapathtest.Leaks(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	for range 100 {
		var mu sync.Mutex
		var won []*Claim
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				c, err := New(path)
				if err != nil {
					assert.ErrorIs(t, err, ErrInUse)
					return
				}
				mu.Lock()
				won = append(won, c)
				mu.Unlock()
			})
		}
		wg.Wait()
		require.Len(t, won, 1)
		require.NoError(t, won[0].Release())
	}
	var holders sync.Mutex
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				c, err := New(path)
				if err != nil {
					assert.ErrorIs(t, err, ErrInUse)
					continue
				}
				if assert.True(t, holders.TryLock(), "two hold the claim") {
					runtime.Gosched()
					holders.Unlock()
				}
				assert.NoError(t, c.Release())
			}
		})
	}
	wg.Wait()
	assertEmpty(t, dir)
}

// TestReleaseLeavesAnothers: a file that someone else put in place of ours stays.
func TestReleaseLeavesAnothers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	c, err := New(path)
	require.NoError(t, err)
	ours := mustBind(t, unix.SOCK_DGRAM, path)
	require.NoError(t, c.Bound())
	require.NoError(t, os.Remove(path))
	theirs := mustBind(t, unix.SOCK_DGRAM, path)
	require.NoError(t, c.Release())
	assert.FileExists(t, path)
	require.NoError(t, errors.Join(unix.Close(ours), unix.Close(theirs)))
}

func TestWhatIsInTheWay(t *testing.T) {
	datapathtest.Leaks(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("precious"), 0o600))
	_, err := New(file)
	require.ErrorIs(t, err, ErrInUse)
	assert.ErrorContains(t, err, "not a socket")
	assert.FileExists(t, file)

	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(file, link))
	_, err = New(link)
	require.ErrorIs(t, err, ErrInUse)

	_, err = New(filepath.Join(dir, "missing", "s"))
	require.ErrorIs(t, err, fs.ErrNotExist)

	_, err = New(filepath.Join(dir, "a\x00b"))
	require.ErrorContains(t, err, "NUL")
}

// TestFB170PathTooLong: 107 bytes work, lock file and all; 108 are refused with
// the limit named.
func TestFB170PathTooLong(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []int{107, 108, 120} {
		path := filepath.Join(dir, strings.Repeat("x", n))[:n]
		if len(dir)+2 > n {
			t.Skip("the temporary directory's path is too long for this: set TMPDIR to a short one")
		}
		c, err := New(path)
		if n > MaxPath {
			require.ErrorContains(t, err, "limit is 107")
			continue
		}
		require.NoError(t, err)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
		require.NoError(t, err)
		require.NoError(t, l.Close())
		require.NoError(t, c.Release())
	}
}
