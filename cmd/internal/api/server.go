package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"
)

const (
	// maxBody bounds a request: a publish's text is some 60 bytes, so ten
	// thousand of them are well below 1 MiB.
	maxBody = 1 << 20
	// headerTimeout bounds how long a client may take to say what it wants.
	headerTimeout = 10 * time.Second
	// idleTimeout ends a connection that asks nothing more.
	idleTimeout = time.Minute
	// maxFollowers bounds the streams of events: each remembers the whole ledger,
	// which is a megabyte where there are a thousand rows.
	maxFollowers = 64
)

// A Backend is what the API speaks for. Its methods are safe for concurrent use.
type Backend interface {
	// Listeners returns the ledger: all of it, or the rows of what of names, a
	// container, a Service or a publish. Its error is a *Problem.
	Listeners(of string) ([]Listener, error)
	Names() []Name
	Flows() []Flow
	VMs() []VM
	// Publish adds publishes of the CLI and returns their rows; Unpublish
	// removes them and returns the rows as they were: their ports are free
	// then. An error is the request's: a *Problem to say which status it has.
	Publish(ctx context.Context, r PublishRequest) ([]Listener, error)
	Unpublish(ctx context.Context, r PublishRequest) ([]Listener, error)
	// Kubernetes returns the clusters of the VMs whose config names one.
	Kubernetes() []Kubernetes
	// WantKubernetes says whether a cluster's ports are wanted. When it returns
	// with false they are closed (C-43).
	WantKubernetes(ctx context.Context, r KubernetesRequest) error
	// Events calls emit for every change after it has called started, until ctx
	// or the daemon ends, or emit fails.
	Events(ctx context.Context, started func(), emit func(Event) error) error
	// Doctor walks the way from the host to what of names: a host port, or what
	// Listeners takes; all of them when it is empty. A vm that is not empty
	// leaves the others out. Its error is a *Problem.
	Doctor(ctx context.Context, vm, of string) ([]Step, error)
	// Trace begins a trace. Its error is the request's, as Publish's.
	Trace(r TraceRequest) (Trace, error)
}

// A Server serves a Backend on a unix socket.
type Server struct {
	backend   Backend
	http      http.Server
	followers chan struct{} // holds one for each stream of events
}

// NewServer returns a Server of b, which tells log what goes wrong.
func NewServer(b Backend, log *slog.Logger) *Server {
	s := &Server{backend: b, followers: make(chan struct{}, maxFollowers)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/listeners", s.listeners)
	mux.HandleFunc("GET /v1/names", func(w http.ResponseWriter, _ *http.Request) { reply(w, b.Names()) })
	mux.HandleFunc("GET /v1/flows", func(w http.ResponseWriter, _ *http.Request) { reply(w, b.Flows()) })
	mux.HandleFunc("GET /v1/vms", func(w http.ResponseWriter, _ *http.Request) { reply(w, b.VMs()) })
	mux.HandleFunc("PUT /v1/publishes", s.publishes(b.Publish))
	mux.HandleFunc("DELETE /v1/publishes", s.publishes(b.Unpublish))
	mux.HandleFunc("GET /v1/kubernetes", func(w http.ResponseWriter, _ *http.Request) { reply(w, b.Kubernetes()) })
	mux.HandleFunc("PUT /v1/kubernetes", s.wantKubernetes)
	mux.HandleFunc("GET /v1/doctor", s.doctor)
	mux.HandleFunc("GET /v1/events", s.events)
	mux.HandleFunc("GET /v1/trace", s.trace)
	mux.HandleFunc("GET /healthz", s.health)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { unknown(mux, w, r) })
	s.http = http.Server{
		Handler: mux, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	return s
}

// Serve serves connections of l, whose peers have been checked, until Shutdown.
func (s *Server) Serve(l net.Listener) error {
	err := s.http.Serve(&checkedListener{l})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Shutdown ends Serve, lets requests under way end until ctx does, and cuts off
// the rest.
func (s *Server) Shutdown(ctx context.Context) {
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close() // streams of events do not end by themselves
	}
}

// A checkedListener gives out connections of the daemon's own user and root.
type checkedListener struct{ net.Listener }

func (l *checkedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || peerAllowed(c) {
			return c, err
		}
		_ = c.Close()
	}
}

// replyBuffer is what a reply writes at a time. A row is some 400 bytes.
const replyBuffer = 64 << 10

// reply answers with list, entry by entry: an encoder writes nothing before it has
// the whole of what it is given, and ten thousand rows are four megabytes.
func reply[T any](w http.ResponseWriter, list []T) {
	w.Header().Set("Content-Type", "application/json")
	out := bufio.NewWriterSize(w, replyBuffer)
	entries := json.NewEncoder(out)
	before := byte('[')
	for i := range list {
		_ = out.WriteByte(before)
		if entries.Encode(&list[i]) != nil {
			return // the client has left, which is no error of ours
		}
		before = ','
	}
	if len(list) == 0 {
		_ = out.WriteByte(before)
	}
	_, _ = out.WriteString("]\n")
	_ = out.Flush()
}

