package docker_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/guest/guesttest"
)

// patience is how long a test waits for what is to happen at once.
const patience = 30 * time.Second

func mustClient(t testing.TB, endpoint string, files docker.TLSFiles) *docker.Client {
	t.Helper()
	c, err := docker.New(docker.Options{Endpoint: endpoint, TLS: files, Dial: new(net.Dialer).DialContext})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	return c
}

func mustList(t testing.TB, c *docker.Client) []docker.Container {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all, err := c.Containers(ctx)
	require.NoError(t, err)
	return all
}

// listError returns the error of a listing, which must fail.
func listError(t testing.TB, c *docker.Client) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all, err := c.Containers(ctx)
	require.Error(t, err)
	require.Nil(t, all, "an error and a list")
	return err
}

// watching is a Watch under way.
type watching struct {
	subscribed chan struct{}
	events     chan docker.Event
	ended      chan error
	cancel     context.CancelFunc
}

func watch(t testing.TB, c *docker.Client) *watching {
	ctx, cancel := context.WithCancel(t.Context())
	w := &watching{make(chan struct{}, 16), make(chan docker.Event, 1<<14), make(chan error, 1), cancel}
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.ended <- c.Watch(ctx, func() { w.subscribed <- struct{}{} }, func(e docker.Event) { w.events <- e })
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func receive[T any](t testing.TB, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		require.FailNow(t, "waited in vain for "+what)
		panic("unreachable")
	}
}

