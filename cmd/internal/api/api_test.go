package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A fake answers with what its fields say.
type fake struct {
	rows    []Listener
	err     error
	asked   PublishRequest
	wanted  KubernetesRequest
	started chan struct{} // Events waits for it before it calls started
	events  chan Event
}

func (f *fake) Listeners(of string) ([]Listener, error) {
	if of == "" || of == "a b&c" {
		return f.rows, nil
	}
	return nil, &Problem{Status: http.StatusNotFound, Detail: "no " + of}
}
func (f *fake) Names() []Name { return nil }
func (f *fake) Flows() []Flow { return nil }
func (f *fake) VMs() []VM {
	return []VM{{Name: "vm1", State: "gone", Detail: "QEMU closed the connection"}}
}

func (f *fake) Publish(_ context.Context, r PublishRequest) ([]Listener, error) {
	f.asked = r
	return f.rows, f.err
}

func (f *fake) Unpublish(ctx context.Context, r PublishRequest) ([]Listener, error) {
	return f.Publish(ctx, r)
}

func (f *fake) Doctor(_ context.Context, vm, of string) ([]Step, error) {
	if f.err != nil {
		return nil, f.err
	}
	return []Step{{VM: vm, Row: of, Step: "listener", State: "ok"}}, nil
}

func (f *fake) Kubernetes() []Kubernetes {
	return []Kubernetes{{VM: "vm1", Wanted: f.wanted.Wanted, Ports: []ServicePort{{Name: "web", Port: 80}}}}
}

func (f *fake) WantKubernetes(_ context.Context, r KubernetesRequest) error {
	if f.err != nil {
		return f.err
	}
	f.wanted = r
	return nil
}

