package listener

import (
	"time"

	"golang.org/x/sys/unix"
)

// # Theory of operation
//
// A goroutine that is woken whenever a busy client has sent a datagram finds one
// or two each time. To be woken costs more than to pass them on: it costs the
// client, in whose system call it happens, and it costs here, and once more in the
// guest, whose server is woken for each frame. So a UDP socket is
//
//	told of ──► paced      paceFrom messages more than answers in paceWindow
//	   ▲          │
//	   └──────────┘        a look finds fewer than paceLeast more
//
// While it is paced epoll(7) does not watch it: a timer has the Group look at it,
// a pause after the look before, and what has come meanwhile goes on together.
//
// Answers count against messages because a client that waits for one sends no
// faster for being left alone: it would only wait longer. A stream of datagrams
// does not wait, and most of it has a hundred before it in some queue.

const (
	// pacePause is how long a paced socket is left alone, and so what a datagram
	// waits at most. The default receive buffer of 212 992 bytes, of which one of
	// 1400 bytes takes 2304, holds what comes in it at up to 900 000 a second.
	// 50 and 200 µs pass less, the one for more wake-ups, the other for lost datagrams
	// (bench, UDP).
	pacePause = 100 * time.Microsecond
	// paceShort is the pause after a look that left some behind: at all, because on
	// few processors it is in there that the guest's server empties its own buffer.
	paceShort = 30 * time.Microsecond
	// paceWindow and paceFrom are a rate of 32 000 a second: three a pause.
	paceWindow = time.Millisecond
	paceFrom   = 32
	// paceLeast is how many can be put together.
	paceLeast = 2
)

// A pace is what a Group knows of how busy a socket is. It is the goroutine's own.
type pace struct {
	since time.Duration // when the window began, after Group.begun
	ahead int32         // messages less answers in the window
	on    bool
}

// A pacer is a Group's paced sockets. It is the goroutine's own.
type pacer struct {
	begun   time.Time
	timer   int // a timerfd in the epoll set, made when first needed; -1
	sockets []*Socket
}

// observe notes what has passed at s, which is not paced, since the last time.
func (g *Group) observe(s *Socket) {
	if now := time.Since(g.pacer.begun); now-s.pace.since > paceWindow {
		s.pace.since, s.pace.ahead = now, 0
	}
	s.pace.ahead += s.taken.Swap(0) - s.answered.Swap(0)
	if s.pace.ahead >= paceFrom {
		s.pace.ahead = 0
		g.startPace(s)
	}
}

// startPace makes s paced, unless something is in the way.
func (g *Group) startPace(s *Socket) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.sockets[s.fd] != s || !g.haveTimer() || g.watchFor(s, 0) != nil {
		return
	}
	s.pace.on = true
	if g.pacer.sockets = append(g.pacer.sockets, s); len(g.pacer.sockets) == 1 {
		g.setTimer(pacePause)
	}
}

// haveTimer reports whether there is a timer, a new one if there was none. g.mu is
// held and g is open.
func (g *Group) haveTimer() bool {
	if g.pacer.timer >= 0 {
		return true
	}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return false
	}
	if unix.EpollCtl(g.epfd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}) != nil {
		unix.Close(fd)
		return false
	}
	g.pacer.timer = fd
	return true
}

// setTimer has the timer expire once, after d, or never if d is 0. That it has
// expired before is forgotten (timerfd_create(2)), so nobody has to read it.
func (g *Group) setTimer(d time.Duration) {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}
	_ = unix.TimerfdSettime(g.pacer.timer, 0, &spec, nil) // fails for bad arguments only
}

// lookAtPaced serves the paced sockets.
func (g *Group) lookAtPaced() {
	var pause time.Duration
	still := g.pacer.sockets[:0]
	for _, s := range g.pacer.sockets {
		if !g.serves(s) {
			continue
		}
		g.handler.Readable(s)
		taken, answered := s.taken.Swap(0), s.answered.Swap(0)
		switch {
		case taken-answered < paceLeast && g.endPace(s):
			continue
		case taken >= readBatch:
			pause = paceShort
		case pause == 0:
			pause = pacePause
		}
		still = append(still, s)
	}
	clear(g.pacer.sockets[len(still):])
	g.pacer.sockets = still
	g.setTimer(pause)
}

// serves reports whether s is not closed.
func (g *Group) serves(s *Socket) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sockets[s.fd] == s
}

// endPace has epoll(7) watch s again, and reports whether it does or s is closed.
func (g *Group) endPace(s *Socket) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed && g.sockets[s.fd] == s && g.watchFor(s, unix.EPOLLIN) != nil {
		return false
	}
	s.pace.on = false
	return true
}

// watchFor changes what s is in the epoll set for. g.mu is held and g is open.
func (g *Group) watchFor(s *Socket, events uint32) error {
	return unix.EpollCtl(g.epfd, unix.EPOLL_CTL_MOD, s.fd, &unix.EpollEvent{Events: events, Fd: int32(s.fd)})
}