func TestContainersSayWhatTheEngineDoes(t *testing.T) {
	e := guesttest.NewUnixEngine(t)
	started := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	e.Set(guesttest.FakeContainer{
		ID: guesttest.FakeID(7), Name: "web", Links: []string{"front/web"}, Started: started.Add(time.Second),
		Labels: map[string]string{"com.docker.compose.project": "shop", "com.docker.compose.service": "web", "other": "x"},
		Networks: []guesttest.FakeNetwork{
			{Name: "zeta", EndpointID: "e1", IPv4: "172.18.0.2"},
			{Name: "alpha", EndpointID: "e2", IPv4: "10.1.1.2", IPv6: "fd00::2"},
		},
		Ports: map[string][]guesttest.FakeBinding{
			"80/tcp":  {{HostIP: "::", HostPort: "8080"}, {HostIP: "0.0.0.0", HostPort: "8080"}, {HostIP: "0.0.0.0", HostPort: "8080"}},
			"53/UDP":  {{HostIP: "127.0.0.1", HostPort: "5353"}},
			"9":       {{HostPort: "9000"}},
			"443/tcp": nil,
		},
	}, guesttest.FakeContainer{ID: guesttest.FakeID(3), Name: "older", Started: started, State: "paused", Ports: map[string][]guesttest.FakeBinding{}})
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	assert.Equal(t, []docker.Container{
		{ID: guesttest.FakeID(3), Name: "older", Started: started},
		{
			ID: guesttest.FakeID(7), Name: "web", Started: started.Add(time.Second), Project: "shop", Service: "web",
			Addrs: []netip.Addr{netip.MustParseAddr("10.1.1.2"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("172.18.0.2")},
			Bindings: []docker.Binding{
				{Proto: "tcp", Port: 9, HostPort: 9000},
				{Proto: "tcp", Port: 80, HostIP: netip.MustParseAddr("0.0.0.0"), HostPort: 8080},
				{Proto: "tcp", Port: 80, HostIP: netip.MustParseAddr("::"), HostPort: 8080},
				{Proto: "udp", Port: 53, HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 5353},
			},
			Unusable: []docker.Unusable{{Proto: "tcp", Port: 443, Reason: "no host port"}},
		},
	}, mustList(t, c))
}

// C-34: the host configuration counts when the network settings say nothing, not
// when they say that there is none (FB-085).
func TestHostConfigurationIsSecondChoice(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	one := guesttest.Published(0, 8080, 80)
	for _, tt := range []struct {
		mode  string
		ports map[string][]guesttest.FakeBinding
		want  int
	}{
		{"bridge", nil, 1},
		{"bridge", map[string][]guesttest.FakeBinding{}, 0},
		{"host", nil, 0},
		{"none", nil, 0},
		{"container:" + guesttest.FakeID(1), nil, 0},
	} {
		one.NetworkMode, one.Ports = tt.mode, tt.ports
		one.Networks[0].EndpointID += "f" // a new look
		e.Set(one)
		assert.Len(t, mustList(t, c)[0].Bindings, tt.want, "%s %v", tt.mode, tt.ports)
	}
}

// FB-092: an exited container holds its old mapping beside the one that runs.
func TestOnlyRunningContainersCount(t *testing.T) {
	e := guesttest.NewEngine(t)
	e.ListAll(true)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	runs, was := guesttest.Published(1, 8080, 80), guesttest.Published(2, 8080, 80)
	for _, state := range []string{"exited", "created", "dead", "restarting", "removing", "nonsense"} {
		was.State = state
		for _, order := range [][]guesttest.FakeContainer{{runs, was}, {was, runs}} {
			e.Set(order...)
			all := mustList(t, c)
			require.Len(t, all, 1, state)
			assert.Equal(t, runs.ID, all[0].ID)
		}
	}
}

// FB-088, FB-089: the same ID, another port, and no event that tells.
func TestEachListingSaysThePortsOfNow(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for i := range uint16(20) {
		e.Set(guesttest.Published(0, 32768+i, 80))
		all := mustList(t, c)
		require.Len(t, all, 1)
		require.Len(t, all[0].Bindings, 2)
		assert.Equal(t, 32768+i, all[0].Bindings[0].HostPort)
	}
}

// A container that was started again has new endpoints, and a later start.
func TestOnlyWhatLooksDifferentIsInspected(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	var all []guesttest.FakeContainer
	for n := range 200 {
		all = append(all, guesttest.Published(n, uint16(10000+n), 80))
	}
	e.Set(all...)
	first := mustList(t, c)
	require.Len(t, first, 200)
	assert.Equal(t, 200, e.Asked("inspect"))
	assert.Equal(t, first, mustList(t, c))
	assert.Equal(t, 200, e.Asked("inspect"), "nothing has changed")

	all[17].Started = all[17].Started.Add(time.Hour)
	all[17].Networks[0].EndpointID = guesttest.FakeID(1 << 30)
	e.Set(all...)
	second := mustList(t, c)
	assert.Equal(t, 201, e.Asked("inspect"))
	assert.Equal(t, all[17].ID, second[199].ID, "it is the newest now")

	w := watch(t, c)
	receive(t, w.subscribed, "the stream")
	e.Emit("container", "restart", all[3].ID)
	assert.Equal(t, docker.Event{ID: all[3].ID, Action: "restart"}, receive(t, w.events, "the event"))
	mustList(t, c)
	assert.Equal(t, 202, e.Asked("inspect"), "an event is reason enough")

	require.NoError(t, c.Close())
	mustList(t, c)
	assert.Equal(t, 402, e.Asked("inspect"), "another VM may be there")
}

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

// Whatever is wrong with an answer is an error in one sentence, and no list
// (C-31); the next listing is right again.
func TestListingsThatFail(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	e.Set(guesttest.Published(0, 8080, 80), guesttest.Published(1, 8081, 80))
	for _, tt := range []struct {
		name  string
		fault func(http.Handler) http.Handler
		want  string
	}{
		{"500", guesttest.Status(500), "answered: the engine has 500 of its own"},
		{"403", guesttest.Status(403), "answered: the engine has 403 of its own"},
		{"truncated", guesttest.Truncated(300, true), "closed the connection in the middle of an answer"},
		{"truncated, as if whole", guesttest.Truncated(300, false), "closed the connection in the middle of an answer"},
		{"empty", guesttest.Text(""), "closed the connection in the middle of an answer"},
		{"null", guesttest.Text("null"), "sent no list of containers"},
		{"an object", guesttest.Text("{}"), "sent what the API has not: json: cannot unmarshal object into Go value of type []container.Summary"},
		{"no JSON", guesttest.Text("<html>\x1b[2J"), "sent what is no JSON: invalid character '<' looking for beginning of value"},
		{"no ID", guesttest.Text(`[{"Id":"\u001b[2J","State":"running"}]`), `sent a container whose ID is none: \x1b[2J`},
		{"too many", guesttest.Text("[" + strings.Repeat("{},", 99_999) + "{}]"), "sent a listing of more than 4096 items, which culvert does not take"},
		{"too long", guesttest.Text(`["` + strings.Repeat("x", 25<<20) + `"]`), "sent a listing of more than 25165824 bytes, which culvert does not take"},
		{"too many networks", guesttest.Text(`[{"Mounts":[` + strings.Repeat("{},", 200_000) + "{}]}]"), "sent a listing of more than 131072 objects, which culvert does not take"},
		{"error as terminal codes", func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/plain")
				w.WriteHeader(500)
				_, _ = w.Write([]byte("ab\x1b[31m\n" + strings.Repeat("é", 300)))
			})
		}, `answered: ab\x1b[31m\n` + strings.Repeat(`\u00e9`, 96) + "…"},
	} {
		e.FaultIn("list", tt.fault)
		assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" "+tt.want, tt.name)
		e.Fault(nil)
		assert.Len(t, mustList(t, c), 2, "after "+tt.name)
	}
}

