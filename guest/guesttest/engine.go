package guesttest

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// A FakeContainer is a container of an Engine. The zero value of a field is what
// the engine says when there is nothing to say.
type FakeContainer struct {
	ID    string // 64 hexadecimal digits; FakeID makes one
	Name  string // without the slash; sent as it is, whatever it holds
	Links []string
	// State is "running" if empty. All but running and paused ones are left out of
	// the listing, unless the Engine lists everything.
	State            string
	Created, Started time.Time
	Labels           map[string]string
	NetworkMode      string // "bridge" if empty
	Networks         []FakeNetwork
	// Ports are the network settings' and HostPorts the host configuration's, by
	// "80/tcp". A nil Ports is null; a nil list of bindings is null too.
	Ports, HostPorts map[string][]FakeBinding
}

// A FakeNetwork is a container's endpoint in a network.
type FakeNetwork struct{ Name, EndpointID, IPv4, IPv6 string }

// A FakeBinding is one entry of an engine's port map, as text.
type FakeBinding struct {
	HostIP   string `json:"HostIp"`
	HostPort string
}

// FakeID returns the ID of the fake container number n.
func FakeID(n int) string { return fmt.Sprintf("%064x", n+1) }

// Published returns a running container number n with one TCP port, published in
// both families as the engine does, on the network "bridge".
func Published(n int, hostPort, port uint16) FakeContainer {
	key, number := fmt.Sprintf("%d/tcp", port), strconv.Itoa(int(hostPort))
	bindings := []FakeBinding{{"0.0.0.0", number}, {"::", number}}
	return FakeContainer{
		ID: FakeID(n), Name: fmt.Sprintf("c%d", n),
		Created: time.Unix(1700000000+int64(n), 0), Started: time.Unix(1700000000+int64(n), 500),
		Networks: []FakeNetwork{{
			Name: "bridge", EndpointID: fmt.Sprintf("%064x", 1<<32+n),
			IPv4: netip.AddrFrom4([4]byte{172, 17, byte(n >> 8), byte(n)}).String(),
		}},
		Ports:     map[string][]FakeBinding{key: bindings},
		HostPorts: map[string][]FakeBinding{key: {{"", number}}},
	}
}

// An Engine is a fake Docker engine. Its methods may be called at any time, from
// any goroutine.
type Engine struct {
	server   *httptest.Server
	endpoint string
	closed   chan struct{} // ends the event streams

	mu         sync.Mutex
	version    string
	all        bool
	containers []FakeContainer
	history    []event
	streams    map[*stream]struct{}
	asked      map[string]int
	fault      func(http.Handler) http.Handler
}

// NewEngine starts an engine of API 1.41 without containers on a loopback TCP
// port. The test's end stops it.
func NewEngine(tb testing.TB) *Engine {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatalf("listen for the fake engine: %v", err)
	}
	return ServeEngine(tb, l, nil)
}

// NewUnixEngine is NewEngine on a unix socket in the test's own directory.
func NewUnixEngine(tb testing.TB) *Engine {
	tb.Helper()
	l, err := net.Listen("unix", filepath.Join(tb.TempDir(), "docker.sock"))
	if err != nil {
		tb.Fatalf("listen for the fake engine: %v", err)
	}
	return ServeEngine(tb, l, nil)
}

// ServeEngine is NewEngine on a listener, which it closes, with TLS unless
// config is nil.
func ServeEngine(tb testing.TB, l net.Listener, config *tls.Config) *Engine {
	e := &Engine{
		endpoint: l.Addr().Network() + "://" + l.Addr().String(),
		version:  "1.41", closed: make(chan struct{}),
		streams: make(map[*stream]struct{}), asked: make(map[string]int),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/_ping", e.ping)
	mux.HandleFunc("GET /{version}/containers/json", e.list)
	mux.HandleFunc("GET /{version}/containers/{id}/json", e.inspect)
	mux.HandleFunc("GET /{version}/events", e.events)
	e.server = &httptest.Server{Listener: l, TLS: config, Config: &http.Server{Handler: http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			e.mu.Lock()
			e.asked[kindOf(r)]++
			fault := e.fault
			e.mu.Unlock()
			if fault != nil {
				fault(mux).ServeHTTP(w, r)
				return
			}
			mux.ServeHTTP(w, r)
		})}}
	e.server.Config.ErrorLog = silent
	if config != nil {
		e.server.StartTLS()
	} else {
		e.server.Start()
	}
	tb.Cleanup(e.Close)
	return e
}

// Endpoint returns where it is, as package docker takes it.
func (e *Engine) Endpoint() string { return e.endpoint }

// Close stops the engine and breaks every connection. Closing again does
// nothing.
func (e *Engine) Close() {
	e.mu.Lock()
	select {
	case <-e.closed:
	default:
		close(e.closed)
	}
	e.mu.Unlock()
	e.server.CloseClientConnections()
	e.server.Close()
}

// SetVersion sets the API's version that it tells; "" tells none.
func (e *Engine) SetVersion(v string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.version = v
}

// ListAll makes it list containers that do not run too, though nobody asked.
func (e *Engine) ListAll(all bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = all
}

// Set replaces all containers, in the order in which they are listed. Nothing is
// told on the event stream.
func (e *Engine) Set(containers ...FakeContainer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.containers = slices.Clone(containers)
}

// Put adds a container, or replaces the one of its ID, silently.
func (e *Engine) Put(c FakeContainer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if i := e.index(c.ID); i >= 0 {
		e.containers[i] = c
		return
	}
	e.containers = append(e.containers, c)
}

