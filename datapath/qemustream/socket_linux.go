package qemustream

import (
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// bufferSize is asked for each way: sixteen of the longest frames. The queue
	// it allows costs 13 ms behind a guest that takes 0.6 Gbit/s (software
	// emulation) and 0.8 ms at 10 Gbit/s.
	bufferSize = 1 << 20
	// starvedPause is the wait after ENOBUFS, which nothing tells the end of.
	starvedPause = 10 * time.Millisecond
)

// A socket is a non-blocking stream socket on the runtime's poller. read is used
// by one goroutine; write and awaitRoom never at the same time.
type socket struct {
	conn Conn
	raw  syscall.RawConn

	// One call's arguments and results, and the functions that RawConn calls
	// with them, made once: a closure a call would be an allocation a call.
	in, out struct {
		fn  func(fd uintptr)
		fnW func(fd uintptr) bool
		vec vector
		buf [][]byte
		n   int
		err error
	}
	rest    []byte
	starved bool
}

func newSocket(conn Conn) (*socket, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &socket{conn: conn, raw: raw}
	s.in.fnW, s.out.fn, s.out.fnW = s.tryRead, s.tryWrite, s.tryRoom
	return s, s.tune()
}

// tune sets what is worth having and no reason to fail when it is refused:
// buffers (unix(7): only SO_SNDBUF counts there, each side its own) beyond the
// system's limit when privileged, no Nagle, keepalives.
func (s *socket) tune() error {
	if tcp, ok := s.conn.(*net.TCPConn); ok {
		_ = tcp.SetNoDelay(true)
		// 5 s idle and 3 unanswered probes 5 s apart. Not TCP_USER_TIMEOUT: it
		// would also end a connection to a paused VM, whose window is shut
		// while its host answers.
		_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3})
	}
	return s.raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, bufferSize) != nil {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, bufferSize)
		}
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bufferSize) != nil {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, bufferSize)
		}
	})
}

// read waits for bytes and reads them into bufs. The end of the stream is io.EOF.
func (s *socket) read(bufs [][]byte) (int, error) {
	s.in.buf = bufs
	err := s.raw.Read(s.in.fnW)
	s.in.buf = nil
	if err != nil {
		return 0, err
	}
	if s.in.err == nil && s.in.n == 0 {
		return 0, io.EOF
	}
	return s.in.n, s.in.err
}

func (s *socket) tryRead(fd uintptr) (done bool) {
	s.in.n, s.in.err = s.in.vec.readv(fd, s.in.buf)
	return s.in.err != unix.EAGAIN
}

// write sends what the socket takes of bufs. Having taken less than all is no
// error, having taken nothing is errFull.
func (s *socket) write(bufs [][]byte) (int, error) {
	s.out.buf = bufs
	err := s.raw.Control(s.out.fn)
	s.out.buf = nil
	if err != nil {
		return 0, err
	}
	switch s.out.err {
	case nil:
		return s.out.n, nil
	case unix.ENOBUFS, unix.ENOMEM:
		s.starved = true
		return 0, errFull
	case unix.EAGAIN:
		return 0, errFull
	}
	return 0, s.out.err
}

func (s *socket) tryWrite(fd uintptr) {
	s.out.n, s.out.err = s.out.vec.writev(fd, s.out.buf)
}

// awaitRoom sends rest and then waits until the socket is writable, which the
// kernel says when a good part of its buffer is free again.
func (s *socket) awaitRoom(rest []byte) error {
	for s.rest = rest; ; {
		if s.starved {
			s.starved = false
			time.Sleep(starvedPause)
		}
		err := s.raw.Write(s.out.fnW)
		if err == nil {
			err = s.out.err
		}
		if !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ENOMEM) {
			s.rest = nil
			return err
		}
		s.starved = true
	}
}

func (s *socket) tryRoom(fd uintptr) (done bool) {
	for len(s.rest) > 0 {
		n, err := ignoringEINTR(func() (int, error) { return unix.Write(int(fd), s.rest) })
		if s.out.err = err; err != nil {
			return err != unix.EAGAIN
		}
		s.rest = s.rest[n:]
	}
	s.out.err = nil
	// An error or a hang-up is for the next write to find.
	return poll(fd, unix.POLLOUT)&(unix.POLLOUT|unix.POLLERR|unix.POLLHUP) != 0
}

// hungUp reports whether the peer has closed its end, read or not (poll(2)).
func (s *socket) hungUp() (gone bool) {
	err := s.raw.Control(func(fd uintptr) {
		gone = poll(fd, unix.POLLRDHUP)&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return gone || err != nil
}

func (s *socket) close() error {
	if err := s.conn.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// poll asks for events without waiting.
func poll(fd uintptr, events int16) int16 {
	p := []unix.PollFd{{Fd: int32(fd), Events: events}}
	_, _ = ignoringEINTR(func() (int, error) { return unix.Poll(p, 0) })
	return p[0].Revents
}

func ignoringEINTR(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); err != unix.EINTR {
			return n, err
		}
	}
}
