package stack

import (
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// A client is a host's connection as the relay knows it.
type client struct{ *listener.Conn }

var (
	_ relay.Pollable = client{}
	_ relay.Watcher  = client{}
)

// Watch implements relay.Pollable.
func (c client) Watch(ready func(relay.Ready)) error {
	return c.Conn.Watch(func(r listener.Ready) { ready(relay.Ready(r)) })
}

// Both kinds of Ready have the same bits: package listener knows nothing of relays.
var _ = [1]struct{}{}[relay.ReadyRead-relay.Ready(listener.ReadyRead)|
	relay.ReadyWrite-relay.Ready(listener.ReadyWrite)|
	relay.ReadyEnd-relay.Ready(listener.ReadyEnd)|
	relay.ReadyClosed-relay.Ready(listener.ReadyClosed)]
