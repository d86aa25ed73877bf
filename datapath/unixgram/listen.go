package unixgram

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/socketfile"
)

// greeting is what vfkit sends before its first frame, and after a reconnect.
const greeting = "VFKT"

// acceptPause is the wait after there was no descriptor to be had: what helps is
// that others let go of some.
const acceptPause = 100 * time.Millisecond

// A Listener has a bound socket and gives out one attachment at a time.
type Listener struct {
	path  string
	log   *slog.Logger
	sock  *socket
	claim *socketfile.Claim

	free    chan struct{} // holds a value while no attachment is live
	closing chan struct{}
	said    string // the last complaint about a sender; Accept's

	close func() error // once
}

// Listen binds a socket at path, with mode 0600. A stale socket file is
// replaced; a live process's is refused, by name (socketfile.ErrInUse). log,
// which is not nil, gets what is wrong with a sender. The error is
// ErrUnsupported where the system is not Linux.
func Listen(path string, log *slog.Logger) (*Listener, error) {
	claim, err := socketfile.New(path)
	if err != nil {
		return nil, err
	}
	sock, err := bind(path)
	if err == nil {
		err = claim.Bound()
	}
	if err != nil {
		if sock != nil {
			err = errors.Join(err, sock.close())
		}
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", path, err), claim.Release())
	}
	l := &Listener{
		path:    path,
		log:     log.With("listen", "unixgram:"+path),
		sock:    sock,
		claim:   claim,
		free:    make(chan struct{}, 1),
		closing: make(chan struct{}),
	}
	l.close = sync.OnceValue(l.shut)
	l.free <- struct{}{}
	return l, nil
}

// Accept waits until the attachment before has ended, and then for the first
// sender, which becomes the peer of the attachment it returns. The errors are
// ctx's and ErrClosed, or the socket's own, which is not expected; being out of
// descriptors is logged and waited out.
func (l *Listener) Accept(ctx context.Context) (datapath.Attachment, error) {
	select {
	case <-l.free:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-l.closing:
		return nil, datapath.ErrClosed
	}
	peer, sock, err := l.acceptPeer(ctx)
	if err != nil {
		l.free <- struct{}{}
		select {
		case <-l.closing:
			return nil, datapath.ErrClosed
		default:
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("accept on %s: %w", l.path, err)
	}
	return newAttachment(l, peer, sock), nil
}

// acceptPeer waits for a datagram from a sender that can be answered, connects
// to it, and returns its address and a socket for the attachment.
func (l *Listener) acceptPeer(ctx context.Context) (address, *socket, error) {
	defer l.sock.interruptible(ctx)()
	for {
		from, begin, size, err := l.sock.peek()
		if err != nil {
			return address{}, nil, err
		}
		err = errNotAFrame
		if size >= minFrame || size == len(greeting) && string(begin[:]) == greeting {
			sock, dupErr := l.sock.dup()
			if dupErr != nil { // out of descriptors: the datagram waits as well
				l.complain(from, dupErr)
				select {
				case <-time.After(acceptPause):
				case <-ctx.Done():
				case <-l.closing:
				}
				continue
			}
			if err = sock.connect(from); err == nil {
				l.said = ""
				return from, sock, nil
			}
			err = errors.Join(err, sock.close())
		}
		l.complain(from, err)
		if err := l.sock.discard(); err != nil {
			return address{}, nil, err
		}
	}
}

// complain logs what is wrong with a sender, once: it may try for ever.
func (l *Listener) complain(from address, err error) {
	if s := fmt.Sprint(from, err); s != l.said {
		l.said = s
		l.log.Warn("cannot take the sender of a datagram for the VM", "sender", from, "err", err)
	}
}

// errNotAFrame is what is wrong with a first datagram that is shorter than an
// Ethernet header.
var errNotAFrame = errors.New("it is no Ethernet frame")

// release makes the socket free again after an attachment's end.
func (l *Listener) release() {
	l.sock.disconnect()
	l.free <- struct{}{}
}

// Close unblocks Accept and removes the socket file if it is still ours. A live
// attachment lives on. Closing again does nothing and returns what the first
// did.
func (l *Listener) Close() error { return l.close() }

func (l *Listener) shut() error {
	close(l.closing)
	return errors.Join(l.sock.close(), l.claim.Release())
}
