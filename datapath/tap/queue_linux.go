package tap

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// maxIovec is how many segments one writev takes (UIO_MAXIOV), header included.
const maxIovec = 1024

// A queue is one queue pair: one file of the tap.
type queue struct {
	*attachment
	file *os.File
	raw  syscall.RawConn
	room chan struct{} // one buffered; see datapath.QueuePair.Room

	in    inbound // the reader's
	onEnd atomic.Pointer[func()]

	mu  sync.Mutex
	out outbound // guarded by mu
}

// inbound is the state of a ReadBatch under way. It lives here, and its function
// is made once, so that a call allocates nothing.
type inbound struct {
	frames []datapath.Frame
	get    func(n int) [][]byte
	n      int // frames filled
	bytes  uint64
	errno  unix.Errno

	lent  [][]byte // memory of the next frame
	iov   []unix.Iovec
	hdr   [virtio.HdrSize]byte
	over  [1]byte // reached only by a frame that is too long
	ready func(fd uintptr) bool
	try   func(fd uintptr)
}

// outbound is the state of a WriteBatch under way, likewise.
type outbound struct {
	frames []datapath.Frame
	n      int // frames done with: sent or dropped
	sent   uint64
	bytes  uint64
	errno  unix.Errno

	waiting bool // awaitRoom is running
	iov     []unix.Iovec
	hdr     [virtio.HdrSize]byte
	whole   []byte // a frame of too many segments, gathered; made when first needed
	now     func(fd uintptr)
}

func newQueue(a *attachment, f *os.File) (*queue, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("access tap file: %w", err)
	}
	if err := f.SetDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("put tap file on the poller: %w", err) // or reads would block
	}
	q := &queue{attachment: a, file: f, raw: raw, room: make(chan struct{}, 1)}
	q.in.ready = q.readReady
	q.in.try = func(fd uintptr) { q.readReady(fd) }
	q.out.now = q.writeNow
	return q, nil
}

// Control implements datapath.Pollable.
func (q *queue) Control(f func(fd uintptr)) error { return q.raw.Control(f) }

// OnEnd implements datapath.Pollable.
func (q *queue) OnEnd(ended func()) { q.onEnd.Store(&ended) }

// TryReadBatch implements datapath.Pollable.
func (q *queue) TryReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (int, error) {
	if err := q.ended(); err != nil {
		return 0, err
	}
	if len(frames) == 0 {
		return 0, nil
	}
	in := &q.in
	in.begin(frames, get)
	defer in.end()
	if err := q.raw.Control(in.try); err != nil {
		return 0, datapath.ErrClosed
	}
	if in.n == 0 && in.errno != 0 {
		q.leave(q.readError(in.errno))
		return 0, q.ended()
	}
	q.stats.FromGuest.Frames.Add(uint64(in.n))
	q.stats.FromGuest.Bytes.Add(in.bytes)
	return in.n, nil
}

// readError says why a read failed for good.
func (q *queue) readError(errno unix.Errno) error {
	if errno == unix.EBADFD { // the kernel's word that the interface is gone
		return datapath.ErrPeerGone
	}
	return fmt.Errorf("%w: read from tap %s: %w", datapath.ErrPeerGone, q.info.Name, errno)
}

// begin begins a ReadBatch.
func (in *inbound) begin(frames []datapath.Frame, get func(n int) [][]byte) {
	in.frames, in.get = frames, get
	in.n, in.bytes, in.errno = 0, 0, 0
}

// end ends it: the memory is the caller's again.
func (in *inbound) end() {
	in.frames, in.get, in.lent = nil, nil, nil
	clear(in.iov[:cap(in.iov)])
}

func (q *queue) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (int, error) {
	in := &q.in
	in.begin(frames, get)
	defer in.end()
	for in.n == 0 && len(frames) > 0 {
		if err := q.ended(); err != nil {
			return 0, err
		}
		err := q.raw.Read(in.ready)
		switch {
		case in.n > 0: // an error after that comes again
		case errors.Is(err, os.ErrClosed):
			return 0, datapath.ErrClosed
		case err != nil, in.errno == unix.EBADFD:
			// Either the kernel's word that the interface is gone (EBADFD, or
			// EPOLLERR, which the runtime calls not pollable), or leave has ended
			// the wait.
			q.leave(datapath.ErrPeerGone)
		case in.errno != 0:
			q.leave(q.readError(in.errno))
		}
	}
	q.stats.FromGuest.Frames.Add(uint64(in.n))
	q.stats.FromGuest.Bytes.Add(in.bytes)
	return in.n, nil
}

// readReady reads the frames that are there. It returns false, to be called
// again when the file is readable, if there are none.
func (q *queue) readReady(fd uintptr) bool {
	in := &q.in
	// Twice as many tries as frames: so dropping cannot keep it here for ever,
	// away from Close.
	for tries := 2 * len(in.frames); in.n < len(in.frames) && tries > 0; tries-- {
		if in.lent == nil {
			in.lent = in.get(0)
			in.layOut()
		}
		n, errno := readv(fd, in.iov)
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return in.n > 0
		default:
			in.errno = errno
			return true
		}
		n -= virtio.HdrSize
		switch {
		case n < etherHeader:
			q.stats.Drop(datapath.DropTooShort)
			continue // its memory is the next one's
		case n > datapath.MaxFrame:
			q.stats.Drop(datapath.DropTooLong)
			continue
		}
		f := &in.frames[in.n]
		f.Hdr.Parse(in.hdr[:])
		f.Segs, f.N = in.lent, n
		in.n++
		in.bytes += uint64(n)
		in.lent = nil
	}
	return true
}

