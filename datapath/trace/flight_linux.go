package trace

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapFile makes a file of size bytes, of which every page is really there: one
// that the disk has no room for would end the process when it is first touched
// (mmap(2), SIGBUS).
func mapFile(path string, size int) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		_ = os.Remove(path)
		return nil, os.NewSyscallError("fallocate", err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = os.Remove(path)
		return nil, os.NewSyscallError("mmap", err)
	}
	return mem, nil
}

func unmap(mem []byte) error { return os.NewSyscallError("munmap", unix.Munmap(mem)) }
