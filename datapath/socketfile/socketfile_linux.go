package socketfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// A Claim is the right to bind at a path, until Release. Its methods are safe
// for concurrent use.
type Claim struct {
	path string

	mu    sync.Mutex
	lock  *os.File    // nil after Release
	bound os.FileInfo // the socket file, once Bound
}

// New claims path, whose length the caller has checked against MaxPath, and
// removes a stale socket file there. The error is ErrInUse, with who or what is
// in the way, or that of opening the lock file: a directory that is missing
// (fs.ErrNotExist) or not writable (fs.ErrPermission).
func New(path string) (*Claim, error) {
	if len(path) > MaxPath {
		return nil, fmt.Errorf("unix socket path %q is %d bytes long, the limit is %d", path, len(path), MaxPath)
	}
	if strings.IndexByte(path, 0) >= 0 {
		return nil, fmt.Errorf("unix socket path %q has a NUL in it", path)
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", path, err)
	}
	c := &Claim{path: path, lock: lock}
	if err := c.clear(); err != nil {
		return nil, errors.Join(fmt.Errorf("claim %s: %w", path, err), c.Release())
	}
	return c, nil
}

// lockFile opens and locks the file at path and makes sure that it is still the
// file at path.
func lockFile(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if err == unix.EWOULDBLOCK {
				return nil, fmt.Errorf("%w: a live process holds the lock %s", ErrInUse, path)
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if sameFile(f, path) {
			return f, nil
		}
		_ = f.Close() // its last holder removed it before we had the lock
	}
}

func sameFile(f *os.File, path string) bool {
	ours, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(ours, there)
}

// clear removes a stale socket file.
func (c *Claim) clear() error {
	info, err := os.Lstat(c.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%w: what is there is not a socket (%s)", ErrInUse, info.Mode())
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open probe: %w", err)
	}
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: c.path})
	_ = unix.Close(fd)
	switch err {
	case unix.ECONNREFUSED:
		return os.Remove(c.path)
	case nil, unix.EPROTOTYPE, unix.EAGAIN:
		return fmt.Errorf("%w: a live process is bound to it", ErrInUse)
	}
	return fmt.Errorf("probe who is bound to it: %w", err)
}

// Bound notes that the claim's holder has bound its socket, and so which file
// Release is to remove.
func (c *Claim) Bound() error {
	info, err := os.Lstat(c.path)
	if err != nil {
		return fmt.Errorf("find bound socket: %w", err)
	}
	c.mu.Lock()
	c.bound = info
	c.mu.Unlock()
	return nil
}

// Release removes the socket file, if it is still the one of Bound, and the lock
// file, and gives up the claim. Releasing again does nothing and returns nil.
func (c *Claim) Release() (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lock == nil {
		return nil
	}
	if c.bound != nil {
		there, statErr := os.Lstat(c.path)
		if statErr == nil && os.SameFile(c.bound, there) {
			err = os.Remove(c.path)
		}
	}
	if sameFile(c.lock, c.path+".lock") {
		err = errors.Join(err, os.Remove(c.path+".lock"))
	}
	err = errors.Join(err, c.lock.Close())
	c.lock = nil
	return err
}

// Private sets the mode of a socket that is not yet bound to 0600, which its
// file gets at bind(2): there is no moment when others could open it.
func Private(fd uintptr) error {
	if err := unix.Fchmod(int(fd), 0o600); err != nil {
		return fmt.Errorf("make socket private: %w", err)
	}
	return nil
}
