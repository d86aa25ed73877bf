package netstack

import (
	"context"
	"net"

	"github.com/culvertnet/culvert/stack/relay"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

var _ relay.Watcher = (*Conn)(nil)

// Gone implements relay.Watcher. gVisor ends in StateError by a reset or a
// time-out, but in StateClose by a reset that follows the guest's end of stream.
func (c *Conn) Gone() bool {
	state := tcp.EndpointState(c.ep.State())
	return c.closed.Load() || state == tcp.StateError || state == tcp.StateClose
}

// WaitGone implements relay.Watcher.
func (c *Conn) WaitGone(ctx context.Context) error {
	defer context.AfterFunc(ctx, c.readable.wake)()
	for {
		switch {
		case c.closed.Load():
			return net.ErrClosed
		case c.Gone():
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		}
		<-c.readable
	}
}
