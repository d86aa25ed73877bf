package qemustream

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

// A Listener waits for a VMM that connects (QEMU's -netdev stream,server=off).
// It has one VM, so one connection is served at a time. While its peer is there,
// another is accepted and closed at once, counted and logged: whoever has the
// guest keeps it. A peer that left is not there from the moment the kernel knows
// it, whether or not its attachment has been read to the end or closed; so the
// connection of a VMM that was started again right away waits for Accept and is
// never refused. That matters since QEMU 7.2 connects only once. One that is gone
// again before its turn is dropped: its successor does not wait behind it.
type Listener struct {
	name  string
	log   *slog.Logger
	l     net.Listener
	claim *socketfile.Claim // nil for tcp

	next    chan *attachment
	closing chan struct{}
	serving sync.WaitGroup
	refused atomic.Uint64

	close func() error // once
}

// Listen listens on a unix socket at a path, with mode 0600, or on a TCP address
// HOST:PORT. A stale socket file is replaced; a live process's is refused, by
// name (socketfile.ErrInUse). log, which is not nil, gets what happens between
// calls of Accept.
func Listen(network, address string, log *slog.Logger) (*Listener, error) {
	l := &Listener{
		name:    network + ":" + address,
		next:    make(chan *attachment),
		closing: make(chan struct{}),
	}
	l.log = log.With("listen", l.name)
	l.close = sync.OnceValue(l.shut)
	var config net.ListenConfig
	if network == "unix" {
		claim, err := socketfile.New(address)
		if err != nil {
			return nil, err
		}
		l.claim = claim
		config.Control = func(_, _ string, raw syscall.RawConn) (err error) {
			return errors.Join(raw.Control(func(fd uintptr) { err = socketfile.Private(fd) }), err)
		}
	}
	err := l.listen(config, network, address)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for a VMM: %w", err), l.release())
	}
	l.serving.Go(l.serve)
	return l, nil
}

func (l *Listener) listen(config net.ListenConfig, network, address string) (err error) {
	if l.l, err = config.Listen(context.Background(), network, address); err != nil {
		return err
	}
	if unix, ok := l.l.(*net.UnixListener); ok {
		unix.SetUnlinkOnClose(false) // the claim does, and looks whose it is
		return l.claim.Bound()
	}
	return nil
}

// serve accepts until Close.
func (l *Listener) serve() {
	var live, warned *attachment
	failing := false
	for {
		conn, err := l.l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			if !failing {
				l.log.Warn("cannot accept the VMM's connection, trying again", "err", err)
			}
			failing = true
			select {
			case <-time.After(acceptPause):
			case <-l.closing:
			}
			continue
		}
		failing = false
		if live != nil && live.alive() {
			l.refused.Add(1)
			if warned != live { // once an attachment: a peer may try for ever
				l.log.Warn("refused a second connection, the VM is attached", "peer", conn.RemoteAddr())
			}
			warned = live
			_ = conn.Close()
			continue
		}
		a, err := newAttachment(conn.(Conn), l.name)
		if err != nil {
			l.log.Warn("cannot use the VMM's connection", "err", err)
			continue
		}
		live = a
		select {
		case l.next <- a:
		case <-l.closing:
			_ = a.Close()
			return
		}
	}
}

// Accept waits for the VMM's next connection, one that has not hung up yet. The errors are ctx's and
// ErrClosed.
func (l *Listener) Accept(ctx context.Context) (datapath.Attachment, error) {
	for {
		select {
		case a := <-l.next:
			if a.alive() {
				return a, nil
			}
			_ = a.Close()
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-l.closing:
			return nil, datapath.ErrClosed
		}
	}
}

// Refused returns how many connections were refused while the VM was attached.
func (l *Listener) Refused() uint64 { return l.refused.Load() }

// Close stops listening, removes the socket file if it is still ours, and
// unblocks Accept. Attachments live on. Closing again does nothing and returns
// what the first did.
func (l *Listener) Close() error { return l.close() }

func (l *Listener) shut() error {
	close(l.closing)
	err := l.release()
	l.serving.Wait()
	return err
}

// release frees what Listen got, as far as it came.
func (l *Listener) release() (err error) {
	if l.l != nil {
		err = l.l.Close()
	}
	if l.claim != nil {
		err = errors.Join(err, l.claim.Release())
	}
	return err
}
