package kube

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A fakeAPI is an API server for Services, over TLS on connections in memory: in
// a synctest bubble its time is the bubble's. What goes wrong is up to the test.
type fakeAPI struct {
	tb     testing.TB
	server *httptest.Server
	dials  chan net.Conn

	mu       sync.Mutex
	services map[string]corev1.Service
	version  int
	changed  chan struct{} // closed at each change
	history  []fakeEvent
	lists    []time.Time
	watches  []time.Time

	// list and watch answer in place of the server when they are set and return
	// true.
	list, watch func(w http.ResponseWriter, r *http.Request) bool
	pages       int // Services in a page; 0: as asked
	dialErr     error
	addr        string // what must be dialled; empty: anything
	watchers    []*watcher
	dead        func() // from now on no byte of any connection arrives
}

type fakeEvent struct {
	version int
	text    []byte
}

// newFakeAPI starts one; stop ends it and its watchers, before the bubble's end.
func newFakeAPI(tb testing.TB) *fakeAPI {
	f := &fakeAPI{tb: tb, dials: make(chan net.Conn), services: make(map[string]corev1.Service), version: 100, addr: "127.0.0.1:6443", dead: func() {},
		changed: make(chan struct{})}
	f.server = httptest.NewUnstartedServer(http.HandlerFunc(f.serve))
	f.server.Listener.Close()
	f.server.Listener = &pipeListener{dials: f.dials, closed: make(chan struct{})}
	f.server.EnableHTTP2 = true
	f.server.Config.ErrorLog = nil
	f.server.StartTLS()
	return f
}

func (f *fakeAPI) stop() {
	for _, w := range f.watchers {
		w.stop(f.tb)
	}
	f.server.CloseClientConnections()
	f.server.Close()
}

// kubeconfig writes one for the server as host; edit may change it.
func (f *fakeAPI) kubeconfig(user string) string {
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})
	return writeKubeconfig(f.tb, filepath.Join(f.tb.TempDir(), "kubeconfig"), "https://127.0.0.1:6443", ca, user)
}

// writeKubeconfig writes a kubeconfig to path; user is JSON.
func writeKubeconfig(tb testing.TB, path, server string, ca []byte, user string) string {
	if user == "" {
		user = `{"token": "secret"}`
	}
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "it",
		"clusters": []any{map[string]any{"name": "it", "cluster": map[string]any{"server": server, "certificate-authority-data": ca}}},
		"users":    []any{map[string]any{"name": "me", "user": json.RawMessage(user)}},
		"contexts": []any{map[string]any{"name": "it", "context": map[string]any{"cluster": "it", "user": "me"}}},
	})
	require.NoError(tb, err)
	require.NoError(tb, os.WriteFile(path, text, 0o600))
	return path
}

func (f *fakeAPI) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	f.mu.Lock()
	err := f.dialErr
	f.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if f.addr != "" && addr != f.addr {
		return nil, fmt.Errorf("dialled %s", addr)
	}
	ours, theirs := net.Pipe()
	select {
	case f.dials <- theirs:
		c := &mortalConn{Conn: ours, closed: make(chan struct{})}
		f.set(func() {
			before := f.dead
			f.dead = func() { before(); c.dead.Store(true) }
		})
		return c, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// set says what goes wrong from now on.
func (f *fakeAPI) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeAPI) listed() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.lists)
}

func (f *fakeAPI) put(s corev1.Service) {
	f.set(func() {
		kind := "MODIFIED"
		if _, ok := f.services[s.Namespace+"/"+s.Name]; !ok {
			kind = "ADDED"
		}
		f.record(kind, s)
	})
}

func (f *fakeAPI) delete(s corev1.Service) { f.set(func() { f.record("DELETED", s) }) }

