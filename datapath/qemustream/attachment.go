package qemustream

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/culvertnet/culvert/datapath"
)

// A Conn is a connected stream socket: a *net.UnixConn or a *net.TCPConn.
type Conn interface {
	net.Conn
	syscall.Conn
}

var (
	_ Conn                = (*net.UnixConn)(nil)
	_ Conn                = (*net.TCPConn)(nil)
	_ datapath.Attachment = (*attachment)(nil)
	_ datapath.QueuePair  = (*attachment)(nil)
)

// errFull says that the socket takes nothing now.
var errFull = errors.New("socket full")

// New makes an attachment of one queue pair of a connected socket, which it owns
// from then on: closing the attachment closes it, and so does New when it
// returns an error. name is Info.Name, the socket's address as its user wrote
// it. New enlarges the socket's buffers as far as it may; a TCP connection also
// gets TCP_NODELAY, and keepalives that notice a vanished host within 20 s. The
// error is ErrUnsupported where the system is not Linux.
func New(conn Conn, name string) (datapath.Attachment, error) {
	a, err := newAttachment(conn, name)
	if err != nil {
		return nil, err // not a nil *attachment in an interface
	}
	return a, nil
}

func newAttachment(conn Conn, name string) (*attachment, error) {
	sock, err := newSocket(conn)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach stream %s: %w", name, err), conn.Close())
	}
	a := &attachment{name: name, sock: sock, room: make(chan struct{}, 1)}
	a.pairs = []datapath.QueuePair{a}
	a.in = newDecoder(sock.read, &a.stats)
	return a, nil
}

// attachment is both the Attachment and its only QueuePair.
type attachment struct {
	name  string
	sock  *socket
	pairs []datapath.QueuePair
	stats datapath.Stats
	room  chan struct{}
	in    *decoder // the reading goroutine's

	// err is why the attachment ended; nil while it is live. Written by end
	// from nil, and by Close, under mu, from anything.
	err atomic.Pointer[error]

	mu      sync.Mutex
	waiting bool    // awaitRoom runs: it has out.rest and the socket's write side
	out     encoder // else the writer's that holds mu

	waiter sync.WaitGroup
}

// Info describes the attachment: no offloads either way, connected.
func (a *attachment) Info() datapath.Info {
	return datapath.Info{Transport: "qemu", Name: a.name, Connected: true}
}

// QueuePairs returns the one queue pair.
func (a *attachment) QueuePairs() []datapath.QueuePair { return a.pairs }

// Stats returns the counters.
func (a *attachment) Stats() *datapath.Stats { return &a.stats }

// ReadBatch waits for frames, as datapath.QueuePair says.
func (a *attachment) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (int, error) {
	if err := a.ended(); err != nil {
		return 0, err
	}
	n, err := a.in.readBatch(frames, get)
	if err != nil {
		a.end(err)
		return 0, a.ended()
	}
	return n, nil
}

// WriteBatch sends what the socket takes, as datapath.QueuePair says.
func (a *attachment) WriteBatch(frames []datapath.Frame) (n int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.ended(); err != nil {
		return 0, err
	}
	for n < len(frames) && !a.waiting {
		if why, bad := unsendable(&frames[n]); bad {
			a.stats.Drop(why)
			n++
			continue
		}
		if len(frames[n].Segs) >= maxVec { // in crumbs: awaitRoom sends a copy
			a.out.keep(&frames[n], 0)
			a.taken(1, frames[n].N)
			n++
			a.wait()
			break
		}
		a.out.gather(frames[n:])
		want := total(a.out.vec)
		sent, err := a.sock.write(a.out.vec)
		taken, bytes := a.out.sent(frames[n:], sent)
		n += taken
		a.taken(taken, bytes)
		if err != nil && !errors.Is(err, errFull) {
			a.end(err)
			return 0, a.ended()
		}
		if sent < want {
			a.wait()
		}
	}
	return n, nil
}

func (a *attachment) taken(frames, bytes int) {
	a.stats.ToGuest.Frames.Add(uint64(frames))
	a.stats.ToGuest.Bytes.Add(uint64(bytes))
}

// wait hands out.rest, which may be empty, and the socket's write side to
// awaitRoom. It is called with mu held.
func (a *attachment) wait() {
	a.waiting = true
	a.waiter.Go(a.awaitRoom)
}

// awaitRoom finishes the frame that was begun, waits until the socket is
// writable, and lets writers go on.
func (a *attachment) awaitRoom() {
	if err := a.sock.awaitRoom(a.out.rest); err != nil {
		a.end(err)
	}
	a.mu.Lock()
	a.waiting = false
	a.out.rest = a.out.rest[:0]
	a.mu.Unlock()
	a.signal()
}

// Room returns the channel that awaitRoom and the end fire.
func (a *attachment) Room() <-chan struct{} { return a.room }

// signal fires Room; a value that is still there says the same.
func (a *attachment) signal() {
	select {
	case a.room <- struct{}{}:
	default:
	}
}

// Close closes the socket, unblocks every call and waits for awaitRoom.
func (a *attachment) Close() error {
	closed := datapath.ErrClosed
	a.mu.Lock() // after this no writer starts awaitRoom
	a.err.Store(&closed)
	err := a.sock.close()
	a.mu.Unlock()
	a.signal()
	a.waiter.Wait()
	return err
}

// alive reports whether the attachment is live and its peer was there just now.
func (a *attachment) alive() bool { return a.ended() == nil && !a.sock.hungUp() }

// ended returns why the attachment ended, nil while it is live.
func (a *attachment) ended() error {
	if err := a.err.Load(); err != nil {
		return *err
	}
	return nil
}

// end ends a live attachment for an error of its socket or its stream. It closes
// the socket, since whoever waits for the other direction is to hear of it too.
func (a *attachment) end(err error) {
	switch {
	case errors.Is(err, net.ErrClosed):
		err = datapath.ErrClosed // no news, unless someone else closed it
	case !errors.Is(err, datapath.ErrPeerGone):
		// Whatever the system says of a connected socket, its peer cannot be
		// spoken to any more.
		err = fmt.Errorf("%w: %w", datapath.ErrPeerGone, err)
	}
	if a.err.CompareAndSwap(nil, &err) {
		_ = a.sock.close() // the news is err
		a.signal()
	}
}