// 100 000 real containers are refused, in bounded memory.
func TestListingOfManyIsRefused(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	e.FaultIn("list", func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "[")
			for n := range 100_000 {
				if _, err := fmt.Fprintf(w, `{"Id":%q,"Names":["/c%d"],"State":"running","Ports":[{"PrivatePort":80,"PublicPort":%d,"Type":"tcp"}],"NetworkSettings":{"Networks":{"bridge":{"EndpointID":%q}}}},`,
					guesttest.FakeID(n), n, 1+n%65535, guesttest.FakeID(n)); err != nil {
					return
				}
			}
		})
	})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" sent a listing of more than 4096 items, which culvert does not take")
	runtime.ReadMemStats(&after)
	assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(64<<20), "all that was ever allocated, by the fake too")
}

func TestTooManyPortsAreRefused(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for n := range 2 {
		one := guesttest.Published(n, 8080, 80)
		one.Ports = map[string][]guesttest.FakeBinding{"1-40000/udp": {{HostPort: fmt.Sprintf("%d-%d", 1+n, 40000+n)}}}
		e.Put(one)
		if n == 0 {
			assert.Len(t, mustList(t, c)[0].Bindings, 40000, "a range counts one by one")
		}
	}
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" publishes more than 65536 ports, which culvert does not take")
}

// A container whose name cannot be keeps its ports.
func TestNamesThatAreNone(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for i, name := range []string{"", "a\nb", "\x1b[2J", "-a", ".", "a b", "a/b", "ä", "a\u202eb", "a*", strings.Repeat("a", 129)} {
		one := guesttest.Published(i, 8080, 80)
		one.Name = name
		one.Labels = map[string]string{"com.docker.compose.project": name + "\x00", "com.docker.compose.service": name + "\n"}
		e.Set(one)
		all := mustList(t, c)
		require.Len(t, all, 1)
		assert.Empty(t, all[0].Name+all[0].Project+all[0].Service, "%q", name)
		assert.Len(t, all[0].Bindings, 2, "%q", name)
	}
	one := guesttest.Published(0, 8080, 80)
	one.Name = strings.Repeat("a", 128)
	e.Set(one)
	assert.Equal(t, one.Name, mustList(t, c)[0].Name)
}

// What is wrong with one container's inspection concerns that container only.
func TestInspectionsThatFail(t *testing.T) {
	e := guesttest.NewEngine(t)
	good, bad := guesttest.Published(0, 8080, 80), guesttest.Published(1, 8081, 80)
	only := func(f func(http.Handler) http.Handler) func(http.Handler) http.Handler {
		return func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if strings.Contains(r.URL.Path, bad.ID) {
					f(next).ServeHTTP(w, r)
					return
				}
				next.ServeHTTP(w, r)
			})
		}
	}
	stuck := guesttest.Hold()
	t.Cleanup(stuck.Release)
	for _, tt := range []struct {
		name  string
		fault func(http.Handler) http.Handler
		there bool
	}{
		{"500", guesttest.Status(500), true},
		{"no JSON", guesttest.Text("oops"), true},
		{"null", guesttest.Text("null"), true},
		{"another", guesttest.Text(`{"Id":"` + good.ID + `","State":{"Running":true}}`), true},
		{"too much", guesttest.Text(`{"Id":"` + bad.ID + `","A":[` + strings.Repeat("{},", 70_000) + "0]}"), true},
		{"stuck", stuck.In, true},
		{"gone", guesttest.Status(404), false},
		{"ended", guesttest.Text(`{"Id":"` + bad.ID + `","State":{"Running":false}}`), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
			e.Set(good, bad)
			e.FaultIn("inspect", only(tt.fault))
			asked := e.Asked("inspect")
			all := mustList(t, c)
			require.NotEmpty(t, all)
			assert.Equal(t, good.Started.UTC(), all[0].Started)
			assert.Len(t, all[0].Bindings, 2)
			if !tt.there {
				assert.Len(t, all, 1)
				return
			}
			require.Len(t, all, 2)
			assert.Equal(t, "c1", all[1].Name)
			assert.Equal(t, bad.Created.UTC(), all[1].Started, "as listed")
			assert.Len(t, all[1].Bindings, 2)
			mustList(t, c)
			assert.Equal(t, asked+2, e.Asked("inspect"), "asked again at once")
		})
	}
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	e.FaultIn("inspect", only(func(http.Handler) http.Handler {
		return http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	}))
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" closed the connection", "the engine's fault, not the container's")
}

