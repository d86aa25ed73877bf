package netstack

import (
	"net"
	"sync/atomic"

	"github.com/culvertnet/culvert/stack/relay"
	"gvisor.dev/gvisor/pkg/waiter"
)

// # Theory of operation
//
// A flow's two copies hold no goroutine while nothing passes. Each is a pump that
// moves what there is and says what it waits for; an event of the client's socket
// or of the endpoint runs it again, in the goroutine that brings the event:
//
//	client's events   on the listener Group's goroutine for clients
//	guest's segments  on the reader of frames, after their batch  (runner.go, inline.go)
//	anything else     on a goroutine of the runner's
//
// So a request goes from the client's socket to the link, and its answer from the
// link to the client's socket, without a hand-over. What is more than a request
// (inlineBytes) goes on in a goroutine of its own, until it waits again: those
// that serve many must not be held up by one.
//
// One goroutine at a time runs a direction; an event meanwhile has it look once
// more (again):
//
//	idle ──event──► running ──nothing to do──► idle
//	                 │  ▲ event
//	                 │  └────── again
//	                 └─end of stream, error──► over
//
// What a pump waits for is written before the direction is idle, and read by an
// event only when it finds it so: an event that is skipped is none that the pump
// waits for.

// inlineBytes is what a direction may move on somebody else's goroutine: one read
// of a usual request or answer.
const inlineBytes = 16 << 10

// States of a direction.
const (
	dirIdle uint32 = iota
	dirRunning
	dirAgain
	dirOver
)

// What a pump returned for.
type outcome uint8

const (
	waitClient outcome = iota // the client's socket has nothing, or no room
	waitGuest                 // the endpoint has nothing, or no room
	moreToMove                // its turn is over
	copyOver                  // the stream has ended, or broke
)

// A direction is one of a flow's copies.
type direction struct {
	copy  *flowCopy
	state atomic.Uint32
	waits atomic.Uint32 // the outcome it is idle for
	from  relay.Half
	pump  func(budget int) (outcome, error)
}

// wake reports whether the caller must run d: nobody does.
func (d *direction) wake() bool {
	for {
		switch d.state.Load() {
		case dirIdle:
			if d.state.CompareAndSwap(dirIdle, dirRunning) {
				return true
			}
		case dirRunning:
			if d.state.CompareAndSwap(dirRunning, dirAgain) {
				return false
			}
		default:
			return false
		}
	}
}

// idleButFor reports whether d is idle and waits for something else than o.
func (d *direction) idleButFor(o outcome) bool {
	return d.state.Load() == dirIdle && outcome(d.waits.Load()) != o
}

// A flowCopy is both copies of a flow under way.
type flowCopy struct {
	conn   *Conn
	client relay.Pollable
	ended  func(from relay.Half, err error)

	toGuest, toHost direction
	reader          socketReader
	writer          socketWriter

	// finished says that the client has ended its stream, or worse: there is
	// something behind what a read has brought.
	finished atomic.Bool
	// reset says that the client has reset the connection.
	reset atomic.Bool
	// deaf says that the client's socket cannot be watched.
	deaf atomic.Bool
}

// Copy implements relay.GuestConn. The client is a relay.Pollable.
func (c *Conn) Copy(client relay.Conn, ended func(from relay.Half, err error)) {
	k := &flowCopy{conn: c, client: client.(relay.Pollable), ended: ended}
	k.reader.init(k)
	k.writer.init(k)
	k.toGuest.copy, k.toHost.copy = k, k
	k.toGuest.from, k.toGuest.pump = relay.HalfClient, k.reader.pump
	k.toHost.from, k.toHost.pump = relay.HalfGuest, k.writer.pump
	k.toGuest.state.Store(dirRunning)
	k.toHost.state.Store(dirRunning)
	c.copy.Store(k) // from now on the endpoint's events come here

	// What is there already passes before anybody is asked to watch.
	k.run(&k.toGuest, inlineBytes)
	k.run(&k.toHost, inlineBytes)
	if err := k.client.Watch(k.clientReady); err != nil {
		k.deaf.Store(true)
		k.wakeBoth()
	}
}

