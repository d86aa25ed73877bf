package listener

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// newConn takes over an accepted, non-blocking descriptor; it resets the client
// when it cannot.
func newConn(set *clientSet, fd int, listen, remote netip.AddrPort) (*Conn, error) {
	local := listen
	if listen.Addr().IsUnspecified() {
		sa, err := unix.Getsockname(fd)
		if err != nil {
			resetFD(fd)
			return nil, os.NewSyscallError("getsockname", err)
		}
		local = addrPort(sa)
	}
	set.admit()
	return &Conn{set: set, fd: fd, local: local, remote: remote}, nil
}

// watchedAlways is what every client in the set is watched for; a reset and an
// error always show. EPOLLPRI is urgent data, at which a read(2) stops short.
const watchedAlways = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLPRI

func (c *Conn) watch(ready func(Ready)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ready = ready
	if c.events != 0 && !c.closed {
		return c.set.watch(c, c.events, unix.EPOLL_CTL_MOD) // reports anew
	}
	return c.watchFor(watchedAlways)
}

func (c *Conn) watchWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.watchFor(watchedAlways | unix.EPOLLOUT)
}

// watchFor has the set watch for events, too. c.mu is held.
func (c *Conn) watchFor(events uint32) error {
	op := unix.EPOLL_CTL_ADD
	switch {
	case c.closed:
		return net.ErrClosed
	case c.events&events == events:
		return nil
	case c.events != 0:
		op = unix.EPOLL_CTL_MOD
	}
	events |= c.events
	err := c.set.watch(c, events, op)
	if err == nil {
		c.events = events
	}
	return err
}

// event is told on the set's goroutine what epoll_wait(2) says of c.
func (c *Conn) event(events uint32) {
	var r Ready
	if events&(watchedAlways|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		r |= ReadyRead
	}
	if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		r |= ReadyWrite
	}
	if events&(unix.EPOLLRDHUP|unix.EPOLLPRI|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		r |= ReadyEnd
	}
	c.mu.RLock()
	ready, waits := c.ready, c.waits
	c.mu.RUnlock()
	if waits != nil {
		waits.wake(r)
	}
	if ready != nil {
		ready(r)
	}
}

// waiting puts c into the set for a call that is about to block. The caller tries
// once more before it does.
func (c *Conn) waiting(events uint32) (*waits, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waits == nil {
		c.waits = &waits{read: make(chan struct{}, 1), write: make(chan struct{}, 1)}
	}
	return c.waits, c.watchFor(events)
}

// try calls f with the descriptor until it says something else than EAGAIN.
func (c *Conn) try(events uint32, ch func(*waits) <-chan struct{}, f func(fd int) error) error {
	for {
		w, err := c.waiting(events)
		if err != nil {
			return err
		}
		if err = c.control(f); err != unix.EAGAIN {
			return err
		}
		<-ch(w)
	}
}

func toRead(w *waits) <-chan struct{}  { return w.read }
func toWrite(w *waits) <-chan struct{} { return w.write }

func (c *Conn) read(p []byte) (n int, err error) {
	err = c.try(watchedAlways, toRead, func(fd int) (err error) {
		for n, err = unix.Read(fd, p); err == unix.EINTR; {
			n, err = unix.Read(fd, p)
		}
		return err
	})
	if n == 0 && err == nil && len(p) > 0 {
		err = io.EOF
	}
	return max(n, 0), err
}

func (c *Conn) write(p []byte) (total int, err error) {
	for total < len(p) {
		err = c.try(watchedAlways|unix.EPOLLOUT, toWrite, func(fd int) error {
			n, err := unix.Write(fd, p[total:])
			for err == unix.EINTR {
				n, err = unix.Write(fd, p[total:])
			}
			total += max(n, 0)
			return err
		})
		if err != nil {
			break
		}
	}
	return total, err
}

func (c *Conn) waitGone(ctx context.Context) error {
	w, err := c.waiting(watchedAlways)
	for err == nil {
		gone := false
		if err = c.Control(func(fd uintptr) { gone = goneFD(fd) }); err != nil || gone {
			break
		}
		select {
		case <-w.read:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

func (c *Conn) close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.set.leave(c) // before another can have its number
	err := unix.Close(c.fd)
	ready, waits := c.ready, c.waits
	c.mu.Unlock()
	if waits != nil {
		waits.wake(ReadyClosed)
	}
	if ready != nil {
		ready(ReadyClosed)
	}
	return os.NewSyscallError("close", err)
}

// goneFD asks poll(2) for what it always tells. A reset leaves the socket
// closed, POLLHUP, with its error, POLLERR. A FIN is POLLRDHUP and POLLIN, and
// not asked for.
func goneFD(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	for {
		n, err := unix.Poll(p, 0)
		if err != unix.EINTR {
			return n > 0 && p[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
		}
	}
}

func (c *Conn) shutdownRead() error {
	return c.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_RD) })
}

func (c *Conn) shutdownWrite() error {
	return c.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

func (c *Conn) keepAlive() error {
	return c.control(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1) })
}

// endInOrder makes close(2) end the stream instead of resetting it, as sockets
// do unless told otherwise (socket(7), SO_LINGER).
func (c *Conn) endInOrder() {
	_ = c.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
	})
}

func (c *Conn) control(f func(fd int) error) error {
	var err error
	if closed := c.Control(func(fd uintptr) { err = f(int(fd)) }); closed != nil {
		return closed
	}
	return err
}