func (f *fakeAPI) record(kind string, s corev1.Service) {
	f.version++
	s.ResourceVersion = strconv.Itoa(f.version)
	s.TypeMeta = metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}
	f.services[s.Namespace+"/"+s.Name] = s
	if kind == "DELETED" {
		delete(f.services, s.Namespace+"/"+s.Name)
	}
	text, err := json.Marshal(map[string]any{"type": kind, "object": s})
	if err != nil {
		panic(err)
	}
	f.history = append(f.history, fakeEvent{f.version, text})
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fakeAPI) serve(w http.ResponseWriter, r *http.Request) {
	watch := r.URL.Query().Get("watch") == "true"
	f.mu.Lock()
	instead := f.list
	if watch {
		instead = f.watch
		f.watches = append(f.watches, time.Now())
	} else if r.URL.Query().Get("continue") == "" {
		f.lists = append(f.lists, time.Now())
	}
	f.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.URL.Path != "/api/v1/services":
		http.NotFound(w, r)
	case instead != nil && instead(w, r):
	case watch:
		f.serveWatch(w, r)
	default:
		f.serveList(w, r)
	}
}

func (f *fakeAPI) serveList(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	n, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	if f.pages > 0 {
		n = f.pages
	}
	list := corev1.ServiceList{TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"}, Items: []corev1.Service{}}
	list.ResourceVersion = strconv.Itoa(f.version)
	i := 0
	for _, key := range sortedKeys(f.services) {
		if i >= from && i < from+n {
			list.Items = append(list.Items, f.services[key])
		}
		i++
	}
	if from+n < i {
		list.Continue = strconv.Itoa(from + n)
	}
	_ = json.NewEncoder(w).Encode(list)
}

func (f *fakeAPI) serveWatch(w http.ResponseWriter, r *http.Request) {
	at, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.WriteHeader(http.StatusOK)
	for r.Context().Err() == nil {
		f.mu.Lock()
		changed := f.changed
		var send []byte
		for _, e := range f.history {
			if e.version > at {
				send = append(send, e.text...)
				at = e.version
			}
		}
		f.mu.Unlock()
		_, _ = w.Write(send)
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
		}
	}
}

// A mortalConn loses every byte once it is dead.
type mortalConn struct {
	net.Conn
	dead   atomic.Bool
	once   sync.Once
	closed chan struct{}
}

func (c *mortalConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.dead.Load() {
		<-c.closed
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *mortalConn) Write(p []byte) (int, error) {
	if c.dead.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *mortalConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// A pipeListener accepts what fakeAPI.dial sends.
type pipeListener struct {
	dials  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.dials:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 6443} }

// service is one of type LoadBalancer with one TCP port.
func service(name string, port int32) corev1.Service {
	return corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer,
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: port, NodePort: 30000 + port}}},
	}
}

// fail answers with a Status.
func fail(code int, reason metav1.StatusReason, message string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(status(code, reason, message))
		return true
	}
}

func status(code int, reason metav1.StatusReason, message string) metav1.Status {
	return metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
		Message: message, Reason: reason, Code: int32(code)}
}

// answer writes text and ends the answer.
func answer(text string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		_, _ = w.Write([]byte(text))
		return true
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// A watcher is a Follow under way, and what it was told.
type watcher struct {
	client  *Client
	cancel  context.CancelFunc
	done    chan error
	mu      sync.Mutex
	updates []Update
}

// follow starts a Client on f, which ends with f or with stop.
func (f *fakeAPI) follow(path string) *watcher {
	c, err := New(Options{Kubeconfig: path, Dial: f.dial})
	require.NoError(f.tb, err)
	ctx, cancel := context.WithCancel(context.Background())
	w := &watcher{client: c, cancel: cancel, done: make(chan error, 1)}
	f.watchers = append(f.watchers, w)
	go func() {
		defer close(w.done)
		w.done <- c.Follow(ctx, func(u Update) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.updates = append(w.updates, u)
		})
	}()
	return w
}

func (w *watcher) stop(tb testing.TB) {
	w.cancel()
	if err, first := <-w.done; first {
		assert.ErrorIs(tb, err, context.Canceled)
	}
	assert.NoError(tb, w.client.Close())
}

// told is how many updates there were, and the last.
func (w *watcher) told() (int, Update) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.updates) == 0 {
		return 0, Update{}
	}
	return len(w.updates), w.updates[len(w.updates)-1]
}

// names are those of the last update, with the first port of each: "web:80".
func (w *watcher) names() []string {
	_, u := w.told()
	names := []string{}
	for _, s := range u.Services {
		n := s.Name
		for _, p := range s.Ports {
			n += fmt.Sprintf(":%d", p.Number)
		}
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}