// layOut makes the iovecs of the lent memory: the header before, and MaxFrame
// bytes of it at most, so that a longer frame shows by reaching over.
func (in *inbound) layOut() {
	in.iov = appendIovec(in.iov[:0], in.hdr[:])
	left := datapath.MaxFrame
	for _, s := range in.lent {
		s = s[:min(len(s), left)]
		in.iov = appendIovec(in.iov, s)
		left -= len(s)
	}
	in.iov = appendIovec(in.iov, in.over[:])
}

func (q *queue) WriteBatch(frames []datapath.Frame) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.ended(); err != nil {
		return 0, err
	}
	out := &q.out
	out.frames = frames
	out.n, out.sent, out.bytes, out.errno = 0, 0, 0, 0
	err := q.raw.Control(out.now) // not Write: that would wait for its turn behind awaitRoom
	out.frames = nil
	clear(out.iov[:cap(out.iov)]) // the memory is the caller's again
	q.stats.ToGuest.Frames.Add(out.sent)
	q.stats.ToGuest.Bytes.Add(out.bytes)
	switch {
	case err != nil:
		return out.n, datapath.ErrClosed
	case out.errno == unix.EBADFD:
		q.leave(datapath.ErrPeerGone)
		return out.n, q.ended()
	case out.errno == unix.EAGAIN && !out.waiting:
		out.waiting = true
		q.wg.Go(q.awaitRoom)
	}
	return out.n, nil
}

// writeNow writes frames until one does not fit or the interface is gone.
func (q *queue) writeNow(fd uintptr) {
	out := &q.out
	for ; out.n < len(out.frames); out.n++ {
		f := &out.frames[out.n]
		switch {
		case f.N < etherHeader:
			q.stats.Drop(datapath.DropTooShort)
			continue
		case f.N > datapath.MaxFrame:
			q.stats.Drop(datapath.DropTooLong)
			continue
		}
		out.layOut(f)
		_, errno := writev(fd, out.iov)
		for errno == unix.EINTR {
			_, errno = writev(fd, out.iov)
		}
		switch errno {
		case 0:
			out.sent++
			out.bytes += uint64(f.N)
		case unix.EAGAIN, unix.EBADFD:
			out.errno = errno
			return
		default:
			q.stats.Drop(dropReason(errno))
		}
	}
}

// dropReason says why the kernel refused a frame (tun_get_user in
// drivers/net/tun.c).
func dropReason(errno unix.Errno) datapath.DropReason {
	switch errno {
	case unix.EIO: // the guest has set its interface down
		return datapath.DropLinkDown
	case unix.ENOMEM, unix.ENOBUFS:
		return datapath.DropNoMemory
	}
	return datapath.DropRejected // EINVAL: a header impossible for the frame
}

// layOut makes the iovecs of a frame, header first.
func (out *outbound) layOut(f *datapath.Frame) {
	f.Hdr.Put(out.hdr[:])
	out.iov = appendIovec(out.iov[:0], out.hdr[:])
	left := f.N
	for i, s := range f.Segs {
		if len(out.iov) == maxIovec-1 { // the last there is takes all the rest
			out.iov = appendIovec(out.iov, out.gather(f.Segs[i:], left))
			return
		}
		s = s[:min(len(s), left)]
		out.iov = appendIovec(out.iov, s)
		left -= len(s)
	}
}

// gather copies the rest of a frame, left bytes, into one segment.
func (out *outbound) gather(rest [][]byte, left int) []byte {
	if out.whole == nil {
		out.whole = make([]byte, 0, datapath.MaxFrame)
	}
	b := out.whole[:0]
	for _, s := range rest {
		b = append(b, s[:min(len(s), left-len(b))]...)
	}
	return b
}

// appendIovec appends a segment; an empty one needs none.
func appendIovec(iov []unix.Iovec, s []byte) []unix.Iovec {
	if len(s) == 0 {
		return iov
	}
	iov = append(iov, unix.Iovec{Base: &s[0]})
	iov[len(iov)-1].SetLen(len(s))
	return iov
}

// awaitRoom waits until the file is writable again, after a short WriteBatch, or
// has ended, and tells the writer.
func (q *queue) awaitRoom() {
	_ = q.raw.Write(writable) // an end is for the next WriteBatch to find
	q.mu.Lock()
	q.out.waiting = false
	q.mu.Unlock()
	q.fire()
}

// writable asks by itself: the edge that the runtime waits for may have passed
// between the short write and the wait.
func writable(fd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	for {
		n, err := unix.Poll(fds, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0 || err != nil
		}
	}
}

func (q *queue) Room() <-chan struct{} { return q.room }

// fireEnd wakes all that wait: the attachment has ended.
func (q *queue) fireEnd() {
	q.fire()
	if ended := q.onEnd.Swap(nil); ended != nil {
		(*ended)()
	}
}

// fire wakes a writer that waits for room.
func (q *queue) fire() {
	select {
	case q.room <- struct{}{}:
	default: // a value is there already
	}
}