func problem(w http.ResponseWriter, err error) {
	var p *Problem
	if !errors.As(err, &p) {
		p = &Problem{Status: http.StatusInternalServerError, Detail: err.Error()}
	}
	p.Title = http.StatusText(p.Status)
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p)
}

// unknown answers what nothing of mux serves, and says which methods would be.
func unknown(mux *http.ServeMux, w http.ResponseWriter, r *http.Request) {
	p := &Problem{Status: http.StatusNotFound, Detail: fmt.Sprintf("this daemon has no %s", r.URL.Path)}
	var allowed []string
	for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete} {
		if _, pattern := mux.Handler(&http.Request{Method: method, Host: r.Host, URL: r.URL}); pattern != "/" {
			allowed = append(allowed, method)
		}
	}
	if len(allowed) > 0 {
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		p.Status = http.StatusMethodNotAllowed
		p.Detail = fmt.Sprintf("%s takes %s, not %s", r.URL.Path, strings.Join(allowed, " and "), r.Method)
	}
	problem(w, p)
}

func (s *Server) listeners(w http.ResponseWriter, r *http.Request) {
	rows, err := s.backend.Listeners(r.URL.Query().Get("of"))
	if err != nil {
		problem(w, err)
		return
	}
	reply(w, rows)
}

func (s *Server) doctor(w http.ResponseWriter, r *http.Request) {
	steps, err := s.backend.Doctor(r.Context(), r.URL.Query().Get("vm"), r.URL.Query().Get("of"))
	if err != nil {
		problem(w, err)
		return
	}
	reply(w, steps)
}

func (s *Server) publishes(do func(context.Context, PublishRequest) ([]Listener, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req, err := readPublishes(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			problem(w, err)
			return
		}
		rows, err := do(r.Context(), req)
		if err != nil {
			problem(w, err)
			return
		}
		reply(w, rows)
	}
}

// readPublishes reads a request and refuses what it does not know.
func readPublishes(body io.Reader) (req PublishRequest, err error) {
	if err := readBody(body, &req); err != nil {
		return req, err
	}
	if len(req.Publish) == 0 {
		return req, &Problem{Status: http.StatusBadRequest, Detail: `request body: "publish" names nothing`}
	}
	return req, nil
}

func (s *Server) wantKubernetes(w http.ResponseWriter, r *http.Request) {
	req, err := readKubernetes(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		err = s.backend.WantKubernetes(r.Context(), req)
	}
	if err != nil {
		problem(w, err)
		return
	}
	reply(w, s.backend.Kubernetes())
}

// readKubernetes reads a request. One that does not say what it wants is
// refused: it must not close ports by leaving something out.
func readKubernetes(body io.Reader) (req KubernetesRequest, err error) {
	var said struct {
		VM     string `json:"vm"`
		Wanted *bool  `json:"wanted"`
	}
	if err := readBody(body, &said); err != nil {
		return req, err
	}
	if said.Wanted == nil {
		return req, &Problem{Status: http.StatusBadRequest, Detail: `request body: "wanted" is neither true nor false`}
	}
	return KubernetesRequest{VM: said.VM, Wanted: *said.Wanted}, nil
}

// readBody reads the one document of a request into req; the error is a
// *Problem.
func readBody(body io.Reader, req any) error {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	err := d.Decode(req)
	if err == nil {
		if _, more := d.Token(); more != io.EOF {
			err = errors.New("there is more after the request")
		}
	}
	if err == nil {
		return nil
	}
	p := &Problem{Status: http.StatusBadRequest, Detail: "request body: " + err.Error()}
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		p.Status = http.StatusRequestEntityTooLarge
	}
	return p
}

func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	select {
	case s.followers <- struct{}{}:
		defer func() { <-s.followers }()
	default:
		problem(w, &Problem{Status: http.StatusServiceUnavailable, Detail: fmt.Sprintf("%d clients follow the events already", maxFollowers)})
		return
	}
	w.Header().Set("Content-Type", "application/jsonl")
	flush := http.NewResponseController(w)
	lines := json.NewEncoder(w)
	// The headers tell the client that it misses nothing from now on.
	started := func() { _ = flush.Flush() }
	_ = s.backend.Events(r.Context(), started, func(e Event) error {
		if err := lines.Encode(e); err != nil {
			return err
		}
		return flush.Flush()
	})
}

// health answers 200: it is the daemon's health, and a VM that is switched off
// is no fault of the daemon. The text says how the VMs are.
func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	text := "ok\n"
	for _, vm := range s.backend.VMs() {
		text += fmt.Sprintf("%s: %s", vm.Name, vm.State)
		if vm.Detail != "" {
			text += " (" + vm.Detail + ")"
		}
		text += "\n"
	}
	_, _ = io.WriteString(w, text)
}
