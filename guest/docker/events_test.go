package docker_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/guest/guesttest"
)

// FB-078: what starts while the stream opens is told, and what starts while a
// listing is held back too.
func TestNothingFallsBetweenStreamAndListing(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	var once sync.Once
	e.FaultIn("events", func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			once.Do(func() { e.Start(guesttest.Published(1, 8001, 80)) }) // before the engine subscribes
			next.ServeHTTP(w, r)
		})
	})
	w := watch(t, c)
	receive(t, w.subscribed, "the stream")
	assert.Equal(t, docker.Event{ID: guesttest.FakeID(1), Action: "start"}, receive(t, w.events, "the replayed event"))

	held := guesttest.Hold()
	t.Cleanup(held.Release)
	e.FaultIn("list", held.In)
	listed := make(chan []docker.Container, 1)
	go func() {
		all, err := c.Containers(t.Context())
		assert.NoError(t, err)
		listed <- all
	}()
	receive(t, held.Arrived, "the listing")
	e.Start(guesttest.Published(2, 8002, 80))
	e.Stop(guesttest.FakeID(1))
	for _, want := range []docker.Event{
		{ID: guesttest.FakeID(2), Action: "start"}, {ID: guesttest.FakeID(1), Action: "die"}, {ID: guesttest.FakeID(1), Action: "stop"},
	} {
		assert.Equal(t, want, receive(t, w.events, "an event while the listing is held back"))
	}
	held.Release()
	assert.Empty(t, receive(t, listed, "the listing"), "its one container is gone since: the inspection says so")
	all := mustList(t, c)
	require.Len(t, all, 1)
	assert.Equal(t, guesttest.FakeID(2), all[0].ID)
}

// FB-085: networks joined and left are told, by the container's ID. Noise is not.
func TestEventsThatConcernTheHost(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	w := watch(t, c)
	receive(t, w.subscribed, "the stream")
	id := guesttest.FakeID(4)
	for _, noise := range []string{"exec_create: sh", "exec_start: sh", "exec_die", "health_status: healthy", "create", "attach", "top"} {
		e.Emit("container", noise, id)
		e.EmitRaw(fmt.Sprintf(`{"Type":"container","Action":%q,"Actor":{"ID":%q}}`, noise, id)) // whatever was asked for
	}
	e.EmitRaw(`{"Type":"volume","Action":"start"}{}null`)
	e.EmitRaw(`{"Type":"container","Action":"start","Actor":{"ID":"../../etc\u0000"}}`)
	e.Emit("network", "connect", id)
	e.Emit("network", "disconnect", id)
	e.Emit("container", "rename", id)
	for _, want := range []docker.Event{{Action: "start"}, {ID: id, Action: "connect"}, {ID: id, Action: "disconnect"}, {ID: id, Action: "rename"}} {
		assert.Equal(t, want, receive(t, w.events, want.Action))
	}
	w.cancel()
	assert.Equal(t, context.Canceled, receive(t, w.ended, "the end"))
	assert.Empty(t, w.events)
}

// An engine tells of a container's end, takes away what published its ports, which
// may take seconds, and only then leaves it out of listings.
func TestEndComesBeforeListingsKnow(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	w := watch(t, c)
	receive(t, w.subscribed, "the stream")
	emit := func(kind, action, id string) {
		e.Emit(kind, action, id)
		receive(t, w.events, action)
	}
	ended, other := guesttest.Published(0, 8080, 80), guesttest.Published(1, 8081, 80)
	e.Set(ended, other)
	require.Len(t, mustList(t, c), 2)

	emit("container", "die", ended.ID)
	for range 2 { // the engine still lists it, and would not answer what it is about
		all := mustList(t, c)
		require.Len(t, all, 1)
		assert.Equal(t, other.ID, all[0].ID)
		emit("network", "disconnect", ended.ID)
	}
	assert.Equal(t, 2, e.Asked("inspect"))

	// It is started again, which an event tells or its new endpoint.
	emit("container", "start", ended.ID)
	require.Len(t, mustList(t, c), 2)
	emit("container", "die", ended.ID)
	require.Len(t, mustList(t, c), 1)
	ended.Networks[0].EndpointID = guesttest.FakeID(1 << 30)
	e.Set(ended, other)
	require.Len(t, mustList(t, c), 2)

	// The end of an earlier run, told late.
	other.Started = time.Now().Add(time.Hour)
	other.Networks[0].EndpointID = guesttest.FakeID(1<<30 + 1)
	e.Set(ended, other)
	require.Len(t, mustList(t, c), 2)
	emit("container", "die", other.ID)
	require.Len(t, mustList(t, c), 2)
}

// FB-079, FB-080: a stream that ends says why, and the next one opens.
func TestStreamsThatBreak(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for _, tt := range []struct {
		name string
		cut  func()
		want string
	}{
		{"between two events", func() { e.Cut("") }, "closed the connection in the middle of an answer"},
		{"in the middle of one", func() { e.Cut(`{"Type":"container","Action":"sta`) }, "closed the connection in the middle of an answer"},
		{"no JSON", func() { e.EmitRaw("oops") }, "sent what is no JSON: invalid character 'o' looking for beginning of value"},
		{"without end", func() { e.EmitRaw(`{"Action":"` + strings.Repeat("x", 2<<20)) }, "sent an event of more than 1048576 bytes, which culvert does not take"},
		{"too deep", func() { e.EmitRaw(strings.Repeat(`{"a":`, 100000)) }, "sent an event of more than 64 objects, which culvert does not take"},
	} {
		w := watch(t, c)
		receive(t, w.subscribed, "the stream: "+tt.name)
		tt.cut()
		assert.EqualError(t, receive(t, w.ended, tt.name), "engine at "+e.Endpoint()+" "+tt.want, tt.name)
		w.cancel()
	}

	e.FaultIn("events", guesttest.Status(500))
	w := watch(t, c)
	assert.EqualError(t, receive(t, w.ended, "500"), "engine at "+e.Endpoint()+" answered: the engine has 500 of its own")
	assert.Empty(t, w.subscribed, "a stream that did not open")
	e.Fault(nil)
	w = watch(t, c)
	receive(t, w.subscribed, "the stream that heals")
}
