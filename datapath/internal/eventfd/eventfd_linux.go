package eventfd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// New makes an eventfd, the caller's to close.
func New() (fd int, err error) {
	fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("make eventfd: %w", err)
	}
	return fd, nil
}

// A Kick is the end that is waited for. One goroutine waits at a time; the other
// methods are safe for concurrent use.
//
// It relies on edges, not on the counter: the runtime registers a descriptor
// edge-triggered, and each write to an eventfd makes an edge, read or not
// (eventfd(2), epoll(7)). So waiting costs no read, a counter left high costs
// nothing, and a descriptor that is always readable cannot make us spin. A pipe
// would fill up unread: what has come of it is thrown away after each wait.
type Kick struct {
	file *os.File
	raw  syscall.RawConn
	pipe bool

	// One Wait's argument and progress, and the function that RawConn calls with
	// them, made once: a closure a call would be an allocation a call.
	ready func() bool
	woken bool
	try   func(fd uintptr) bool
}

// NewKick takes over fd, which it closes too when it returns an error, as it
// does for a descriptor that cannot be polled.
func NewKick(fd int) (*Kick, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make kick non-blocking: %w", err), unix.Close(fd))
	}
	k := &Kick{file: os.NewFile(uintptr(fd), "kick"), pipe: st.Mode&unix.S_IFMT == unix.S_IFIFO}
	err = k.file.SetReadDeadline(time.Time{}) // refused off the poller
	if err == nil {
		k.raw, err = k.file.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("put kick on the poller: %w", err), k.file.Close())
	}
	k.try = k.tryWait
	return k, nil
}

// Wait returns after a kick, an Interrupt or Close: nil, except ErrClosed after
// the last. A kick that came before Wait is not waited for, and not seen: ready,
// called once when a kick from then on would be seen, looks whether there is
// something to do already and so no reason to wait.
func (k *Kick) Wait(ready func() bool) error {
	k.ready, k.woken = ready, false
	err := k.raw.Read(k.try)
	k.ready = nil
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		_ = k.file.SetReadDeadline(time.Time{}) // closed: the next Wait says so
		return nil
	}
	return os.ErrClosed // or of no use any more, which is the same
}

func (k *Kick) tryWait(fd uintptr) bool {
	if k.woken {
		if k.pipe {
			var b [512]byte
			_, _ = unix.Read(int(fd), b[:])
		}
		return true
	}
	k.woken = true
	return k.ready()
}

// Interrupt ends the Wait under way or, if there is none, the next one.
func (k *Kick) Interrupt() {
	_ = k.file.SetReadDeadline(time.Unix(1, 0)) // long past; closed is as good
}

// Close ends the Wait under way and frees the descriptor.
func (k *Kick) Close() error { return k.file.Close() }

// A Call is the end that is signalled. Signal is safe for concurrent use with
// itself, not with Close.
type Call struct{ fd int }

// one is what a signal adds to an eventfd's counter, in native order.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// NewCall takes over fd, which it closes too when it returns an error. It makes
// it non-blocking, also for the other process in the case of an eventfd: or one
// whose counter that process has set to its maximum would stop us.
func NewCall(fd int) (*Call, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("make call non-blocking: %w", err), unix.Close(fd))
	}
	return &Call{fd: fd}, nil
}

// Signal adds one to the counter. It never blocks, and returns nothing: a
// counter or a pipe that is full says already what it would say, and a pipe that
// nobody reads any more has nobody to tell.
func (c *Call) Signal() {
	for {
		if _, err := unix.Write(c.fd, one); err != unix.EINTR {
			return
		}
	}
}

// Close frees the descriptor.
func (c *Call) Close() error { return unix.Close(c.fd) }
