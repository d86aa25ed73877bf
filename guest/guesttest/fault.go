package guesttest

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
)

// Fault puts f around the engine's handler, for every request from now on; nil
// heals it.
func (e *Engine) Fault(f func(http.Handler) http.Handler) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fault = f
}

// FaultIn is Fault for one kind of request only (see Asked).
func (e *Engine) FaultIn(kind string, f func(http.Handler) http.Handler) {
	e.Fault(func(next http.Handler) http.Handler {
		faulty := f(next)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if kindOf(r) == kind {
				faulty.ServeHTTP(w, r)
				return
			}
			next.ServeHTTP(w, r)
		})
	})
}

// Status answers with a status and an engine's error.
func Status(code int) func(http.Handler) http.Handler {
	return func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			_, _ = w.Write([]byte(`{"message":"the engine has ` + strconv.Itoa(code) + ` of its own"}`))
		})
	}
}

// Text answers every request with text.
func Text(text string) func(http.Handler) http.Handler {
	return func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(text))
		})
	}
}

// Truncated breaks the connection after the first n bytes of an answer's body;
// announced says whether its whole length was announced before, or the answer
// ends as if that had been all.
func Truncated(n int, announced bool) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			whole := httptest.NewRecorder()
			next.ServeHTTP(whole, r)
			w.Header().Set("Content-Type", "application/json")
			if announced {
				w.Header().Set("Content-Length", strconv.Itoa(whole.Body.Len()))
			}
			_, _ = w.Write(whole.Body.Bytes()[:min(n, whole.Body.Len())])
		})
	}
}

// Held holds answers back. What they say is made when the request comes in.
type Held struct {
	// Arrived has one entry for each request that waits.
	Arrived chan struct{}
	release chan struct{}
	once    sync.Once
}

// Hold makes a Held, whose In is given to Fault or FaultIn.
func Hold() *Held {
	return &Held{Arrived: make(chan struct{}, 1<<14), release: make(chan struct{})}
}

// In is the fault.
func (h *Held) In(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		whole := httptest.NewRecorder()
		next.ServeHTTP(whole, r)
		h.Arrived <- struct{}{}
		select {
		case <-h.release:
		case <-r.Context().Done():
			return
		}
		for k, v := range whole.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(whole.Code)
		_, _ = w.Write(whole.Body.Bytes())
	})
}

// Release lets them go, and those that come later too.
func (h *Held) Release() { h.once.Do(func() { close(h.release) }) }
