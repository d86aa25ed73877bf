package listener

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// acceptBatch is how many clients one socket may deliver at most before the
	// others have their turn: enough to make the epoll_wait(2) between turns
	// cheap, and no more than what one socket may hold up the rest with (64 × ~5 µs).
	acceptBatch = 64
	// acceptPause is how long a socket rests that can neither accept nor refuse.
	// 20 tries a second are no load, and 50 ms are no wait for a client that has
	// waited for a descriptor already.
	acceptPause = 50 * time.Millisecond
)

func newGroup(h Handler) (*Group, error) {
	file, epfd, err := newEpoll()
	if err != nil {
		return nil, err
	}
	clients, err := newClientSet()
	if err != nil {
		file.Close()
		return nil, err
	}
	g := &Group{
		handler: h,
		epoll:   file,
		clients: clients,
		done:    make(chan struct{}),
		reserve: openReserve(),
		pacer:   pacer{begun: time.Now(), timer: -1},
		served:  served{batch: 1},
		epfd:    epfd,
		sockets: make(map[int]*Socket),
	}
	go g.run()
	return g, nil
}

// pollable says why f is not on the runtime poller, which NewFile does not.
func pollable(f *os.File) error { return f.SetReadDeadline(time.Time{}) }

func openReserve() int {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return -1
	}
	return fd
}

// add puts a bound socket into service, or closes it.
func (g *Group) add(s *Socket) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		_ = s.closeFD()
		return net.ErrClosed
	}
	g.sockets[s.fd] = s
	if err := g.watch(s); err != nil {
		delete(g.sockets, s.fd)
		_ = s.closeFD()
		return opError(s.proto, s.addr, "epoll_ctl", err)
	}
	return nil
}

// watch puts s into the epoll set. g.mu is held and g is open.
func (g *Group) watch(s *Socket) error {
	return unix.EpollCtl(g.epfd, unix.EPOLL_CTL_ADD, s.fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(s.fd)})
}

// run is the Group's goroutine.
func (g *Group) run() {
	defer close(g.done)
	raw, err := g.epoll.SyscallConn()
	if err != nil {
		return // closed already
	}
	ready := func(uintptr) bool {
		g.turn.Lock()
		defer g.turn.Unlock()
		return g.serve()
	}
	for {
		switch err := raw.Read(ready); {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded):
			g.turn.Lock()
			g.resume()
			g.turn.Unlock()
		default:
			return // closed
		}
	}
}

func (g *Group) poll() {
	if !g.turn.TryLock() {
		return // somebody does
	}
	defer g.turn.Unlock()
	g.mu.Lock()
	closed := g.closed
	g.mu.Unlock()
	if !closed {
		g.serve()
	}
}

// A served is how a Group serves its clients.
type served struct {
	events [128]unix.EpollEvent
	batch  int // see serve
}

// serve serves who waits now and reports whether there was anybody. g.turn is held,
// and the epoll set is open.
func (g *Group) serve() bool {
	r := &g.served
	n := 0
	for {
		var err error
		if n, err = unix.EpollWait(g.epfd, r.events[:], 0); err != unix.EINTR {
			break
		}
	}
	// An accept4(2) that finds nobody costs three times an epoll_wait(2) that
	// finds nothing, as it makes a file first. So the first turn after a rest
	// takes one client of each socket, the usual number, and each turn without
	// a rest between twice as many as the one before.
	if n <= 0 {
		r.batch = 1
		return false
	}
	for _, ev := range r.events[:n] {
		if int(ev.Fd) == g.pacer.timer {
			g.lookAtPaced()
			continue
		}
		g.dispatch(int(ev.Fd), r.batch)
	}
	r.batch = min(2*r.batch, acceptBatch)
	return true
}

// dispatch serves the socket with descriptor fd, up to batch clients of it. If
// the one that was ready is closed and another has its number by now, that one
// is asked for nothing.
func (g *Group) dispatch(fd, batch int) {
	g.mu.Lock()
	s := g.sockets[fd]
	g.mu.Unlock()
	switch {
	case s == nil:
	case s.proto == UDP:
		g.handler.Readable(s)
		if !s.pace.on { // or it has an error to tell
			g.observe(s)
		}
	default:
		g.acceptFrom(s, batch)
	}
}

// acceptFrom takes the clients that wait at s, up to batch of them.
func (g *Group) acceptFrom(s *Socket, batch int) {
	for range batch {
		fd, remote, err := s.accept()
		switch {
		case err == nil:
			c, err := newConn(g.clients, fd, s.addr, remote)
			if err != nil {
				g.handler.AcceptError(s, err)
				continue
			}
			g.handler.Accepted(s, c)
		case err == unix.EAGAIN || err == net.ErrClosed:
			return
		case err == unix.EINTR:
		case err == unix.EMFILE || err == unix.ENFILE:
			refused := g.refuse(s)
			if refused == unix.EAGAIN {
				return // accept(2) looks for a descriptor first and for a client then
			}
			g.handler.AcceptError(s, os.NewSyscallError("accept4", err))
			if refused != nil {
				g.pause(s)
				return
			}
		case lostClient(err):
			g.handler.AcceptError(s, os.NewSyscallError("accept4", err))
		default: // ENOBUFS, ENOMEM, and what we know nothing of
			g.handler.AcceptError(s, os.NewSyscallError("accept4", err))
			g.pause(s)
			return
		}
	}
}