// clientReady is told of the client's socket.
func (k *flowCopy) clientReady(r relay.Ready) {
	if r&relay.ReadyClosed != 0 {
		k.wakeBoth()
		return
	}
	if r&relay.ReadyEnd != 0 {
		k.finished.Store(true)
	}
	if r&relay.ReadyRead != 0 && !k.toGuest.idleButFor(waitClient) && k.toGuest.wake() {
		k.run(&k.toGuest, inlineBytes)
	}
	if r&relay.ReadyWrite != 0 && !k.toHost.idleButFor(waitClient) && k.toHost.wake() {
		k.run(&k.toHost, inlineBytes)
	}
	if r&relay.ReadyEnd != 0 {
		k.lookForReset()
	}
}

// lookForReset ends the way to the client which has reset the connection while the guest
// has no room for what it had sent before: no read tells of it. (Where we have ended the
// stream to the client, its own end looks the same.)
func (k *flowCopy) lookForReset() {
	if k.toGuest.state.Load() == dirOver || k.toHost.state.Load() == dirOver {
		return
	}
	if w, ok := k.client.(relay.Watcher); ok && w.Gone() {
		k.reset.Store(true)
		if k.toHost.wake() {
			k.run(&k.toHost, inlineBytes)
		}
	}
}

// guestReady is told of the endpoint, under its lock. That it is no more ends the way to
// the guest whatever it waits for: a client may neither send nor read.
func (k *flowCopy) guestReady(mask waiter.EventMask) {
	over := mask&(waiter.EventHUp|waiter.EventErr) != 0
	if (over || mask&waiter.ReadableEvents != 0) &&
		!k.toHost.idleButFor(waitGuest) && k.toHost.wake() {
		k.later(&k.toHost)
	}
	if (over || mask&waiter.WritableEvents != 0 && !k.toGuest.idleButFor(waitGuest)) && k.toGuest.wake() {
		k.later(&k.toGuest)
	}
}

// later runs d, which is running: at the end of the reader's batch if it is the
// reader who works on the flow, else in a goroutine.
func (k *flowCopy) later(d *direction) {
	if k.conn.worked.Load() {
		k.conn.stack.runner.add(d)
		return
	}
	k.conn.stack.pool.run(d)
}

// wakeBoth has both directions look at once, not within the call.
func (k *flowCopy) wakeBoth() {
	for _, d := range []*direction{&k.toGuest, &k.toHost} {
		if d.wake() {
			k.conn.stack.runner.add(d)
		}
	}
}

// run implements runnable.
func (d *direction) run() { d.copy.run(d, inlineBytes) }

// run moves what there is in direction d, which is running and the caller's, up
// to about budget bytes; the rest in a goroutine.
func (k *flowCopy) run(d *direction, budget int) {
	for {
		o, err := d.pump(budget)
		switch o {
		case copyOver:
			d.state.Store(dirOver)
			k.ended(d.from, err)
			return
		case moreToMove:
			if budget < bulkTurn {
				k.conn.stack.pool.run(d)
				return
			}
			continue
		}
		d.waits.Store(uint32(o))
		if d.state.CompareAndSwap(dirRunning, dirIdle) {
			return
		}
		d.state.Store(dirRunning) // again
	}
}

// bulkTurn is how many bytes a goroutine of its own moves before it lets go of
// the client's socket for a moment, for Close to have its turn.
const bulkTurn = 1 << 20

// clientGone returns the error of a copy whose client's socket gave err, or can
// give none.
func (k *flowCopy) clientGone(err error) error {
	if k.conn.closed.Load() {
		return net.ErrClosed
	}
	return &relay.ClientError{Err: err}
}