func (f *fake) Events(ctx context.Context, started func(), emit func(Event) error) error {
	<-f.started
	started()
	for {
		select {
		case e, ok := <-f.events:
			if !ok {
				return nil
			}
			if err := emit(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tempSocket is a path for a socket; t.TempDir's can be too long.
func tempSocket(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "culvert")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "api.sock")
}

// serve serves b until the test ends, and returns a client.
func serve(t *testing.T, b Backend) *Client {
	t.Helper()
	socket := tempSocket(t)
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	s := NewServer(b, slog.New(slog.DiscardHandler))
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	c := NewClient(socket)
	t.Cleanup(func() {
		c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		s.Shutdown(ctx)
		assert.NoError(t, <-served)
	})
	return c
}

func TestListenersOf(t *testing.T) {
	c := serve(t, &fake{rows: []Listener{{VM: "x"}}})
	rows, err := c.Listeners(t.Context(), "a b&c")
	require.NoError(t, err)
	assert.Len(t, rows, 1)
	_, err = c.Listeners(t.Context(), "?")
	var p *Problem
	require.ErrorAs(t, err, &p)
	assert.Equal(t, http.StatusNotFound, p.Status)
	assert.Equal(t, "no ?", p.Detail)
}

func TestLists(t *testing.T) {
	c := serve(t, &fake{})
	rows, err := c.Listeners(t.Context(), "")
	require.NoError(t, err)
	assert.NotNil(t, rows, "an empty list is a list")
	flows, err := c.Flows(t.Context())
	require.NoError(t, err)
	assert.Empty(t, flows)
	vms, err := c.VMs(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "vm1", vms[0].Name)
}

// A list is one document of JSON, however many times its buffer is filled.
func TestListsOfEveryLength(t *testing.T) {
	for _, n := range []int{0, 1, 2, 1000} {
		rows := make([]Listener, n)
		for i := range rows {
			rows[i].Owner.ID = strings.Repeat("x", i)
		}
		c := serve(t, &fake{rows: rows})
		resp, err := c.do(t.Context(), http.MethodGet, "/v1/listeners", nil)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Greater(t, len(body), n*n/2)
		var got []Listener
		require.NoError(t, json.Unmarshal(body, &got), "%.100s", body)
		assert.Equal(t, rows, got)
	}
}

func TestPublishes(t *testing.T) {
	f := &fake{rows: []Listener{{VM: "vm1", Since: Time{time.Unix(1, 5).UTC()}}}}
	c := serve(t, f)
	for _, call := range []func(context.Context, PublishRequest) ([]Listener, error){c.Publish, c.Unpublish} {
		f.asked = PublishRequest{}
		want := PublishRequest{VM: "vm1", Publish: []string{"8080:80"}}
		rows, err := call(t.Context(), want)
		require.NoError(t, err)
		assert.Equal(t, f.rows, rows)
		assert.Equal(t, want, f.asked)
	}
	f.err = &Problem{Status: http.StatusConflict, Detail: "no"}
	_, err := c.Unpublish(t.Context(), f.asked)
	var p *Problem
	require.ErrorAs(t, err, &p)
	assert.Equal(t, Problem{Title: "Conflict", Status: 409, Detail: "no"}, *p)
	f.err = errors.New("broken")
	_, err = c.Unpublish(t.Context(), f.asked)
	require.ErrorAs(t, err, &p)
	assert.Equal(t, 500, p.Status)
	assert.EqualError(t, err, "broken")
}

func TestKubernetes(t *testing.T) {
	f := &fake{}
	c := serve(t, f)
	list, err := c.Kubernetes(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	assert.EqualValues(t, 80, list[0].Ports[0].Port)
	for _, wanted := range []bool{true, false} {
		want := KubernetesRequest{VM: "vm1", Wanted: wanted}
		list, err := c.WantKubernetes(t.Context(), want)
		require.NoError(t, err)
		assert.Equal(t, want, f.wanted)
		assert.Equal(t, wanted, list[0].Wanted, "as it is after the request")
	}
	f.err = &Problem{Status: http.StatusNotFound, Detail: "no cluster"}
	_, err = c.WantKubernetes(t.Context(), KubernetesRequest{Wanted: true})
	assert.EqualError(t, err, "no cluster")
	assert.False(t, f.wanted.Wanted)
}

// TestProblems speaks to the API with what no client of ours sends.
func TestProblems(t *testing.T) {
	c := serve(t, &fake{})
	for _, r := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"GET", "/v1/nothing", "", 404, "/v1/nothing"},
		{"POST", "/v1/publishes", "{}", 405, "PUT and DELETE"},
		{"PUT", "/v1/vms", "{}", 405, "takes GET"},
		{"PUT", "/v1/publishes", "", 400, "request body"},
		{"PUT", "/v1/publishes", "null", 400, "names nothing"},
		{"PUT", "/v1/publishes", `{"publish":[]}`, 400, "names nothing"},
		{"PUT", "/v1/publishes", `{"publish":"8080:80"}`, 400, "request body"},
		{"PUT", "/v1/publishes", `{"publish":["8080:80"],"nonsense":1}`, 400, "nonsense"},
		{"PUT", "/v1/publishes", `{"publish":["8080:80"]} and more`, 400, "after"},
		{"PUT", "/v1/kubernetes", `{"vm":"vm1"}`, 400, "wanted"},
		{"PUT", "/v1/kubernetes", `{"wanted":null}`, 400, "wanted"},
		{"PUT", "/v1/kubernetes", `{"wanted":true,"nonsense":1}`, 400, "nonsense"},
		{"DELETE", "/v1/kubernetes", `{"wanted":true}`, 405, "GET and PUT"},
		{"PUT", "/v1/publishes", `{"publish":["` + strings.Repeat("x", 2<<20) + `"]}`, 413, "too large"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), r.method, "http://culvert"+r.path, strings.NewReader(r.body))
		require.NoError(t, err)
		resp, err := c.http.Do(req)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		_ = resp.Body.Close()
		what := r.method + " " + r.path + ": " + string(body)
		assert.Equal(t, r.status, resp.StatusCode, what)
		assert.Contains(t, string(body), r.want, what)
		assert.Equal(t, "application/problem+json", resp.Header.Get("Content-Type"), what)
		assert.Equal(t, r.status == 405, resp.Header.Get("Allow") != "", what)
	}
}