// lostClient reports whether an error of accept(2) is about one client only,
// whose connection was taken from the queue with it: accept(2), "Error
// handling", and EPERM for firewall rules.
func lostClient(err error) bool {
	switch err {
	case unix.ECONNABORTED, unix.EPERM, unix.EPROTO, unix.ENOPROTOOPT, unix.ENETDOWN, unix.EHOSTDOWN,
		unix.ENONET, unix.EHOSTUNREACH, unix.EOPNOTSUPP, unix.ENETUNREACH, unix.ETIMEDOUT:
		return true
	}
	return false
}

// refuse resets one client of s, with the descriptor in reserve.
func (g *Group) refuse(s *Socket) error {
	if g.reserve < 0 {
		return unix.EMFILE
	}
	unix.Close(g.reserve)
	fd, _, err := s.accept()
	if err == nil {
		resetFD(fd)
	}
	// Another thread may have been faster with the number; resume tries again.
	g.reserve = openReserve()
	return err
}

// resetFD closes a connection with RST: socket(7), SO_LINGER with time 0.
func resetFD(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Close(fd)
}

// pause takes s out of the epoll set until resume.
func (g *Group) pause(s *Socket) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.sockets[s.fd] != s {
		return
	}
	if unix.EpollCtl(g.epfd, unix.EPOLL_CTL_DEL, s.fd, nil) != nil {
		return
	}
	if len(g.paused) == 0 {
		_ = g.epoll.SetReadDeadline(time.Now().Add(acceptPause))
	}
	g.paused = append(g.paused, s)
}

// resume puts the paused sockets back.
func (g *Group) resume() {
	if g.reserve < 0 {
		g.reserve = openReserve()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return
	}
	_ = g.epoll.SetReadDeadline(time.Time{})
	again := g.paused[:0]
	for _, s := range g.paused {
		// ENOMEM, ENOSPC (the user's epoll watches): later.
		if g.sockets[s.fd] == s && g.watch(s) != nil {
			again = append(again, s)
		}
	}
	clear(g.paused[len(again):])
	if g.paused = again; len(again) > 0 {
		_ = g.epoll.SetReadDeadline(time.Now().Add(acceptPause))
	}
}

func (g *Group) close() error {
	g.turn.Lock() // so that no Poll is under way, and none begins
	g.mu.Lock()
	first := !g.closed
	g.closed = true
	sockets := g.sockets
	g.sockets = nil
	g.mu.Unlock()
	g.turn.Unlock()
	if !first {
		<-g.done
		return nil
	}

	err := g.epoll.Close()
	<-g.done
	g.clients.close()
	for _, s := range sockets {
		_ = s.closeFD()
	}
	if g.reserve >= 0 {
		unix.Close(g.reserve)
	}
	if g.pacer.timer >= 0 {
		unix.Close(g.pacer.timer)
	}
	return err
}

// bind makes a socket that is not in service yet: it has its port, and a TCP
// client may connect, but the Handler does not hear of it before add.
func (g *Group) bind(proto Proto, ap netip.AddrPort, token any, index uint16) (*Socket, error) {
	ap = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	fd, call, err := bindFD(proto, ap)
	if err != nil {
		return nil, opError(proto, ap, call, err)
	}
	if ap.Port() == 0 {
		sa, err := unix.Getsockname(fd)
		if err != nil {
			unix.Close(fd)
			return nil, opError(proto, ap, "getsockname", err)
		}
		ap = addrPort(sa)
	}
	s := &Socket{group: g, proto: proto, index: index, addr: ap, token: token, fd: fd}
	if proto == UDP {
		s.merge.Store(mergeDatagrams(fd))
	}
	return s, nil
}

func (s *Socket) close() error {
	g := s.group
	g.mu.Lock()
	// The number is still s's: it is free for others only after closeFD.
	if g.sockets[s.fd] == s {
		delete(g.sockets, s.fd)
	}
	g.mu.Unlock()
	return s.closeFD()
}

// closeFD waits for system calls on the descriptor, none of which blocks, and
// closes it; that takes it out of the epoll set too (epoll(7), question 6).
func (s *Socket) closeFD() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	return os.NewSyscallError("close", unix.Close(s.fd))
}

// accept takes one client. Its errors are bare, and net.ErrClosed.
func (s *Socket) accept() (fd int, remote netip.AddrPort, err error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return -1, netip.AddrPort{}, net.ErrClosed
	}
	return accept4(s.fd)
}

func wouldBlock(call string, err error) error {
	if err == unix.EAGAIN {
		return ErrWouldBlock
	}
	return os.NewSyscallError(call, err)
}
