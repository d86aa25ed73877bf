package tap

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
)

// checkEvery is how often the kernel is asked whether the interface is still
// there, beside its own telling (see the package comment). A guest that has gone
// has to be noticed within a second.
const checkEvery = 250 * time.Millisecond

// An attachment is a tap's file side.
type attachment struct {
	info  datapath.Info
	stats datapath.Stats
	pairs []datapath.QueuePair
	queue []*queue   // the same
	ns    *namespace // the guest's; its path tells that it was deleted

	gone     atomic.Pointer[error] // why every call fails until Close, if so
	closed   atomic.Bool
	closing  sync.Once
	closeErr error
	stop     chan struct{}  // Close was called
	wg       sync.WaitGroup // watch, and the queues' awaitRoom
}

// newAttachment takes the files over when it succeeds.
func newAttachment(info datapath.Info, files []*os.File, ns *namespace) (*attachment, error) {
	a := &attachment{info: info, ns: ns, stop: make(chan struct{})}
	for _, f := range files {
		q, err := newQueue(a, f)
		if err != nil {
			return nil, err
		}
		a.queue = append(a.queue, q)
		a.pairs = append(a.pairs, q)
	}
	a.wg.Go(a.watch)
	return a, nil
}

func (a *attachment) Info() datapath.Info              { return a.info }
func (a *attachment) QueuePairs() []datapath.QueuePair { return a.pairs }
func (a *attachment) Stats() *datapath.Stats           { return &a.stats }

// ended returns the error of every call once the attachment has ended.
func (a *attachment) ended() error {
	if a.closed.Load() {
		return datapath.ErrClosed
	}
	if err := a.gone.Load(); err != nil {
		return *err
	}
	return nil
}

// watch notices an end that the poller missed, or that the kernel has yet to
// carry out: a deleted namespace lives on while connections that its processes
// left wait for a last acknowledgement, or while our own files hold it.
func (a *attachment) watch() {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for a.gone.Load() == nil {
		select {
		case <-a.stop:
			return
		case <-tick.C:
		}
		if a.ns != nil && !a.ns.named() {
			a.leave(fmt.Errorf("%w: network namespace %s was deleted", datapath.ErrPeerGone, a.ns.path))
		} else if !a.queue[0].attached() {
			a.leave(datapath.ErrPeerGone)
		}
	}
}

// leave notes that the guest has gone, the first time, and wakes all that wait.
func (a *attachment) leave(why error) {
	if !a.gone.CompareAndSwap(nil, &why) {
		return
	}
	for _, q := range a.queue {
		_ = q.file.SetDeadline(time.Unix(1, 0)) // long past: ends waiting now
		q.fireEnd()
	}
}

// Close also waits for calls under way, and deletes an interface that Open made.
func (a *attachment) Close() error {
	a.closing.Do(func() {
		a.closed.Store(true)
		close(a.stop)
		for _, q := range a.queue {
			q.mu.Lock() // after it nobody starts an awaitRoom
			a.closeErr = errors.Join(a.closeErr, q.file.Close())
			q.mu.Unlock()
			q.fireEnd()
		}
		a.wg.Wait()
	})
	return a.closeErr
}

// attached asks the kernel whether the file still has an interface.
func (q *queue) attached() (is bool) {
	err := q.raw.Control(func(fd uintptr) {
		ifr, err := unix.NewIfreq("")
		is = err == nil && !errors.Is(unix.IoctlIfreq(int(fd), unix.TUNGETIFF, ifr), unix.EBADFD)
	})
	return err != nil || is // a closed file is Close's to tell
}