// Entries that net/netip or the API's types do not take are the entry's fault
// only (FB-094).
func TestEntriesThatLeadNowhere(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	one := guesttest.Published(0, 8080, 80)
	one.Ports = map[string][]guesttest.FakeBinding{
		"1/tcp": nil, "2/tcp": {}, "3/tcp": {{HostPort: ""}}, "4/tcp": {{HostPort: "0"}}, "5/tcp": {{HostPort: "abc\x1b"}},
		"6/tcp": {{HostPort: "70000"}}, "7/tcp": {{HostIP: "", HostPort: "7007"}}, "8/tcp": {{HostIP: "fe80::1%eth0", HostPort: "8008"}},
		"9/tcp": {{HostIP: "here", HostPort: "9009"}, {HostIP: "::ffff:127.0.0.1", HostPort: "9009"}},
		"0/tcp": {{HostPort: "1"}}, "x/udp": {{HostPort: "1"}}, "70000/udp": {{HostPort: "1"}}, "10/dccp": {{HostPort: "1"}},
		"11/tcp": {{HostPort: "8000-8010"}}, "12-14/udp": {{HostPort: "12000-12002"}}, "15-16/udp": {{HostPort: "1-3"}}, "18-17/udp": {{HostPort: "1-2"}},
		"20/SCTP": {{HostPort: "20"}}, "": {{HostPort: "1"}}, "/": {{HostPort: "1"}}, "+1/tcp": {{HostPort: "1"}}, "21/tcp": {{HostPort: "-1"}},
	}
	e.Set(one)
	all := mustList(t, c)
	require.Len(t, all, 1)
	assert.Equal(t, []docker.Binding{
		{Proto: "sctp", Port: 20, HostPort: 20},
		{Proto: "tcp", Port: 7, HostPort: 7007},
		{Proto: "tcp", Port: 9, HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 9009},
		{Proto: "udp", Port: 12, HostPort: 12000},
		{Proto: "udp", Port: 13, HostPort: 12001},
		{Proto: "udp", Port: 14, HostPort: 12002},
	}, all[0].Bindings)
	assert.Equal(t, []docker.Unusable{
		{Reason: `"" is no port`}, {Reason: `"+1/tcp" is no port`}, {Reason: `"/" is no port`}, {Reason: `"0/tcp" is no port`},
		{Reason: `"18-17/udp" is no port`}, {Reason: `"70000/udp" is no port`}, {Reason: `"x/udp" is no port`},
		{Port: 10, Reason: `"dccp" is no protocol`},
		{Proto: "tcp", Port: 1, Reason: "no host port"}, {Proto: "tcp", Port: 2, Reason: "no host port"},
		{Proto: "tcp", Port: 3, Reason: "no host port"}, {Proto: "tcp", Port: 4, Reason: "no host port"},
		{Proto: "tcp", Port: 5, Reason: `host port "abc\x1b" is none`}, {Proto: "tcp", Port: 6, Reason: `host port "70000" is none`},
		{Proto: "tcp", Port: 8, Reason: "host address fe80::1%eth0 belongs to one of the guest's links"},
		{Proto: "tcp", Port: 9, Reason: `host address "here" is none`},
		{Proto: "tcp", Port: 11, Reason: "host port 8000-8010 is for the engine to choose from"},
		{Proto: "tcp", Port: 21, Reason: `host port "-1" is none`},
		{Proto: "udp", Port: 15, Reason: "host ports 1-3 are not as many as 15-16"},
	}, all[0].Unusable)
}

func TestVersions(t *testing.T) {
	e := guesttest.NewEngine(t)
	e.Set(guesttest.Published(0, 8080, 80))
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for _, v := range []string{"1.24", "1.39", "1.40"} {
		e.SetVersion(v)
		assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" speaks version "+v+" of the API, and culvert needs 1.41, of Docker 20.10, or newer")
		w := watch(t, c)
		assert.ErrorContains(t, receive(t, w.ended, "the end"), "culvert needs 1.41")
	}
	e.SetVersion("")
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" answers, but not as a Docker engine does: it names no version of its API")
	for _, v := range []string{"1.41", "1.47", "1.99"} { // it is replaced while we run
		e.SetVersion(v)
		require.NoError(t, c.Close())
		assert.Len(t, mustList(t, c), 1, v)
	}
	e.SetVersion("1.41")
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" answered: client version 1.57 is too new. Maximum supported API version is 1.41")
	assert.Len(t, mustList(t, c), 1, "an older engine took its place")
}

