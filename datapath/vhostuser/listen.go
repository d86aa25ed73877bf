package vhostuser

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/socketfile"
)

// acceptPause is the wait after an accept(2) that failed for want of
// descriptors or memory: what helps is that others let go of some.
const acceptPause = 100 * time.Millisecond

// MaxQueues is the most queue pairs a Listener can offer. The protocol has room
// for 128; more than a few serve no VM whose frames one process takes.
const MaxQueues = 16

// Options says what a Listener offers.
type Options struct {
	// Queues is the most pairs of queues the guest may use, 1 to MaxQueues; 1 if
	// zero.
	Queues int
	// Log gets what happens between calls of Accept. Nil discards it.
	Log *slog.Logger
}

// A Listener is the back-end of one VM's NIC: it waits for a front-end that
// connects to its socket. It serves one at a time. While that is there, another
// is accepted and closed at once, counted and logged: whoever has the guest keeps
// it. A front-end that left is not there from the moment the kernel knows it, so
// one that comes back at once is never refused.
type Listener struct {
	path  string
	pairs int
	log   *slog.Logger
	l     *net.UnixListener
	claim *socketfile.Claim

	closing chan struct{}
	serving sync.WaitGroup
	refused atomic.Uint64
	close   func() error // once

	mu       sync.Mutex
	closed   bool
	frontend *frontend     // the last that connected; nil before
	attached *frontend     // the one whose attachment has not been closed yet, if any
	changed  chan struct{} // closed, and made anew, when Accept should look again
}

// Listen listens on a unix socket at path, with mode 0600. A stale socket file
// is replaced; a live process's is refused, by name (socketfile.ErrInUse). The
// error is ErrUnsupported where the system is not Linux.
func Listen(path string, o Options) (*Listener, error) {
	if err := supported(); err != nil {
		return nil, fmt.Errorf("listen for a vhost-user front-end: %w", err)
	}
	if o.Queues == 0 {
		o.Queues = 1
	}
	if o.Queues < 1 || o.Queues > MaxQueues {
		return nil, fmt.Errorf("%d queue pairs, want 1 to %d", o.Queues, MaxQueues)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	claim, err := socketfile.New(path)
	if err != nil {
		return nil, err
	}
	l := &Listener{
		path: path, pairs: o.Queues, log: o.Log.With("listen", "vhost-user:"+path), claim: claim,
		closing: make(chan struct{}), changed: make(chan struct{}),
	}
	l.close = sync.OnceValue(l.shut)
	if err := l.listen(); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for a vhost-user front-end: %w", err), l.release())
	}
	l.serving.Go(l.serve)
	return l, nil
}

func (l *Listener) listen() error {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		return errors.Join(raw.Control(func(fd uintptr) { err = socketfile.Private(fd) }), err)
	}}
	listener, err := config.Listen(context.Background(), "unix", l.path)
	if err != nil {
		return err
	}
	l.l = listener.(*net.UnixListener)
	l.l.SetUnlinkOnClose(false) // the claim does, and looks whose it is
	return l.claim.Bound()
}

// serve accepts front-ends until Close.
func (l *Listener) serve() {
	var last, warned *frontend
	failing := false
	for {
		conn, err := l.l.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			if !failing {
				l.log.Warn("cannot accept the front-end's connection, trying again", "err", err)
			}
			failing = true
			select {
			case <-time.After(acceptPause):
			case <-l.closing:
			}
			continue
		}
		failing = false
		if last != nil {
			if !last.gone() {
				l.refused.Add(1)
				if warned != last { // once a front-end: another may try for ever
					l.log.Warn("refused a second front-end, the VM has one")
				}
				warned = last
				_ = conn.Close()
				continue
			}
			last.close() // its end may be on its way
		}
		last = newFrontend(conn, l.path, l.pairs, l.log, l.look)
		l.mu.Lock()
		l.frontend = last
		l.mu.Unlock()
		go last.serve() // its close waits
	}
}

// look makes Accept look again whether there is something to attach to.
func (l *Listener) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// Accept waits until a front-end is connected and its guest's driver has started
// a pair of queues, and returns the attachment. The one before has to be closed
// by then: Accept waits for that too. The same connection may give several, one
// after the other. The errors are ctx's and ErrClosed.
func (l *Listener) Accept(ctx context.Context) (datapath.Attachment, error) {
	for {
		a, changed := l.attach()
		if a != nil {
			return a, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-l.closing:
			return nil, datapath.ErrClosed
		}
	}
}

// attach returns an attachment to the front-end there is, if there is one to be
// had, and what is closed when there may be.
func (l *Listener) attach() (*attachment, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.frontend == nil || l.attached != nil {
		return nil, l.changed
	}
	a := l.frontend.dev.attach(l.released)
	if a != nil {
		l.attached = l.frontend
	}
	return a, l.changed
}

// released is called when the attachment has been closed.
func (l *Listener) released() {
	l.mu.Lock()
	f, last := l.attached, l.closed
	l.attached = nil
	l.mu.Unlock()
	if last {
		f.close()
	}
	l.look()
}

// Refused returns how many front-ends were refused while another was there.
func (l *Listener) Refused() uint64 { return l.refused.Load() }

// Close stops listening, removes the socket file if it is still ours, and
// unblocks Accept. An attachment lives on, and its connection with it. Closing
// again does nothing and returns what the first did.
func (l *Listener) Close() error { return l.close() }

func (l *Listener) shut() error {
	close(l.closing)
	err := l.release()
	l.serving.Wait()
	l.mu.Lock()
	l.closed = true
	f := l.frontend
	if f == l.attached {
		f = nil // released ends it
	}
	l.mu.Unlock()
	if f != nil {
		f.close()
	}
	return err
}

// release frees what Listen got, as far as it came.
func (l *Listener) release() (err error) {
	if l.l != nil {
		err = l.l.Close()
	}
	return errors.Join(err, l.claim.Release())
}
