package docker

import (
	"context"
	"errors"
	"io"
	"strconv"
	"time"

	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/client"
)

// An Event says that something happened that may concern the host. It is a
// reason to list, and no more: events repeat, come late and get lost. But the
// listings of a Client leave out a container whose end was told of after it had
// started, while it looks the same, for as long as an engine may take to see it.
type Event struct {
	// ID is the container's, or empty when the engine did not say.
	ID string
	// Action is the engine's word, one of those that Watch asks for.
	Action string
}

// watched are the actions that change what a Container says. Others are left
// out at the engine: a health check alone makes three each time.
var watched = map[events.Type][]events.Action{
	events.ContainerEventType: {
		events.ActionStart, events.ActionRestart, events.ActionDie, events.ActionStop,
		events.ActionDestroy, events.ActionRename,
	},
	events.NetworkEventType: {events.ActionConnect, events.ActionDisconnect},
}

// Watch follows the engine's events. It calls subscribed once, when the stream
// is open: a listing made after that misses nothing that changed is not told of.
// It calls changed for each event, one at a time; the stream waits meanwhile. It
// returns when the stream has ended, with the reason, never nil: ctx's error
// when that ended it.
func (c *Client) Watch(ctx context.Context, subscribed func(), changed func(Event)) error {
	s, ctx2, done, err := c.session(ctx)
	if err != nil {
		return err
	}
	defer done()
	// The engine sends its header first and subscribes a moment later. Asked for
	// what happened since just before, by its own clock, it replays the moment; so
	// its clock is asked for now.
	if _, err := s.api.Ping(ctx2, client.PingOptions{}); err != nil {
		return c.fault(ctx, s, err)
	}
	options := client.EventsListOptions{Filters: make(client.Filters)}
	if date := s.wire.date.Load(); date != 0 {
		options.Since = strconv.FormatInt(date, 10)
	}
	for kind, actions := range watched {
		options.Filters.Add("type", string(kind))
		for _, a := range actions {
			options.Filters.Add("event", string(a))
		}
	}
	opened := false
	stream := s.api.Events((&call{max: eventMeasure, opened: func() { opened = true }}).of(ctx2), options)
	if opened { // it was set before Events returned
		subscribed()
	}
	for {
		select {
		case m := <-stream.Messages:
			if e, ok := event(m); ok {
				c.seen.heard(e, time.Unix(0, m.TimeNano))
				changed(e)
			}
		case err := <-stream.Err:
			for range stream.Err { // closed when the library's goroutine is through
			}
			if errors.Is(err, io.EOF) {
				err = &failure{"ended its stream of events"}
			}
			return c.fault(ctx, s, err)
		}
	}
}

// event takes what concerns us from a message, which the engine may have sent
// whatever it was asked for.
func event(m events.Message) (Event, bool) {
	for _, a := range watched[m.Type] {
		if a != m.Action {
			continue
		}
		id := m.Actor.ID
		if m.Type == events.NetworkEventType {
			id = m.Actor.Attributes["container"]
		}
		if !isID(id) {
			id = ""
		}
		return Event{ID: id, Action: string(a)}, true
	}
	return Event{}, false
}