func TestEnginesThatDoNotAnswer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	c := mustClient(t, "tcp://"+addr, docker.TLSFiles{})
	assert.EqualError(t, listError(t, c), "engine at tcp://"+addr+" refused the connection")

	missing := "unix://" + filepath.Join(t.TempDir(), "docker.sock")
	c = mustClient(t, missing, docker.TLSFiles{})
	assert.EqualError(t, listError(t, c), "engine at "+missing+" is not there: no such socket")

	e := guesttest.NewEngine(t)
	c = mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for _, kind := range []string{"ping", "list"} {
		held := guesttest.Hold()
		e.FaultIn(kind, held.In)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err = c.Containers(ctx)
		cancel()
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.EqualError(t, err, "engine at "+e.Endpoint()+" did not answer in time: context deadline exceeded")
		held.Release()
	}
}

func TestTLS(t *testing.T) {
	local, day := net.IPv4(127, 0, 0, 1), time.Now().Add(24*time.Hour)
	serve := func(certs *guesttest.Certs) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		e := guesttest.ServeEngine(t, l, certs.Server)
		e.Set(guesttest.Published(0, 8080, 80))
		return e.Endpoint()
	}
	good := guesttest.NewCerts(t, false, day, local)
	mutual := guesttest.NewCerts(t, true, day, local)
	plain := guesttest.NewEngine(t)
	for _, tt := range []struct {
		name     string
		endpoint string
		files    docker.TLSFiles
		want     string // of the error; none if empty
	}{
		{"good", serve(good), docker.TLSFiles{CA: good.CA}, ""},
		{"both ways", serve(mutual), docker.TLSFiles{CA: mutual.CA, Cert: mutual.Cert, Key: mutual.Key}, ""},
		{"no TLS of ours", serve(good), docker.TLSFiles{}, "speaks TLS; set docker.tls"},
		{"no TLS of its", plain.Endpoint(), docker.TLSFiles{CA: good.CA}, "does not speak TLS; leave docker.tls out"},
		{"another authority", serve(good), docker.TLSFiles{CA: mutual.CA}, "has a certificate of an authority that is not in docker.tls.ca"},
		{"the host's authorities", serve(mutual), docker.TLSFiles{Cert: mutual.Cert, Key: mutual.Key}, "has a certificate of an authority that is not in docker.tls.ca"},
		{"none of ours", serve(mutual), docker.TLSFiles{CA: mutual.CA}, "refuses our certificate, or that there is none"},
		{"another of ours", serve(mutual), docker.TLSFiles{CA: mutual.CA, Cert: good.Cert, Key: good.Key}, "refuses our certificate, or that there is none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := mustClient(t, tt.endpoint, tt.files)
			if tt.want == "" {
				assert.Len(t, mustList(t, c), 1)
				return
			}
			assert.ErrorContains(t, listError(t, c), "engine at "+tt.endpoint+" "+tt.want)
		})
	}
	for want, certs := range map[string]*guesttest.Certs{
		"has a certificate for another name: x509: certificate is valid for 10.0.2.2, not 127.0.0.1": guesttest.NewCerts(t, false, day, net.IPv4(10, 0, 2, 2)),
		"has a certificate that is not valid: x509: certificate has expired":                         guesttest.NewCerts(t, false, time.Now().Add(-time.Hour), local),
	} {
		endpoint := serve(certs)
		assert.ErrorContains(t, listError(t, mustClient(t, endpoint, docker.TLSFiles{CA: certs.CA})), "engine at "+endpoint+" "+want)
	}
}

