package guesttest

import (
	"encoding/json"
	"io"
	"log"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// keep is how many events the engine replays at most (daemon/events).
const keep = 256

// silent is the log of a server whose clients leave at any point.
var silent = log.New(io.Discard, "", 0)

// An event is one message of the stream.
type event struct {
	kind, action string
	at           time.Time
	text         []byte
}

// A stream is a client's GET /events.
type stream struct {
	kinds, actions []string // empty: all
	out            chan []byte
	cut            chan []byte // sent last, then the connection breaks
}

func (s *stream) wants(e event) bool {
	return (len(s.kinds) == 0 || slices.Contains(s.kinds, e.kind)) &&
		(len(s.actions) == 0 || slices.Contains(s.actions, e.action))
}

// Emit tells an event of a container: of kind "container", or "network" with
// the action "connect" or "disconnect".
func (e *Engine) Emit(kind, action, container string) {
	now := time.Now()
	id, attributes := container, map[string]string{"image": "busybox"}
	if kind == "network" {
		id, attributes = FakeID(1<<20), map[string]string{"container": container, "name": "bridge", "type": "bridge"}
	}
	text, err := json.Marshal(map[string]any{
		"Type": kind, "Action": action, "Actor": map[string]any{"ID": id, "Attributes": attributes},
		"scope": "local", "time": now.Unix(), "timeNano": now.UnixNano(),
	})
	if err != nil {
		panic(err) // strings only
	}
	e.send(event{kind, action, now, append(text, '\n')})
}

// EmitRaw sends text to every stream as it is, whatever they asked for.
func (e *Engine) EmitRaw(text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for s := range e.streams {
		s.out <- []byte(text)
	}
}

func (e *Engine) send(v event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.history = append(e.history, v)
	e.history = e.history[max(0, len(e.history)-keep):]
	for s := range e.streams {
		if s.wants(v) {
			s.out <- v.text
		}
	}
}

// Streams returns how many event streams are open.
func (e *Engine) Streams() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.streams)
}

// Cut sends text to every event stream and then breaks its connection: in the
// middle of an event with the beginning of one, between two with "".
func (e *Engine) Cut(text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for s := range e.streams {
		s.cut <- []byte(text)
		delete(e.streams, s)
	}
}

func (e *Engine) events(w http.ResponseWriter, r *http.Request) {
	// Deep enough for what a test sends in one go: Emit holds the lock.
	s := &stream{out: make(chan []byte, 1<<14), cut: make(chan []byte, 1)}
	var filters map[string]map[string]bool
	_ = json.Unmarshal([]byte(r.URL.Query().Get("filters")), &filters) // none: all
	for k := range filters["type"] {
		s.kinds = append(s.kinds, k)
	}
	for a := range filters["event"] {
		s.actions = append(s.actions, a)
	}
	e.mu.Lock()
	if !e.speaks(w, r) {
		e.mu.Unlock()
		return
	}
	if since := r.URL.Query().Get("since"); since != "" {
		seconds, _, _ := strings.Cut(since, ".")
		n, _ := strconv.ParseInt(seconds, 10, 64) // 0: from the beginning
		for _, v := range e.history {
			if v.at.Unix() >= n && s.wants(v) {
				s.out <- v.text
			}
		}
	}
	e.streams[s] = struct{}{}
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.streams, s)
		e.mu.Unlock()
	}()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	_ = flush.Flush()
	for {
		select {
		case text := <-s.out:
			if _, err := w.Write(text); err != nil {
				return
			}
			_ = flush.Flush()
		case text := <-s.cut:
			for len(s.out) > 0 { // what was sent before; nothing is sent after
				_, _ = w.Write(<-s.out)
			}
			_, _ = w.Write(text)
			_ = flush.Flush()
			panic(http.ErrAbortHandler) // breaks the connection
		case <-r.Context().Done():
			return
		case <-e.closed:
			return
		}
	}
}
