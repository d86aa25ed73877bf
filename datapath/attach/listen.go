package attach

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/qemustream"
	"github.com/culvertnet/culvert/datapath/tap"
	"github.com/culvertnet/culvert/datapath/unixgram"
	"github.com/culvertnet/culvert/datapath/vhostuser"
)

// A Listener gives out a VM's attachments, one life of the VM after another.
type Listener interface {
	// Accept waits until the transport is connected and returns the attachment,
	// which the caller owns. The one before has to be closed by then. Only one
	// goroutine may wait. The errors are ctx's, ErrClosed, and what is wrong for
	// longer than a moment (no permission, say): then too the next Accept tries
	// again. That the VM is not there yet, or that the process is short of
	// descriptors to accept it with, is waited out.
	Accept(ctx context.Context) (datapath.Attachment, error)
	// Close stops listening and unblocks Accept. An accepted attachment lives on.
	// Closing again does nothing.
	Close() error
}

var (
	_ Listener = (*qemustream.Listener)(nil)
	_ Listener = (*qemustream.Dialer)(nil)
	_ Listener = (*unixgram.Listener)(nil)
	_ Listener = (*vhostuser.Listener)(nil)
	_ Listener = (*retrier)(nil)
)

// Options is what a Spec does not say.
type Options struct {
	// MTU is set on the interface, in bytes without the Ethernet header, where
	// we have one (tap); 0 leaves the kernel's. Elsewhere the VMM sets it.
	MTU int
	// Memory gives the attachments of a memory spec; nil where there are none.
	// It returns soon after its ctx has ended.
	Memory func(ctx context.Context) (datapath.Attachment, error)
	// Log gets what happens between calls of Accept, and what it waits for. Nil
	// discards that.
	Log *slog.Logger
}

// Listen opens what spec names, as far as that is possible without the VM:
// sockets are bound, with mode 0600 for a file, a stale one replaced and a live
// process's refused by name. A tap is made, and a VMM dialled, by Accept. The
// error is ErrUnsupported for a transport that this version, or this system,
// does not have.
func Listen(spec Spec, o Options) (Listener, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	l, err := listen(spec, o)
	if err != nil {
		return nil, fmt.Errorf("attach %s: %w", spec, err)
	}
	return l, nil
}

func listen(spec Spec, o Options) (Listener, error) {
	switch spec.Transport {
	case QEMU:
		if spec.Dial {
			return qemustream.NewDialer(spec.Network, spec.Address), nil
		}
		return orNone(qemustream.Listen(spec.Network, spec.Address, o.Log))
	case Unixgram:
		return orNone(unixgram.Listen(spec.Address, o.Log))
	case Tap:
		config := tap.Config{Name: spec.Address, NetNS: spec.NetNS, Queues: spec.Queues, MTU: o.MTU}
		if err := tap.Check(config); err != nil {
			return nil, fmt.Errorf("attach %s: %w", spec, err)
		}
		log := o.Log.With("attach", spec.String())
		return newRetrier(log, tapNotYet(spec), func(context.Context) (datapath.Attachment, error) { return tap.Open(config) }), nil
	case Memory:
		if o.Memory == nil {
			return nil, errors.New("memory joins a VM inside this process, and there is none: it is for the demo and tests")
		}
		return newRetrier(o.Log, func(error) bool { return false }, o.Memory), nil
	case VhostUser:
		return orNone(vhostuser.Listen(spec.Address, vhostuser.Options{Queues: spec.Queues, Log: o.Log}))
	case Packet:
		return nil, fmt.Errorf("%s is not available in this version, qemu, unixgram, vhost-user and tap are: %w", spec.Transport, datapath.ErrUnsupported)
	}
	return nil, fmt.Errorf("unknown transport %q, want %s", spec.Transport, forms)
}

// orNone makes a nil pointer a nil Listener.
func orNone[L Listener](l L, err error) (Listener, error) {
	if err != nil {
		return nil, err
	}
	return l, nil
}

// tapNotYet returns what tells a tap that cannot be opened yet, because its
// namespace does not exist or another process still has it, from one that
// cannot be opened.
func tapNotYet(spec Spec) func(error) bool {
	return func(err error) bool {
		if errors.Is(err, syscall.EBUSY) {
			return true
		}
		if spec.NetNS == "" || !errors.Is(err, fs.ErrNotExist) {
			return false
		}
		_, err = os.Stat(spec.NetNS) // and not /dev/net/tun, say
		return errors.Is(err, fs.ErrNotExist)
	}
}

// retryEvery is the time from one try to open a transport to the next.
const retryEvery = 250 * time.Millisecond

// A retrier is a Listener for what is opened, not accepted.
type retrier struct {
	log    *slog.Logger
	notYet func(error) bool
	open   func(context.Context) (datapath.Attachment, error)
	last   time.Time // of the last try; Accept's

	closed context.Context
	close  context.CancelFunc
}

func newRetrier(log *slog.Logger, notYet func(error) bool, open func(context.Context) (datapath.Attachment, error)) *retrier {
	r := &retrier{log: log, notYet: notYet, open: open}
	r.closed, r.close = context.WithCancel(context.Background())
	return r
}

// Accept opens, one try each 250 ms, for as long as it is too early. What is
// waited for is logged when it changes.
func (r *retrier) Accept(ctx context.Context) (datapath.Attachment, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.closed, cancel)()
	said := ""
	for {
		select {
		case <-time.After(time.Until(r.last.Add(retryEvery))):
		case <-ctx.Done():
		}
		if r.closed.Err() != nil {
			return nil, datapath.ErrClosed
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		r.last = time.Now()
		a, err := r.open(ctx)
		switch {
		case err == nil:
			return a, nil
		case r.closed.Err() != nil:
			return nil, datapath.ErrClosed
		case !r.notYet(err):
			return nil, err
		case err.Error() != said:
			said = err.Error()
			r.log.Info("waiting for the transport", "err", err)
		}
	}
}

// Close unblocks Accept.
func (r *retrier) Close() error {
	r.close()
	return nil
}
