package tap

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// A namespace is the guest's network namespace. A nil namespace is our own.
type namespace struct {
	path     string
	fd       int // on nsfs; open during Open only, for it holds the namespace
	dev, ino uint64
}

// openNamespace opens the namespace that path names; none for an empty path.
func openNamespace(path string) (*namespace, error) {
	if path == "" {
		return nil, nil
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, fmt.Errorf("network namespace %s does not exist: make it with `ip netns add`, or start what it belongs to: %w", path, err)
	case err != nil:
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("stat network namespace %s: %w", path, err)
	}
	return &namespace{path: path, fd: fd, dev: uint64(st.Dev), ino: st.Ino}, nil
}

// do runs f inside the namespace. In one that is not ours it does so on a thread
// that is thrown away: a goroutine that ends without unlocking takes its thread
// with it, so no other goroutine ever runs in the wrong namespace.
func (ns *namespace) do(f func() error) error {
	if ns == nil {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- func() error {
			err := unix.Setns(ns.fd, unix.CLONE_NEWNET)
			switch {
			case errors.Is(err, unix.EINVAL):
				return fmt.Errorf("%s is not a network namespace: %w", ns.path, err)
			case errors.Is(err, unix.EPERM):
				return fmt.Errorf("enter network namespace %s: %w: CAP_SYS_ADMIN is needed", ns.path, err)
			case err != nil:
				return fmt.Errorf("enter network namespace %s: %w", ns.path, err)
			}
			return f()
		}()
	}()
	return <-done
}

// named reports whether the path still names this namespace.
func (ns *namespace) named() bool {
	var st unix.Stat_t
	err := unix.Stat(ns.path, &st)
	return err == nil && uint64(st.Dev) == ns.dev && st.Ino == ns.ino
}

func (ns *namespace) close() {
	if ns != nil {
		_ = unix.Close(ns.fd)
	}
}
