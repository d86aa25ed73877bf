package docker_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/guest/guesttest"
)

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
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" shows more than 65536 ports and addresses, which culvert does not take")
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
