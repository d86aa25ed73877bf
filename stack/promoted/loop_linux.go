package promoted

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"golang.org/x/sys/unix"
)

// # Theory of operation
//
// One goroutine waits for the frames of the guest, for the clients of its flows, and for
// the flows whose turn it is, and runs what follows from each to its end: a request
// goes from the client's socket to the link, and its answer from the link to the
// socket, without a hand-over. It lies on the runtime's poller by its epoll set, as any
// goroutine that waits, and looks into the set by itself as long as there is something.
//
// Clients are in the set edge-triggered: their events only say that it is worth another
// try, and whoever waits has tried before. The link is level-triggered: frames that are
// left come up again.
//
// Waking a thread takes longer than what it is woken for. So where the last few waits
// were short the loop looks for a while (spinFor) before it sleeps; where it looks in
// vain, on a machine whose ends have other work, it soon does so no more. While it does
// not sleep, who waits for the same processor is not woken: what has come for them is
// looked after from here (Beside).

const (
	// spinFor is how long the loop looks for something before it sleeps: what an answer
	// takes on a machine that the ends share. spinAfter is the sleep that would have
	// been worth it, with the waking.
	spinFor   = 50 * time.Microsecond
	spinAfter = 100 * time.Microsecond
	// eagerAt is after how many short waits in a row the loop is eager, eagerMost how
	// many it counts, and eagerLoss what a look in vain costs: it has to be right four
	// times in five.
	eagerAt   = 4
	eagerMost = 8
	eagerLoss = 4
	// lateRounds and bulkRounds are how many rounds of the loop, which is busy, an
	// acknowledgement may wait for a segment to carry it or for more to acknowledge:
	// of a request or an answer, and of a bulk.
	lateRounds = 4
	bulkRounds = 64
	// watchedAlways is what every client is watched for; a reset and an error always
	// show. EPOLLPRI is urgent data, at which a read(2) stops short.
	watchedAlways = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLPRI | unix.EPOLLET
)

// A Source is where frames come from.
type Source interface {
	// Control calls f with a descriptor that is readable while there are frames.
	Control(f func(fd uintptr)) error
	// Read takes frames that are there, on the loop's goroutine. It reports whether
	// there may ever be more.
	Read() bool
}

// A loop is what waits for a Table's flows.
type loop struct {
	table  *Table
	source Source
	epoll  *os.File
	epfd   int
	wakefd int
	parked atomic.Bool            // or about to be
	ended  atomic.Bool            // the source is to be read once more, to tell
	over   atomic.Bool            // the goroutine is to end
	beside atomic.Pointer[func()] // see Beside
	eager  int                    // see eagerAt
	looks  int                    // in this sleep
	round  int                    // of run
	late   []late                 // flows that have something to acknowledge, the first that had first
	done   chan struct{}

	mu     sync.Mutex // held during system calls of others than the goroutine, too
	conns  map[int32]*Conn
	closed bool
}

// Drive has one goroutine wait for everything that t's flows and source bring, until
// Close. It is called once, before the first flow.
func (t *Table) Drive(source Source) error {
	l := &loop{table: t, source: source, done: make(chan struct{}), conns: make(map[int32]*Conn), wakefd: -1}
	if err := l.open(); err != nil {
		l.close()
		return fmt.Errorf("wait for flows: %w", err)
	}
	t.loop = l
	t.queue.wake = l.wake
	go l.run()
	return nil
}

func (l *loop) open() (err error) {
	if l.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(l.epfd, true); err != nil { // or NewFile leaves it off the poller
		unix.Close(l.epfd)
		return os.NewSyscallError("fcntl", err)
	}
	l.epoll = os.NewFile(uintptr(l.epfd), "epoll")
	if err := l.epoll.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	if l.wakefd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return os.NewSyscallError("eventfd", err)
	}
	if err := l.control(unix.EPOLL_CTL_ADD, l.wakefd, unix.EPOLLIN|unix.EPOLLET); err != nil {
		return err
	}
	if closed := l.source.Control(func(fd uintptr) { err = l.control(unix.EPOLL_CTL_ADD, int(fd), unix.EPOLLIN) }); closed != nil {
		return closed
	}
	return err
}

func (l *loop) control(op, fd int, events uint32) error {
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(l.epfd, op, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}))
}

// stop ends the goroutine and waits for it. Only then may another have the numbers of its
// descriptors, which it uses as such.
func (l *loop) stop() {
	l.over.Store(true)
	l.wake()
	<-l.done
	l.close()
}

func (l *loop) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.epoll != nil {
		_ = l.epoll.Close()
	}
	if l.wakefd >= 0 {
		unix.Close(l.wakefd)
	}
}

