package relay

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

// # Theory of operation
//
// A TCP flow is two streams that end on their own:
//
//	open ──┬─ client's end ──► half-closed by the client ──┬─ guest's end ──► ended
//	       └─ guest's end ───► half-closed by the guest ───┘   client's end
//
// The end of a stream is passed on as an end and leaves the other stream alone
// for as long as its peers live: both are probed from then on, and only a
// stream on which nothing has passed for Options.HalfClose is given up. Anything
// else that ends a stream, a reset above all, resets both sides: a peer that
// reads an end may rely on having read everything (C-13).

// A Half is which side has ended its stream.
type Half uint8

// The halves.
const (
	HalfNone   Half = iota // both streams are open
	HalfClient             // the client ended its stream, the guest has not
	HalfGuest              // the guest ended its stream, the client has not
)

// An End is why a flow ended.
type End uint8

// The ends, with their words in String.
const (
	EndClosed      End = iota // both sides ended their streams
	EndClientReset            // the client reset the connection or vanished
	EndGuestReset             // the guest reset the connection or vanished
	EndIdle                   // half-closed, and nothing passed for Options.HalfClose
	EndAborted                // by us: withdrawn, drained, or the VM went
)

// String returns the end's word, as in logs and metrics.
func (e End) String() string {
	return [...]string{"closed", "client-reset", "guest-reset", "idle", "aborted"}[e]
}

// Options says how TCP relays.
type Options struct {
	// HalfClose is how long a half-closed flow may pass nothing; 0 means for
	// ever.
	HalfClose time.Duration
	// ToGuest and ToHost count the bytes of each direction; not nil.
	ToGuest, ToHost *Meter
	// Halved is called when one side has ended its stream first. It may be nil.
	Halved func(Half)
}

// TCP relays between client and guest until both streams have ended or either
// side is reset, and says why. It owns both: they are closed when it returns. To
// end it early, abort either of them.
func TCP(client Conn, guest GuestConn, o Options) End {
	f := &tcpFlow{client: client, guest: guest, opts: o}
	guest.SetMeters(o.ToHost, o.ToGuest)
	var other sync.WaitGroup
	other.Go(f.toHost)
	f.toGuest()
	other.Wait()
	return f.finish()
}

// A tcpFlow is the state of one TCP.
type tcpFlow struct {
	client Conn
	guest  GuestConn
	opts   Options

	mu     sync.Mutex
	ended  int  // streams
	reset  bool // both sides were aborted, because of:
	end    End  //
	idle   *time.Timer
	passed int64 // bytes, when idle was last looked at
}

// toGuest carries the client's stream.
func (f *tcpFlow) toGuest() {
	_, err := f.guest.ReadFrom(f.client)
	if err == nil {
		err = ignoreNotConnected(f.guest.CloseWrite())
	}
	f.streamEnded(HalfClient, err)
}

// toHost carries the guest's stream.
func (f *tcpFlow) toHost() {
	_, err := f.guest.WriteTo(f.client)
	if err == nil {
		if err = ignoreNotConnected(f.client.CloseWrite()); err != nil {
			err = &ClientError{Err: err}
		}
	}
	f.streamEnded(HalfGuest, err)
}

// ignoreNotConnected passes over a side that has ended by itself meanwhile: its
// own stream says how.
func ignoreNotConnected(err error) error {
	if errors.Is(err, syscall.ENOTCONN) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// streamEnded is told how the stream of one side ended.
func (f *tcpFlow) streamEnded(side Half, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended++
	if err != nil {
		f.abort(endOf(err))
		return
	}
	if f.ended == 2 || f.reset {
		return
	}
	if f.opts.Halved != nil {
		f.opts.Halved(side)
	}
	// A side that cannot be probed is found by the bound.
	_ = f.client.KeepAlive()
	_ = f.guest.KeepAlive()
	if f.opts.HalfClose > 0 {
		f.passed = f.total()
		f.idle = time.AfterFunc(f.opts.HalfClose, f.checkIdle)
	}
}

// endOf lays an error at the right door.
func endOf(err error) End {
	var client *ClientError
	switch {
	case errors.Is(err, net.ErrClosed):
		return EndAborted
	case errors.As(err, &client):
		return EndClientReset
	}
	return EndGuestReset
}

func (f *tcpFlow) total() int64 { return int64(f.opts.ToGuest.Bytes() + f.opts.ToHost.Bytes()) }

// checkIdle gives up a half-closed flow that passed nothing.
func (f *tcpFlow) checkIdle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended == 2 {
		return
	}
	if passed := f.total(); passed != f.passed {
		f.passed = passed
		f.idle.Reset(f.opts.HalfClose)
		return
	}
	f.abort(EndIdle)
}

// abort resets both sides, the first time, and keeps why. f.mu is held.
func (f *tcpFlow) abort(why End) {
	if f.reset {
		return
	}
	f.reset, f.end = true, why
	f.client.Abort()
	f.guest.Abort()
}

// finish frees what is left when both streams have ended.
func (f *tcpFlow) finish() End {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.idle != nil {
		f.idle.Stop()
	}
	if !f.reset {
		_ = f.client.Close()
		_ = f.guest.Close()
	}
	return f.end
}