func TestOptionsThatAreRefused(t *testing.T) {
	certs := guesttest.NewCerts(t, false, time.Now().Add(time.Hour))
	other := guesttest.NewCerts(t, false, time.Now().Add(time.Hour))
	dial := new(net.Dialer).DialContext
	const tcp = "tcp://10.0.2.2:2375"
	for _, tt := range []struct {
		o    docker.Options
		want string
	}{
		{docker.Options{Endpoint: "10.0.2.2:2375"}, `endpoint "10.0.2.2:2375": it is tcp://IP:PORT or unix:///PATH`},
		{docker.Options{Endpoint: ""}, `endpoint "": it is tcp://IP:PORT or unix:///PATH`},
		{docker.Options{Endpoint: "http://10.0.2.2:2375"}, `"http" is not tcp or unix`},
		{docker.Options{Endpoint: "tcp://engine:2375"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "tcp://10.0.2.2"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "tcp://10.0.2.2:0"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "tcp://10.0.2.2:2375/v1"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "unix://docker.sock"}, "after unix:// comes the absolute path of a socket"},
		{docker.Options{Endpoint: "unix:///" + strings.Repeat("x", 107)}, "of at most 107 bytes"},
		{docker.Options{Endpoint: "unix:///a", TLS: docker.TLSFiles{CA: certs.CA}}, "docker.tls is for tcp endpoints"},
		{docker.Options{Endpoint: tcp}, "nothing to dial it with"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{CA: "/nowhere/ca.pem"}}, "docker.tls.ca: open /nowhere/ca.pem: no such file or directory"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{CA: certs.Key}}, "holds no certificate in PEM"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{Cert: certs.Cert}}, "cert and key are given together"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{Cert: certs.Cert, Key: other.Key}}, "private key does not match public key"},
	} {
		_, err := docker.New(tt.o)
		assert.ErrorContains(t, err, tt.want)
	}
	assert.NoError(t, docker.ValidateEndpoint("tcp://[fd00::2]:2376"))
	assert.NoError(t, docker.ValidateEndpoint("unix:///run/docker.sock"))
}

// Close ends what is under way, and leaves nothing; the client goes on with what
// is there then.
func TestClose(t *testing.T) {
	datapathtest.Leaks(t)
	e := guesttest.NewEngine(t)
	e.Set(guesttest.Published(0, 8080, 80))
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for _, kind := range []string{"ping", "list", "inspect"} {
		require.NoError(t, c.Close())
		held := guesttest.Hold()
		e.FaultIn(kind, held.In)
		ended := make(chan error, 1)
		go func() {
			_, err := c.Containers(t.Context())
			ended <- err
		}()
		receive(t, held.Arrived, kind)
		require.NoError(t, c.Close())
		assert.ErrorIs(t, receive(t, ended, "the end of "+kind), os.ErrClosed, kind)
		held.Release()
		e.Fault(nil)
	}
	w := watch(t, c)
	receive(t, w.subscribed, "the stream")
	require.NoError(t, c.Close())
	assert.ErrorIs(t, receive(t, w.ended, "the end"), os.ErrClosed)
	assert.Len(t, mustList(t, c), 1)

	e.Close()
	assert.ErrorContains(t, listError(t, c), "refused the connection")
}

// A dial that hangs ends with Close too.
func TestCloseWhileDialling(t *testing.T) {
	datapathtest.Leaks(t)
	dialling := make(chan struct{}, 1)
	c, err := docker.New(docker.Options{Endpoint: "tcp://10.0.2.2:2375", Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		assert.Equal(t, "tcp 10.0.2.2:2375", network+" "+addr)
		dialling <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := c.Containers(t.Context())
		ended <- err
	}()
	receive(t, dialling, "the dial")
	require.NoError(t, c.Close())
	assert.ErrorIs(t, receive(t, ended, "the end"), os.ErrClosed)
}

// First: each container is inspected. Quiet: nothing has changed.
func BenchmarkContainers(b *testing.B) {
	e := guesttest.NewEngine(b)
	for n := range 1000 {
		e.Put(guesttest.Published(n, uint16(10000+n), 80))
	}
	c := mustClient(b, e.Endpoint(), docker.TLSFiles{})
	b.Run("first", func(b *testing.B) {
		for b.Loop() {
			require.NoError(b, c.Close())
			require.Len(b, mustList(b, c), 1000)
		}
	})
	b.Run("quiet", func(b *testing.B) {
		for b.Loop() {
			require.Len(b, mustList(b, c), 1000)
		}
	})
}

// A range whose inspection is too long is taken from the listing.
func TestLongRange(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	one := guesttest.Published(0, 8080, 80)
	for port := range 10_000 {
		n := fmt.Sprint(20_000 + port)
		one.Ports[n+"/udp"] = []guesttest.FakeBinding{{HostIP: "0.0.0.0", HostPort: n}, {HostIP: "::", HostPort: n}}
	}
	e.Set(one)
	all := mustList(t, c)
	require.Len(t, all, 1)
	assert.Len(t, all[0].Bindings, 20_002)
}
