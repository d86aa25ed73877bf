package listener

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// # Theory of operation
//
// The clients of a Group have an epoll set of their own, and it one goroutine:
// an idle client costs neither a goroutine nor its stack. Like the Group's set it
// lies on the runtime poller.
//
// A client comes into the set when somebody first waits for it, edge-triggered:
// its events only say that it is worth another try. Whoever waits has tried
// before, and epoll_ctl(2) reports at once what is already so; nothing can be
// missed in between. Room to write is asked for only once a write has found
// none, for every socket has some at first and would report that.
//
// An event that finds its descriptor closed, and perhaps in use again, is one try
// too many for the new client.
//
// The set outlives its Group for as long as there are clients: those that were
// accepted live on.
type clientSet struct {
	epoll *os.File
	epfd  int
	done  chan struct{}

	mu      sync.Mutex
	conns   map[int32]*Conn // in the set, by descriptor
	open    int             // accepted and not closed
	closing bool            // the Group is closed
}

func newClientSet() (*clientSet, error) {
	file, epfd, err := newEpoll()
	if err != nil {
		return nil, err
	}
	s := &clientSet{epoll: file, epfd: epfd, done: make(chan struct{}), conns: make(map[int32]*Conn)}
	go s.run()
	return s, nil
}

// newEpoll makes an epoll set that lies on the runtime poller.
func newEpoll() (*os.File, int, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, -1, fmt.Errorf("create epoll set: %w", err)
	}
	// NewFile puts a file on the runtime poller only if it is non-blocking.
	if err := unix.SetNonblock(epfd, true); err != nil {
		unix.Close(epfd)
		return nil, -1, fmt.Errorf("create epoll set: %w", err)
	}
	file := os.NewFile(uintptr(epfd), "epoll")
	if err := pollable(file); err != nil {
		file.Close()
		return nil, -1, fmt.Errorf("poll epoll set: %w", err)
	}
	return file, epfd, nil
}

// run is the set's goroutine.
func (s *clientSet) run() {
	defer close(s.done)
	raw, err := s.epoll.SyscallConn()
	if err != nil {
		return // closed already
	}
	events := make([]unix.EpollEvent, 128)
	var n int
	ready := func(fd uintptr) bool {
		for {
			var err error
			n, err = unix.EpollWait(int(fd), events, 0)
			if err != unix.EINTR {
				return n != 0
			}
		}
	}
	for raw.Read(ready) == nil {
		for _, ev := range events[:max(n, 0)] {
			s.mu.Lock()
			c := s.conns[ev.Fd]
			s.mu.Unlock()
			if c != nil {
				c.event(ev.Events)
			}
		}
	}
}

// admit counts a client that was accepted.
func (s *clientSet) admit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open++
}

// watch asks for c's events, of a set that it may not be in yet. c.mu is held, so
// its descriptor is open.
func (s *clientSet) watch(c *Conn, events uint32, op int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[int32(c.fd)] = c
	err := unix.EpollCtl(s.epfd, op, c.fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(c.fd)})
	if err != nil && op == unix.EPOLL_CTL_ADD {
		delete(s.conns, int32(c.fd))
	}
	return os.NewSyscallError("epoll_ctl", err)
}

// leave forgets c, which is about to be closed. c.mu is held.
func (s *clientSet) leave(c *Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns[int32(c.fd)] == c {
		delete(s.conns, int32(c.fd))
	}
	s.open--
	if s.closing && s.open == 0 {
		s.epoll.Close()
	}
}

// close ends the set once there are no clients, and waits for that if there are
// none now.
func (s *clientSet) close() {
	s.mu.Lock()
	last := !s.closing && s.open == 0
	s.closing = true
	if last {
		s.epoll.Close()
	}
	s.mu.Unlock()
	if last {
		<-s.done
	}
}
