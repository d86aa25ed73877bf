package docker

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

const (
	// idle is how long a connection waits for its next use: longer than the 30 s
	// between two comparisons.
	idle = 90 * time.Second
	// inspectors is how many inspections are under way at once. An inspection
	// costs the engine well under a millisecond; what they hide from each other is
	// the round trip.
	inspectors = 8
)

// A wire carries requests to the engine: it dials, puts a gauge before every
// answer, and says in our words why no answer came, before the engine's client
// library says it in its own and forgets the cause.
type wire struct {
	*http.Transport
	// date is the engine's own clock in its last answer, in Unix seconds; 0 until
	// there is one.
	date atomic.Int64
}

// newWire makes a wire whose connections end when life does.
func newWire(life context.Context, dial func(context.Context, string, string) (net.Conn, error), config *tls.Config) *wire {
	h1 := new(http.Protocols)
	h1.SetHTTP1(true)
	return &wire{Transport: &http.Transport{
		// The transport goes on dialling for the next request when one has left.
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			defer context.AfterFunc(life, cancel)()
			conn, err := dial(ctx, network, addr)
			if err == nil && life.Err() != nil {
				_ = conn.Close()
				return nil, life.Err()
			}
			return conn, err
		},
		TLSClientConfig:        config,
		TLSHandshakeTimeout:    10 * time.Second,
		Protocols:              h1,
		DisableCompression:     true, // an answer's length is what is on the wire
		MaxIdleConnsPerHost:    inspectors,
		IdleConnTimeout:        idle,
		MaxResponseHeaderBytes: 64 << 10,
	}}
}

// A call is what the wire is to know of a request, through its context.
type call struct {
	max    measure
	opened func()        // told when the answer has begun and is a good one
	raw    *bytes.Buffer // what was read of the answer's body
}

type callKey struct{}

func (c *call) of(ctx context.Context) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// RoundTrip implements http.RoundTripper.
func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := w.Transport.RoundTrip(req)
	if err != nil {
		if ended := req.Context().Err(); ended != nil {
			return nil, ended
		}
		return nil, unreached(err, w.TLSClientConfig != nil)
	}
	if t, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		w.date.Store(t.Unix())
	}
	c, ok := req.Context().Value(callKey{}).(*call)
	if !ok || resp.StatusCode != http.StatusOK || req.URL.Path == "/_ping" {
		resp.Body = &gauge{r: resp.Body, max: remark}
		return resp, nil
	}
	resp.Body = &gauge{r: resp.Body, max: c.max}
	if c.raw != nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.TeeReader(resp.Body, c.raw), resp.Body}
	}
	if c.opened != nil {
		c.opened()
	}
	return resp, nil
}
