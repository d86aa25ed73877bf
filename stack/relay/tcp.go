package relay

import (
	"context"
	"errors"
	"net"
	"sync"
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
// for as long as its peers live. Anything else that ends a stream, a reset
// above all, resets both sides: a peer that reads an end may rely on having read
// everything (C-13). Two things make that harder than it sounds.
//
// A connection tells of its reset once, to whichever of the two copies asks
// first; the other one then finds an end of stream. So an end that comes while
// our own stream to that side is still open counts only if the side is not Gone.
//
// A side that is reset may have sent something just before: a server that
// answers without reading all of the request does. When it is the writing copy
// that meets the reset, the reading one goes on for drainAfterReset, so that the
// peer gets what it would have got without a relay in between.
//
// Nobody reads a side that has ended its stream, so nobody would notice its
// death. Both sides of a half-closed flow are probed from then on, and a flow
// that stays so is watched: until that side is Gone, or nothing has passed for
// Options.HalfClose, pauses of the guest not counted.

const (
	// drainAfterReset is how long what a side sent before its reset may take to
	// pass. It lies in memory already; only the peer's reading takes time.
	drainAfterReset = time.Second
	// watchAfter is how long a flow is half-closed before it is watched. Most
	// end their other stream at once, and pay nothing for the watch.
	watchAfter = 100 * time.Millisecond
)

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
	// Halved is called when one side has ended its stream first, before the end
	// is passed on. It may be nil.
	Halved func(Half)
}

// TCP is Start for who has nothing to do meanwhile.
func TCP(client Conn, guest GuestConn, o Options) End {
	end := make(chan End, 1)
	Start(client, guest, o, func(e End) { end <- e })
	return <-end
}

// Start relays between client and guest until both streams have ended or either
// side is reset, and then calls ended with the reason, once, from any goroutine
// and under no lock. It owns both: they are closed by then. To end it early, abort
// either of them.
func Start(client Conn, guest GuestConn, o Options, ended func(End)) {
	f := &tcpFlow{client: client, guest: guest, opts: o, ended: ended, open: 2, parts: 2}
	guest.SetMeters(o.ToHost, o.ToGuest)
	guest.Copy(client, f.copied)
}

// A tcpFlow is the state of one TCP.
type tcpFlow struct {
	client Conn
	guest  GuestConn
	opts   Options
	ended  func(End)

	mu     sync.Mutex
	parts  int  // what has not ended: copies, and the watch
	open   int  // streams that have not ended
	doomed bool // a side is reset; the other is about to be, because of:
	end    End  //
	reset  bool // both sides were aborted
	halved time.Time
	timer  *time.Timer        // of the half-closed state, or of the drain
	unwait context.CancelFunc // ends the watch
}

// copied is told how the copy of the stream that comes from a side has ended.
func (f *tcpFlow) copied(from Half, err error) {
	f.streamEnded(from, err)
	f.leave()
}

// leave ends one part of the flow, and the flow with the last.
func (f *tcpFlow) leave() {
	f.mu.Lock()
	f.parts--
	last := f.parts == 0
	f.mu.Unlock()
	if last {
		f.ended(f.finish())
	}
}

// streamEnded is told how the stream that comes from a side has ended.
func (f *tcpFlow) streamEnded(from Half, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open--
	if f.doomed {
		f.abort(f.end)
		return
	}
	src, dst := Side(f.guest), Side(f.client)
	if from == HalfClient {
		src, dst = dst, src
	}
	switch why := endOf(err); {
	case err == nil && f.open == 1 && gone(src):
		f.abort(resetBy(from)) // the other copy was told, or is about to be
	case err == nil:
		if f.open == 1 {
			f.halfClose(from)
		} else {
			f.stopWaiting()
		}
		// It fails when dst is gone, which dst's own stream tells.
		_ = dst.CloseWrite()
	case why != EndAborted && why != resetBy(from) && f.open == 1:
		f.doomed, f.end = true, why
		f.timer = time.AfterFunc(drainAfterReset, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.abort(why)
		})
	default:
		f.abort(why)
	}
}

// endOf lays the error of a copy at the right door.
func endOf(err error) End {
	var client *ClientError
	switch {
	case err == nil:
		return EndClosed
	case errors.Is(err, net.ErrClosed):
		return EndAborted
	case errors.As(err, &client):
		return EndClientReset
	}
	return EndGuestReset
}

func resetBy(side Half) End {
	if side == HalfClient {
		return EndClientReset
	}
	return EndGuestReset
}

func gone(s Side) bool {
	w, ok := s.(Watcher)
	return ok && w.Gone()
}

// halfClose begins the half-closed state. f.mu is held.
func (f *tcpFlow) halfClose(by Half) {
	if f.opts.Halved != nil {
		f.opts.Halved(by)
	}
	// A side that cannot be probed is found by the bound.
	_ = f.client.KeepAlive()
	_ = f.guest.KeepAlive()
	f.halved = time.Now()
	f.timer = time.AfterFunc(watchAfter, func() { f.watch(by) })
}

// watch begins to look after a flow that stays half-closed.
func (f *tcpFlow) watch(by Half) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open != 1 || f.reset || f.doomed {
		return
	}
	if f.opts.HalfClose > 0 {
		f.timer = time.AfterFunc(f.idleIn(), f.checkIdle)
	}
	var side any = f.guest
	if by == HalfClient {
		side = f.client
	}
	if w, ok := side.(Watcher); ok {
		var ctx context.Context
		ctx, f.unwait = context.WithCancel(context.Background())
		f.parts++ // a copy lives, so it was not the last
		go func() {
			f.waitGone(ctx, w, by)
			f.leave()
		}()
	}
}

// waitGone ends the flow when the side that has ended its stream dies.
func (f *tcpFlow) waitGone(ctx context.Context, w Watcher, by Half) {
	err := w.WaitGone(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.open == 0: // our own end of stream can look like its death
	case err == nil:
		f.abort(resetBy(by))
	case errors.Is(err, net.ErrClosed):
		f.abort(EndAborted)
	}
}

// idleIn returns for how long nothing more may pass. f.mu is held.
func (f *tcpFlow) idleIn() time.Duration {
	idle := time.Since(f.halved)
	for _, last := range []time.Time{f.opts.ToGuest.Last(), f.opts.ToHost.Last(), f.guest.Resumed()} {
		if !last.IsZero() {
			idle = min(idle, time.Since(last))
		}
	}
	return f.opts.HalfClose - idle
}

// checkIdle gives up a half-closed flow that has passed nothing.
func (f *tcpFlow) checkIdle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open != 1 || f.reset || f.doomed {
		return
	}
	if left := f.idleIn(); left > 0 {
		f.timer.Reset(left)
		return
	}
	f.abort(EndIdle)
}

// abort resets both sides, the first time, and keeps why. f.mu is held.
func (f *tcpFlow) abort(why End) {
	if f.reset {
		return
	}
	f.reset, f.doomed, f.end = true, true, why
	f.stopWaiting()
	f.client.Abort()
	f.guest.Abort()
}

// stopWaiting ends what goes on beside the copies. f.mu is held.
func (f *tcpFlow) stopWaiting() {
	if f.timer != nil {
		f.timer.Stop()
	}
	if f.unwait != nil {
		f.unwait()
	}
}

// finish frees what is left when both streams have ended.
func (f *tcpFlow) finish() End {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stopWaiting()
	if !f.reset {
		_ = f.guest.Close() // which may still have to send what lies in the client's socket
		_ = f.client.Close()
	}
	return f.end
}
