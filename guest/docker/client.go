package docker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"

	"github.com/moby/moby/client"
	"github.com/moby/moby/client/pkg/versions"
)

// minAPI is the API of Docker 20.10, of December 2020: the oldest that
// distributions still ship and that we test with.
const minAPI = "1.41"

// Options say how an engine is reached.
type Options struct {
	// Endpoint is as ValidateEndpoint takes it.
	Endpoint string
	// TLS is for tcp endpoints only.
	TLS TLSFiles
	// Dial connects to a tcp endpoint: through the VM's netstack. It should probe
	// the connection by keepalive, for an event stream may be silent for days.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// A Client is a client of one engine. Its methods may be called concurrently.
// It connects when it is asked something, and keeps connections for later.
type Client struct {
	endpoint string
	network  string
	addr     string
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	tls      *tls.Config // nil without
	seen     cache

	mu      sync.Mutex
	current *session        // nil until the next call makes one
	life    context.Context // ends with Close, which begins another
	end     context.CancelFunc
}

// New makes a Client. It connects to nothing yet: what it refuses is an endpoint
// that cannot be, and TLS files that cannot be read or do not fit.
func New(o Options) (*Client, error) {
	network, addr, err := splitEndpoint(o.Endpoint)
	if err != nil {
		return nil, err
	}
	if network == "unix" && o.TLS != (TLSFiles{}) {
		return nil, fmt.Errorf("docker.tls is for tcp endpoints; %s needs none", o.Endpoint)
	}
	dial := o.Dial
	if network == "unix" {
		dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", addr)
		}
	}
	if dial == nil {
		return nil, fmt.Errorf("endpoint %s: nothing to dial it with", o.Endpoint)
	}
	tlsConfig, err := o.TLS.config()
	if err != nil {
		return nil, err
	}
	c := &Client{endpoint: o.Endpoint, network: network, addr: addr, dial: dial, tls: tlsConfig}
	c.life, c.end = context.WithCancel(context.Background())
	return c, nil
}

// A session is what is known of the engine between two faults: the API's version
// and pooled connections. After a fault, and after Close, the next call makes
// another: the engine on the other side may be a different one.
type session struct {
	life   context.Context // the Client's when it was made
	wire   *wire
	api    *client.Client
	asking chan struct{} // holds one: who negotiates
	agreed atomic.Bool
}

// newSession makes a session. c.mu is held.
func (c *Client) newSession() (*session, error) {
	s := &session{life: c.life, wire: newWire(c.life, c.dial, c.tls), asking: make(chan struct{}, 1)}
	scheme := "http"
	if c.tls != nil {
		scheme = "https"
	}
	api, err := client.New(
		client.WithHost(c.network+"://"+c.addr),
		client.WithScheme(scheme),
		client.WithHTTPClient(&http.Client{Transport: s.wire, CheckRedirect: client.CheckRedirect}),
	)
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", c.endpoint, err)
	}
	s.api = api
	return s, nil
}

// session returns the current session, with the API's version agreed on, and a
// context for calls that ends with Close too. The caller calls done.
func (c *Client) session(ctx context.Context) (_ *session, _ context.Context, done func(), err error) {
	c.mu.Lock()
	if c.current == nil {
		c.current, err = c.newSession()
	}
	s := c.current
	c.mu.Unlock()
	if err != nil {
		return nil, nil, nil, err
	}
	under, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.life, cancel)
	done = func() { stop(); cancel() }
	if err := s.negotiate(under); err != nil {
		done()
		return nil, nil, nil, c.fault(ctx, s, err)
	}
	return s, under, done, nil
}

// negotiate agrees on the API's version, once a session.
func (s *session) negotiate(ctx context.Context) error {
	select {
	case s.asking <- struct{}{}:
		defer func() { <-s.asking }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if s.agreed.Load() {
		return nil
	}
	pong, err := s.api.Ping(ctx, client.PingOptions{NegotiateAPIVersion: true})
	switch {
	case pong.APIVersion != "" && versions.LessThan(pong.APIVersion, minAPI):
		return &failure{fmt.Sprintf("speaks version %s of the API, and culvert needs %s, of Docker 20.10, or newer", clean(pong.APIVersion, maxText), minAPI)}
	case err != nil:
		return err
	case pong.APIVersion == "":
		return &failure{"answers, but not as a Docker engine does: it names no version of its API"}
	}
	s.agreed.Store(true)
	return nil
}

// fault says what went wrong in the words of errors.go, and leaves the session:
// what comes next asks anew.
func (c *Client) fault(ctx context.Context, s *session, err error) error {
	c.leave(s)
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("engine at %s did not answer in time: %w", c.endpoint, ctx.Err())
	case ctx.Err() != nil:
		return ctx.Err()
	case s.life.Err() != nil:
		return fmt.Errorf("engine at %s: %w", c.endpoint, os.ErrClosed)
	}
	return fmt.Errorf("engine at %s %w", c.endpoint, sentence(err))
}

// leave makes the next call open another session. Calls under way end in their
// own time, and their connections with them.
func (c *Client) leave(s *session) {
	c.mu.Lock()
	if c.current == s {
		c.current = nil
	}
	c.mu.Unlock()
	s.wire.CloseIdleConnections()
}

// Close drops all connections and ends the calls under way, with os.ErrClosed.
// What is known of the engine's containers is forgotten. The Client may be used
// again, with the engine that is there then: so it is when a VM has come back.
func (c *Client) Close() error {
	c.mu.Lock()
	s := c.current
	c.current = nil
	c.end()
	c.life, c.end = context.WithCancel(context.Background())
	c.mu.Unlock()
	c.seen.clear()
	if s != nil {
		s.wire.CloseIdleConnections()
	}
	return nil
}
