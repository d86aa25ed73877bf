package promoted

import (
	"context"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
)

// Copy implements relay.GuestConn. The client is a relay.Pollable, a socket.
func (c *Conn) Copy(client relay.Conn, ended func(relay.Half, error)) {
	c.lock()
	c.client = client.(relay.Pollable)
	c.ended = ended
	c.sending, c.taking = c.pushTo, c.drainTo
	c.readable = true
	if c.state == dead {
		c.toGuest.end(c.err)
		c.toHost.end(c.err)
	}
	if c.closed {
		c.toGuest.end(net.ErrClosed)
		c.toHost.end(net.ErrClosed)
	}
	c.push(turnBytes)
	c.drain()
	c.unlock()
	if err := c.watch(client.(relay.Pollable)); err != nil {
		c.lock()
		c.clientGone(err)
		c.unlock()
	}
}

// watch has the events of the client's socket come to clientReady.
func (c *Conn) watch(client relay.Pollable) error {
	if c.table.loop == nil {
		return client.Watch(c.clientReady)
	}
	c.lock()
	defer c.mu.Unlock()
	if c.client == nil {
		return nil // closed meanwhile
	}
	return c.table.loop.add(c)
}

// dropClient forgets the client, which is about to be closed. c.mu is held.
func (c *Conn) dropClient() {
	if c.client != nil && c.table.loop != nil {
		c.table.loop.remove(c)
	}
	c.client = nil
}

// clientReady is told of the client's socket.
func (c *Conn) clientReady(r relay.Ready) {
	c.lock()
	if r&relay.ReadyClosed != 0 {
		c.toGuest.end(net.ErrClosed)
		c.toHost.end(net.ErrClosed)
		c.unlockLater()
		return
	}
	if r&relay.ReadyEnd != 0 {
		c.finished = true
	}
	if r&relay.ReadyRead != 0 {
		c.readable = true
		c.pushInTurn()
	}
	if r&relay.ReadyWrite != 0 {
		c.full = false
		c.drain()
	}
	if r&relay.ReadyEnd != 0 {
		c.lookForReset()
	}
	c.acknowledge()
	c.unlock()
}

// lookForReset ends the flow whose client has reset the connection while the guest has
// no room for what it had sent before: no read tells of it. (Where we have ended the
// stream to the client, its own end looks the same.) c.mu is held.
func (c *Conn) lookForReset() {
	if c.toGuest.over || c.toHost.over || c.client == nil {
		return
	}
	if w, ok := c.client.(relay.Watcher); ok && w.Gone() {
		c.toHost.end(&relay.ClientError{Err: syscall.ECONNRESET})
		c.pending.clear()
	}
}

// clientGone ends both streams because the client's socket gives err. c.mu is held.
func (c *Conn) clientGone(err error) {
	if c.closed {
		err = net.ErrClosed
	} else {
		err = &relay.ClientError{Err: err}
	}
	c.toGuest.end(err)
	c.toHost.end(err)
}

// SetMeters implements relay.GuestConn.
func (c *Conn) SetMeters(read, written *relay.Meter) { c.fromGuest, c.towards = read, written }

// CloseWrite implements relay.Side: the guest reads what was sent, and the end.
func (c *Conn) CloseWrite() error {
	c.lock()
	defer c.unlockLater()
	if c.state != open || c.closed {
		return net.ErrClosed
	}
	c.toGuest.end(nil)
	c.endSending()
	return nil
}

// endSending has the guest hear of the end of our stream: what the client has sent is
// all there is. c.mu is held.
func (c *Conn) endSending() {
	if !c.eof {
		c.eof, c.end = true, c.max
	}
	c.finWanted = true
	c.push(turnBytes)
	c.acknowledge()
}

// KeepAlive implements relay.Side.
func (c *Conn) KeepAlive() error {
	c.lock()
	defer c.mu.Unlock()
	if c.state == open && !c.keepAlive {
		c.keepAlive = true
		c.heard = c.table.opts.Clock.Now()
		c.probe.set(c, keepAliveIdle)
	}
	return nil
}

// Abort implements relay.Side.
func (c *Conn) Abort() {
	c.lock()
	defer c.unlockLater()
	if !c.closed {
		c.reset(net.ErrClosed)
	}
}

// reset resets the connection for the reason that this side is told. c.mu is held.
func (c *Conn) reset(why error) {
	if c.state == open && !c.freed.Load() {
		c.sendReset(c.nxt)
	}
	c.toGuest.end(why)
	c.toHost.end(why)
	c.die(why)
	c.pending.clear()
	if c.done == nil {
		c.leave()
	}
	c.dropClient()
}

// Close implements relay.Side. The guest is still given what the client has sent, from
// a copy, and its last segments are answered. Bytes from the guest that the client was
// not given make it a reset, as on Linux.
func (c *Conn) Close() error {
	c.lock()
	defer c.unlockLater()
	switch {
	case c.closed:
		return nil
	case c.state != open || c.pending.size > 0 || !c.keepUnsent():
		c.reset(net.ErrClosed)
		return nil
	}
	c.leave()
	c.dropClient()
	c.toGuest.end(net.ErrClosed)
	c.toHost.end(net.ErrClosed)
	c.endSending()
	c.freeIfDone()
	return nil
}

// Resumed implements relay.GuestConn.
func (c *Conn) Resumed() time.Time { return c.table.opts.Clock.Resumed() }

// LocalAddr implements relay.GuestConn.
func (c *Conn) LocalAddr() string { return netip.AddrPortFrom(c.table.opts.Addr, c.port).String() }

// Gone implements relay.Watcher.
func (c *Conn) Gone() bool {
	c.lock()
	defer c.mu.Unlock()
	return c.closed || c.state == dead
}

// WaitGone implements relay.Watcher.
func (c *Conn) WaitGone(ctx context.Context) error {
	c.lock()
	if c.gone == nil {
		c.gone = make(chan struct{})
		if c.state == dead {
			close(c.gone)
		}
	}
	gone := c.gone
	c.mu.Unlock()
	select {
	case <-gone:
	case <-ctx.Done():
		return ctx.Err()
	}
	c.lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	return nil
}