// wake has the loop look at what is not a descriptor's.
func (l *loop) wake() {
	if !l.parked.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		_, _ = unix.Write(l.wakefd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// End has the source read once more, though nothing shows: it has ended.
func (t *Table) End() {
	if t.loop != nil {
		t.loop.ended.Store(true)
		t.loop.wake()
	}
}

// run is the loop's goroutine.
func (l *loop) run() {
	defer close(l.done)
	raw, err := l.epoll.SyscallConn()
	if err != nil {
		return // closed already
	}
	events := make([]unix.EpollEvent, 128)
	n := 0
	look := func() bool {
		n = epollWait(l.epfd, events)
		return n != 0 || l.table.queue.waiting() || l.ended.Load() || l.over.Load()
	}
	ready := func(uintptr) bool { l.looks++; return look() }
	for ; ; l.round++ {
		if len(l.late) > 0 && look() {
			l.acknowledge(false)
			l.lookBeside()
		} else {
			l.acknowledge(true)
			if !l.spin(look) && !l.sleep(raw, ready) {
				return
			}
		}
		if n < 0 || l.over.Load() {
			return
		}
		for i := range events[:n] {
			l.dispatch(&events[i])
		}
		if l.ended.Swap(false) {
			l.read()
		}
		l.table.queue.round()
	}
}

// acknowledge sends the acknowledgements that have waited long enough, or all.
func (l *loop) acknowledge(all bool) {
	still := l.late[:0]
	for _, w := range l.late {
		waited := l.round - w.since
		if (all || waited >= lateRounds) && w.conn.acknowledgeLate(all || waited >= bulkRounds) {
			continue
		}
		still = append(still, w)
	}
	clear(l.late[len(still):])
	l.late = still
}

// sleep waits until ready. It returns false when that cannot be.
func (l *loop) sleep(raw syscall.RawConn, ready func(uintptr) bool) bool {
	l.parked.Store(true)
	began := time.Now()
	l.looks = 0
	err := raw.Read(ready)
	l.parked.Store(false)
	switch {
	case l.looks == 1: // it looks first, and found something
		l.lookBeside()
	case time.Since(began) < spinAfter:
		l.eager = min(l.eager+1, eagerMost)
	default:
		l.eager = 0
	}
	return err == nil
}

// lookBeside does what others would be woken for.
func (l *loop) lookBeside() {
	if poll := l.beside.Load(); poll != nil {
		(*poll)()
	}
}

// Beside has poll called now and then by a loop that is busy, for those whose goroutines
// wait for the same processor. It does what has come for them, and does not wait. It may
// be called at any time, and takes the place of the one before.
func (t *Table) Beside(poll func()) {
	if t.loop != nil {
		t.loop.beside.Store(&poll)
	}
}

// spin looks for a while, if that is worth it, and reports whether there is something.
func (l *loop) spin(look func() bool) bool {
	if l.eager < eagerAt || runtime.NumCPU() == 1 {
		return false
	}
	for end := time.Now().Add(spinFor); time.Now().Before(end); {
		l.lookBeside()
		if look() {
			l.eager = min(l.eager+1, eagerMost)
			return true
		}
		runtime.Gosched()
	}
	l.eager = max(0, l.eager-eagerLoss)
	return false
}

func (l *loop) dispatch(ev *unix.EpollEvent) {
	if ev.Fd == int32(l.wakefd) {
		return // edge-triggered; its number says nothing
	}
	l.mu.Lock()
	c := l.conns[ev.Fd]
	l.mu.Unlock()
	if c == nil {
		l.read() // or of a flow that is no more, and read for nothing
		return
	}
	c.clientReady(readyOf(ev.Events))
}

// read reads frames until the source has ended.
func (l *loop) read() {
	if l.source != nil && !l.source.Read() {
		_ = l.source.Control(func(fd uintptr) { _ = l.control(unix.EPOLL_CTL_DEL, int(fd), 0) })
		l.source = nil
	}
}

// readyOf says what events of epoll_wait(2) mean.
func readyOf(events uint32) (r relay.Ready) {
	if events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLPRI|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		r |= relay.ReadyRead
	}
	if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		r |= relay.ReadyWrite
	}
	if events&(unix.EPOLLRDHUP|unix.EPOLLPRI|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		r |= relay.ReadyEnd
	}
	return r
}

// add has c's client watched. c.mu is held.
func (l *loop) add(c *Conn) error {
	var err error
	events := uint32(watchedAlways)
	if c.watched {
		events |= unix.EPOLLOUT // addWrite was before us
	}
	if closed := c.client.Control(func(fd uintptr) {
		c.fd = int(fd)
		err = l.watch(unix.EPOLL_CTL_ADD, c, events)
	}); closed != nil {
		return closed
	}
	c.added = err == nil
	return err
}

// addWrite has c's client watched for room, too. c.mu is held.
func (l *loop) addWrite(c *Conn) (err error) {
	if !c.added {
		return nil // add looks at watched
	}
	if closed := c.client.Control(func(fd uintptr) {
		c.fd = int(fd)
		err = l.watch(unix.EPOLL_CTL_MOD, c, watchedAlways|unix.EPOLLOUT)
	}); closed != nil {
		return closed
	}
	return err
}

// watch has c's client, whose descriptor c.fd is, watched for events.
func (l *loop) watch(op int, c *Conn, events uint32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	l.conns[int32(c.fd)] = c
	return l.control(op, c.fd, events)
}

// remove forgets c's client, which goes, or has gone and perhaps left its number to
// another. c.mu is held.
func (l *loop) remove(c *Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns[int32(c.fd)] == c {
		delete(l.conns, int32(c.fd))
	}
}