// TestHealth is the daemon's own, whatever its VMs are like.
func TestHealth(t *testing.T) {
	c := serve(t, &fake{})
	resp, err := c.do(t.Context(), http.MethodGet, "/healthz", nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Equal(t, "ok\nvm1: gone (QEMU closed the connection)\n", string(text))
}

// TestEventsMissNothing has a backend that is slow to begin: a client is told
// that it misses nothing when that is so, and not when the daemon has heard it.
func TestEventsMissNothing(t *testing.T) {
	f := &fake{started: make(chan struct{}), events: make(chan Event, 1)}
	c := serve(t, f)
	follows := make(chan struct{})
	got := make(chan Event, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- c.Events(t.Context(), func() error { close(follows); return nil }, func(e Event) error { got <- e; return nil })
	}()
	// A server that answers before its backend has begun does so now.
	_, err := c.Listeners(t.Context(), "")
	require.NoError(t, err)
	select {
	case <-follows:
		assert.Fail(t, "told too early")
	default:
	}
	close(f.started)
	<-follows
	want := Event{Kind: "vm.ready", VM: "vm1", At: Time{time.Unix(1, 0).UTC()}}
	f.events <- want
	assert.Equal(t, want, <-got)
	close(f.events)
	assert.NoError(t, <-ended, "the daemon's end is no error")
}

// TestEventsEnd is a follower that has enough, and one that is interrupted.
func TestEventsEnd(t *testing.T) {
	f := &fake{started: make(chan struct{}), events: make(chan Event, 1)}
	close(f.started)
	f.events <- Event{}
	c := serve(t, f)
	enough := errors.New("enough")
	assert.ErrorIs(t, c.Events(t.Context(), func() error { return nil }, func(Event) error { return enough }), enough)
	assert.ErrorIs(t, c.Events(t.Context(), func() error { return enough }, nil), enough)
	ctx, cancel := context.WithCancel(t.Context())
	assert.ErrorIs(t, c.Events(ctx, func() error { cancel(); return nil }, nil), context.Canceled)
}

func TestNoDaemon(t *testing.T) {
	socket := tempSocket(t)
	c := NewClient(socket)
	says := func(want string) {
		_, err := c.VMs(t.Context())
		var no *NoDaemonError
		require.ErrorAs(t, err, &no)
		assert.Contains(t, err.Error(), want)
		assert.Contains(t, err.Error(), socket)
	}
	says("nothing is there")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	says("left over")
}

func TestTime(t *testing.T) {
	for text, want := range map[string]Time{`""`: {}, `"2026-01-02T15:04:05.5Z"`: {time.Date(2026, 1, 2, 15, 4, 5, 5e8, time.UTC)}} {
		b, err := json.Marshal(want)
		require.NoError(t, err)
		assert.Equal(t, text, string(b))
		got := Time{time.Unix(0, 0)}
		require.NoError(t, json.Unmarshal(b, &got))
		assert.Equal(t, want, got)
	}
	assert.Error(t, json.Unmarshal([]byte(`"yesterday"`), new(Time)))
}

// FuzzReadPublishes: a request or an error, never both.
func FuzzReadPublishes(f *testing.F) {
	f.Add(`{"vm":"a","publish":["8080:80"]}`)
	f.Add(`{"publish":[]}`)
	f.Fuzz(func(t *testing.T, body string) {
		r, err := readPublishes(strings.NewReader(body))
		if err == nil && len(r.Publish) == 0 {
			t.Fatalf("%q asks for nothing", body)
		}
		if p := new(Problem); err != nil && (!errors.As(err, &p) || p.Status < 400) {
			t.Fatalf("%q: %v", body, err)
		}
	})
}

func TestDoctor(t *testing.T) {
	f := &fake{}
	c := serve(t, f)
	steps, err := c.Doctor(t.Context(), "a&b", "[::1]:8080/udp")
	require.NoError(t, err)
	assert.Equal(t, []Step{{VM: "a&b", Row: "[::1]:8080/udp", Step: "listener", State: "ok"}}, steps)
	f.err = &Problem{Status: http.StatusConflict, Detail: "several are meant"}
	_, err = c.Doctor(t.Context(), "", "")
	assert.EqualError(t, err, "several are meant")
}

// Followers are bounded, and one that leaves makes room.
func TestTooManyFollowers(t *testing.T) {
	started := make(chan struct{})
	close(started)
	c := serve(t, &fake{started: started})
	var following sync.WaitGroup
	defer following.Wait()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	first, leaveFirst := context.WithCancel(ctx)
	follow := func(ctx context.Context) {
		begun := make(chan struct{})
		following.Go(func() {
			_ = c.Events(ctx, func() error { close(begun); return nil }, func(Event) error { return nil })
		})
		<-begun
	}
	follow(first)
	for range maxFollowers - 1 {
		follow(ctx)
	}
	refused := func() bool {
		enough := errors.New("enough")
		err := c.Events(ctx, func() error { return enough }, nil)
		var p *Problem
		if errors.As(err, &p) {
			assert.Equal(t, http.StatusServiceUnavailable, p.Status)
			return true
		}
		assert.ErrorIs(t, err, enough)
		return false
	}
	assert.True(t, refused())
	leaveFirst()
	require.Eventually(t, func() bool { return !refused() }, 10*time.Second, 10*time.Millisecond)
}