// Remove takes a container away, silently.
func (e *Engine) Remove(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if i := e.index(id); i >= 0 {
		e.containers = slices.Delete(e.containers, i, i+1)
	}
}

// Start is Put and the event "start".
func (e *Engine) Start(c FakeContainer) {
	e.Put(c)
	e.Emit("container", "start", c.ID)
}

// Stop is Remove and the events "die" and "stop".
func (e *Engine) Stop(id string) {
	e.Remove(id)
	e.Emit("container", "die", id)
	e.Emit("container", "stop", id)
}

// index returns where the container is; -1 if it is not. e.mu is held.
func (e *Engine) index(id string) int {
	return slices.IndexFunc(e.containers, func(c FakeContainer) bool { return c.ID == id })
}

// Asked returns how many requests of a kind have come in: "ping", "list",
// "inspect" or "events".
func (e *Engine) Asked(kind string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.asked[kind]
}

func kindOf(r *http.Request) string {
	_, path, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch {
	case r.URL.Path == "/_ping":
		return "ping"
	case path == "containers/json":
		return "list"
	case path == "events":
		return "events"
	case strings.HasSuffix(path, "/json"):
		return "inspect"
	}
	return "other"
}

func (e *Engine) ping(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	version := e.version
	e.mu.Unlock()
	if version != "" {
		w.Header().Set("Api-Version", version)
	}
	w.Header().Set("Ostype", "linux")
	_, _ = w.Write([]byte("OK"))
}

func (e *Engine) list(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.speaks(w, r) {
		return
	}
	all := make([]any, 0, len(e.containers))
	for _, c := range e.containers {
		if s := c.state(); e.all || s == "running" || s == "paused" {
			all = append(all, c.listed())
		}
	}
	answer(w, all)
}

func (e *Engine) inspect(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.speaks(w, r) {
		return
	}
	i := e.index(r.PathValue("id"))
	if i < 0 {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		_ = json.NewEncoder(w).Encode(map[string]string{"message": "No such container: " + r.PathValue("id")})
		return
	}
	answer(w, e.containers[i].inspected())
}

// speaks refuses a request of a version that is newer than the engine's, in the
// engine's words. e.mu is held.
func (e *Engine) speaks(w http.ResponseWriter, r *http.Request) bool {
	asked := strings.TrimPrefix(r.PathValue("version"), "v")
	if minor(asked) <= minor(e.version) {
		return true
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	_ = json.NewEncoder(w).Encode(map[string]string{"message": fmt.Sprintf(
		"client version %s is too new. Maximum supported API version is %s", asked, e.version)})
	return false
}

func minor(version string) int {
	_, m, _ := strings.Cut(version, ".")
	n, _ := strconv.Atoi(m) // 0: older than any
	return n
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func (c *FakeContainer) state() string {
	if c.State == "" {
		return "running"
	}
	return c.State
}

func (c *FakeContainer) mode() string {
	if c.NetworkMode == "" {
		return "bridge"
	}
	return c.NetworkMode
}

func (c *FakeContainer) networks() map[string]any {
	m := make(map[string]any, len(c.Networks))
	for _, n := range c.Networks {
		m[n.Name] = map[string]any{"EndpointID": n.EndpointID, "IPAddress": n.IPv4, "GlobalIPv6Address": n.IPv6,
			"MacAddress": "", "Gateway": "", "IPv6Gateway": ""}
	}
	return m
}

// listed is the container in GET /containers/json. Bindings without a number or
// with an address that is none are not in it, as in the engine's.
func (c *FakeContainer) listed() map[string]any {
	names := []string{"/" + c.Name}
	for _, l := range c.Links {
		names = append(names, "/"+l)
	}
	ports := []any{}
	for key, bindings := range c.Ports {
		number, proto, _ := strings.Cut(key, "/")
		port, err := strconv.ParseUint(number, 10, 16)
		if err != nil {
			continue
		}
		if len(bindings) == 0 {
			ports = append(ports, map[string]any{"PrivatePort": port, "Type": proto})
		}
		for _, b := range bindings {
			_, wrong := netip.ParseAddr(b.HostIP)
			if public, err := strconv.ParseUint(b.HostPort, 10, 16); err == nil && (wrong == nil || b.HostIP == "") {
				ports = append(ports, map[string]any{"IP": b.HostIP, "PrivatePort": port, "PublicPort": public, "Type": proto})
			}
		}
	}
	return map[string]any{
		"Id": c.ID, "Names": names, "Image": "busybox", "Command": "httpd -f", "Created": c.Created.Unix(),
		"Ports": ports, "Labels": c.Labels, "State": c.state(), "Status": "Up 2 hours",
		"HostConfig":      map[string]any{"NetworkMode": c.mode()},
		"NetworkSettings": map[string]any{"Networks": c.networks()}, "Mounts": []any{},
	}
}

// inspected is the container in GET /containers/ID/json.
func (c *FakeContainer) inspected() map[string]any {
	return map[string]any{
		"Id": c.ID, "Name": "/" + c.Name, "Created": c.Created.UTC().Format(time.RFC3339Nano),
		"State": map[string]any{"Status": c.state(), "Running": c.state() == "running" || c.state() == "paused",
			"StartedAt": c.Started.UTC().Format(time.RFC3339Nano)},
		"Config":          map[string]any{"Labels": c.Labels},
		"HostConfig":      map[string]any{"NetworkMode": c.mode(), "PortBindings": c.HostPorts},
		"NetworkSettings": map[string]any{"Ports": c.Ports, "Networks": c.networks()},
	}
}
