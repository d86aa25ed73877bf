package unixgram

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// minFrame is an Ethernet header: two addresses of 6 bytes and a type of 2.
const minFrame = 14

var (
	// errFull says that the peer's queue or our own buffer takes nothing now.
	errFull = errors.New("socket full")
	// errTooBig says that a datagram of this length never fits.
	errTooBig = errors.New("datagram too big")
	// errNothing says that nothing is there to receive.
	errNothing = errors.New("nothing to receive")
)

var (
	_ datapath.Attachment = (*attachment)(nil)
	_ datapath.QueuePair  = (*attachment)(nil)
)

// attachment is both the Attachment and its only QueuePair.
type attachment struct {
	l     *Listener
	peer  address
	sock  *socket
	pairs []datapath.QueuePair
	stats datapath.Stats
	room  chan struct{}

	// err is why the attachment ended; nil while it is live. Written by end
	// from nil, and by Close, under mu, from anything.
	err     atomic.Pointer[error]
	release func() // once: closes the socket and makes the listener free

	mu      sync.Mutex
	waiting bool // awaitRoom runs

	waiter sync.WaitGroup
}

func newAttachment(l *Listener, peer address, sock *socket) *attachment {
	a := &attachment{l: l, peer: peer, sock: sock, room: make(chan struct{}, 1)}
	a.pairs = []datapath.QueuePair{a}
	a.release = sync.OnceFunc(func() {
		_ = sock.close() // datagrams: nothing is left that closing could lose
		l.release()
	})
	return a
}

// Info describes the attachment: no offloads either way, not connected.
func (a *attachment) Info() datapath.Info {
	return datapath.Info{Transport: "unixgram", Name: a.l.path}
}

// QueuePairs returns the one queue pair.
func (a *attachment) QueuePairs() []datapath.QueuePair { return a.pairs }

// Stats returns the counters.
func (a *attachment) Stats() *datapath.Stats { return &a.stats }

// ReadBatch waits for frames, as datapath.QueuePair says.
func (a *attachment) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (n int, err error) {
	if err := a.ended(); err != nil {
		return 0, err
	}
	var segs [][]byte // lent and not yet filled
	for n < len(frames) {
		if segs == nil {
			segs = get(0)
		}
		size, whole, from, err := a.sock.receive(segs, n == 0)
		if errors.Is(err, errNothing) {
			return n, nil
		}
		if err != nil {
			a.end(err)
			if n > 0 {
				return n, nil // the next call tells
			}
			return 0, a.ended()
		}
		switch {
		case *from != a.peer:
			a.stats.Drop(datapath.DropForeign) // queued before the socket was connected
		case !whole || size > datapath.MaxFrame:
			a.stats.Drop(datapath.DropTooLong)
		case size < minFrame:
			if !isGreeting(segs, size) {
				a.stats.Drop(datapath.DropTooShort)
			}
		default:
			frames[n] = datapath.Frame{Segs: segs, N: size}
			n++
			segs = nil
			a.stats.FromGuest.Frames.Add(1)
			a.stats.FromGuest.Bytes.Add(uint64(size))
			continue
		}
		if n > 0 { // a flood of bad ones must not hold back a good one
			return n, nil
		}
	}
	return n, nil
}

// isGreeting reports whether the size bytes in segs are vfkit's greeting.
func isGreeting(segs [][]byte, size int) bool {
	if size != len(greeting) {
		return false
	}
	var b [len(greeting)]byte
	n := 0
	for _, s := range segs {
		n += copy(b[n:], s)
	}
	return string(b[:n]) == greeting
}

// WriteBatch sends what the peer takes, as datapath.QueuePair says.
func (a *attachment) WriteBatch(frames []datapath.Frame) (n int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.ended(); err != nil {
		return 0, err
	}
	for n < len(frames) && !a.waiting {
		f := &frames[n]
		if why, bad := unsendable(f); bad {
			a.stats.Drop(why)
			n++
			continue
		}
		switch err := a.sock.send(f.Segs, f.N); {
		case err == nil:
			n++
			a.stats.ToGuest.Frames.Add(1)
			a.stats.ToGuest.Bytes.Add(uint64(f.N))
		case errors.Is(err, errTooBig):
			n++
			a.stats.Drop(datapath.DropTooLong)
		case errors.Is(err, errFull):
			a.waiting = true
			a.waiter.Go(a.awaitRoom)
		default:
			a.end(err)
			return 0, a.ended()
		}
	}
	return n, nil
}

// unsendable says why a frame can never be sent, if that is so.
func unsendable(f *datapath.Frame) (why datapath.DropReason, bad bool) {
	switch {
	case f.N > datapath.MaxFrame:
		return datapath.DropTooLong, true
	case f.N < minFrame:
		return datapath.DropTooShort, true
	case f.Hdr.Flags&virtio.FlagNeedsCSum != 0 || f.Hdr.GSOType != virtio.GSONone:
		return datapath.DropNotOffered, true // no header goes with it to say so
	}
	have := 0
	for _, s := range f.Segs {
		have += len(s)
	}
	return datapath.DropRejected, have < f.N
}

// awaitRoom waits until the socket is writable and lets writers go on.
func (a *attachment) awaitRoom() {
	if err := a.sock.awaitRoom(); err != nil {
		a.end(err)
	}
	a.mu.Lock()
	a.waiting = false
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

// Close gives the peer up, unblocks every call and waits for awaitRoom.
func (a *attachment) Close() error {
	closed := datapath.ErrClosed
	a.mu.Lock() // after this no writer starts awaitRoom
	a.err.Store(&closed)
	a.release()
	a.mu.Unlock()
	a.signal()
	a.waiter.Wait()
	return nil
}

// ended returns why the attachment ended, nil while it is live.
func (a *attachment) ended() error {
	if err := a.err.Load(); err != nil {
		return *err
	}
	return nil
}

// end ends a live attachment for an error of its socket.
func (a *attachment) end(err error) {
	if errors.Is(err, os.ErrClosed) {
		err = datapath.ErrClosed // no news, unless someone else closed it
	} else {
		// Refused, no such file, reset, not connected: the peer's socket is gone,
		// or has turned to another.
		err = fmt.Errorf("%w: %w", datapath.ErrPeerGone, err)
	}
	if a.err.CompareAndSwap(nil, &err) {
		a.release()
		a.signal()
	}
}
