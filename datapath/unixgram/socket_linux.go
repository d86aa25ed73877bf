package unixgram

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath/socketfile"
)

const (
	// bufferSize is asked for: sixteen of the longest frames. The kernel takes a
	// datagram only if it fits, so it must not be less than one.
	bufferSize = 1 << 20
	// starvedPause is the wait after ENOBUFS, which nothing tells the end of.
	starvedPause = 10 * time.Millisecond
)

// A socket is a non-blocking datagram socket on the runtime's poller. What
// receives is used by one goroutine; send and awaitRoom never at the same time.
type socket struct {
	file *os.File
	raw  syscall.RawConn

	// One call's arguments and results, and the functions that RawConn calls
	// with them, made once: a closure a call would be an allocation a call.
	in struct {
		message
		fn   func(fd uintptr) bool
		wait bool
		n    int
		err  error
	}
	out struct {
		message
		fn      func(fd uintptr)
		room    func(fd uintptr) bool
		err     error
		starved bool
		whole   []byte // a frame of more segments than one call takes
	}
}

// bind makes a socket of mode 0600 bound to path.
func bind(path string) (*socket, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	// Buffers beyond the system's limit when privileged, up to it otherwise.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, bufferSize) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, bufferSize)
	}
	if err = socketfile.Private(uintptr(fd)); err == nil {
		if err = unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			err = fmt.Errorf("bind: %w", err)
		}
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return newSocket(fd, path)
}

// newSocket owns fd from then on.
func newSocket(fd int, name string) (*socket, error) {
	s := &socket{file: os.NewFile(uintptr(fd), name)}
	raw, err := s.file.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, s.file.Close())
	}
	s.raw = raw
	s.in.fn, s.out.fn, s.out.room = s.tryReceive, s.trySend, s.tryRoom
	return s, nil
}

// dup returns the same socket behind a descriptor of its own.
func (s *socket) dup() (*socket, error) {
	fd, dupErr := -1, error(nil)
	err := s.raw.Control(func(f uintptr) { fd, dupErr = unix.FcntlInt(f, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, dupErr); err != nil {
		return nil, fmt.Errorf("duplicate socket: %w", err)
	}
	return newSocket(fd, s.file.Name())
}

// interruptible makes peek return when ctx ends, until the function that it
// returns is called.
func (s *socket) interruptible(ctx context.Context) (stop func()) {
	interrupted := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		_ = s.file.SetReadDeadline(time.Unix(1, 0)) // fails only when closed, which interrupts as well
		close(interrupted)
	})
	return func() {
		if !cancel() {
			<-interrupted
			_ = s.file.SetReadDeadline(time.Time{})
		}
	}
}

// peek waits for a datagram and returns its sender, its first bytes and its
// length, and leaves it where it is.
func (s *socket) peek() (from address, begin [len(greeting)]byte, size int, err error) {
	buf := [][]byte{begin[:]}
	rawErr := s.raw.Read(func(fd uintptr) (done bool) {
		size, err = s.in.receive(fd, buf, unix.MSG_PEEK|unix.MSG_TRUNC)
		return err != unix.EAGAIN
	})
	return s.in.from, begin, size, errors.Join(rawErr, err)
}

// discard takes the datagram that peek has seen off the queue.
func (s *socket) discard() (err error) {
	buf := [][]byte{make([]byte, 1)}
	rawErr := s.raw.Control(func(fd uintptr) { _, err = s.in.receive(fd, buf, 0) })
	return errors.Join(rawErr, err)
}

// connect makes to the only one who may send here, and the one sent to.
func (s *socket) connect(to address) (err error) {
	if !to.named() {
		return errors.New("its socket is not bound, so nothing could be sent back to it")
	}
	rawErr := s.raw.Control(func(fd uintptr) { err = connect(fd, &to) })
	return errors.Join(rawErr, err)
}

// disconnect opens the socket to every sender and drops what is queued. It does
// nothing to a closed one.
func (s *socket) disconnect() {
	none := unspecified()
	_ = s.raw.Control(func(fd uintptr) { _ = connect(fd, &none) })
}

// receive takes one datagram into bufs, waiting for it or returning errNothing.
// whole says that it fitted. from is valid until the next call.
func (s *socket) receive(bufs [][]byte, wait bool) (n int, whole bool, from *address, err error) {
	s.in.wait = wait
	s.in.set(bufs)
	err = s.raw.Read(s.in.fn)
	s.in.reset()
	switch {
	case err != nil:
		return 0, false, nil, err
	case s.in.err == unix.EAGAIN:
		return 0, false, nil, errNothing
	case s.in.err != nil:
		return 0, false, nil, s.in.err
	}
	return s.in.n, !s.in.truncated(), &s.in.from, nil
}

func (s *socket) tryReceive(fd uintptr) (done bool) {
	s.in.n, s.in.err = s.in.recvmsg(fd, 0)
	return s.in.err != unix.EAGAIN || !s.in.wait
}

// send sends the first n bytes of bufs as one datagram, or returns errFull or
// errTooBig.
func (s *socket) send(bufs [][]byte, n int) error {
	if len(bufs) > maxVec {
		s.out.whole = s.out.whole[:0]
		for _, b := range bufs {
			s.out.whole = append(s.out.whole, b[:min(len(b), n-len(s.out.whole))]...)
		}
		bufs = [][]byte{s.out.whole}
	}
	s.out.setFirst(bufs, n)
	err := s.raw.Control(s.out.fn)
	s.out.reset()
	if err != nil {
		return err
	}
	switch s.out.err {
	case unix.EAGAIN:
		return errFull
	case unix.ENOBUFS, unix.ENOMEM:
		s.out.starved = true
		return errFull
	case unix.EMSGSIZE:
		return errTooBig
	}
	return s.out.err
}

func (s *socket) trySend(fd uintptr) { s.out.err = s.out.sendmsg(fd) }

// awaitRoom waits until the socket is writable: our buffer has room, and the
// peer's queue. A peer that leaves counts as room: the next send tells.
func (s *socket) awaitRoom() error {
	if s.out.starved {
		s.out.starved = false
		time.Sleep(starvedPause)
	}
	return s.raw.Write(s.out.room)
}

func (s *socket) tryRoom(fd uintptr) (done bool) {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	for {
		if _, err := unix.Poll(p, 0); err != unix.EINTR {
			return p[0].Revents != 0
		}
	}
}

func (s *socket) close() error { return s.file.Close() }
