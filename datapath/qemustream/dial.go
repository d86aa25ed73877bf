package qemustream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/datapath"
)

const (
	// dialEvery is the time from one try to the next.
	dialEvery = 250 * time.Millisecond
	// dialTimeout ends a try that nobody answers.
	dialTimeout = 5 * time.Second
)

// A Dialer connects to a VMM that listens (QEMU's -netdev stream,server=on),
// and again when that connection has ended: the form that outlives a restart of
// either side.
type Dialer struct {
	network, address string

	mu   sync.Mutex // held by the Accept under way
	last time.Time  // of the last try

	closed context.Context
	close  context.CancelFunc
}

// NewDialer makes a Dialer for a unix socket's path or a TCP HOST:PORT. It does
// not dial yet.
func NewDialer(network, address string) *Dialer {
	d := &Dialer{network: network, address: address}
	d.closed, d.close = context.WithCancel(context.Background())
	return d
}

// Accept dials until a connection stands, one try each 250 ms, counted also from
// the last of the call before: a VMM that hangs up at once is not hammered. That
// nothing is there yet (no file, refused, no route, no answer) is no error;
// another is returned at once (no permission, an unknown host), beside ctx's and
// ErrClosed.
func (d *Dialer) Accept(ctx context.Context) (datapath.Attachment, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.closed, cancel)()
	for {
		select {
		case <-time.After(time.Until(d.last.Add(dialEvery))):
		case <-ctx.Done():
			return nil, d.ended(ctx)
		}
		d.last = time.Now()
		conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, d.network, d.address)
		switch {
		case err == nil:
			return New(conn.(Conn), d.network+":"+d.address)
		case ctx.Err() != nil:
			return nil, d.ended(ctx)
		case !notUpYet(err):
			return nil, fmt.Errorf("connect to the VMM: %w", err)
		}
	}
}

func (d *Dialer) ended(ctx context.Context) error {
	if d.closed.Err() != nil {
		return datapath.ErrClosed
	}
	return ctx.Err()
}

// notUpYet reports whether a dial failed as it does before a VMM listens, or
// while it is busy or its host is away.
func notUpYet(err error) bool {
	for _, errno := range []syscall.Errno{
		syscall.ENOENT, syscall.ECONNREFUSED, syscall.EAGAIN, syscall.ECONNRESET, syscall.ECONNABORTED,
		syscall.ETIMEDOUT, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.ENETDOWN,
	} {
		if errors.Is(err, errno) {
			return true
		}
	}
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// Close unblocks Accept. Attachments live on. Closing again does nothing and
// returns nil.
func (d *Dialer) Close() error {
	d.close()
	return nil
}
