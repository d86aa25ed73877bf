package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

// Options are what New needs.
type Options struct {
	// Kubeconfig is the path of a kubeconfig file. Its current context is used. It
	// is read again when it changes and after each failure, because clusters
	// renew their certificates.
	Kubeconfig string
	// Dial connects to the API server: addr is the host and port of the
	// kubeconfig's server, not resolved. Whatever it connects to, the certificate
	// is checked against the kubeconfig's name. Nil dials from the host.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Log is told at debug level what is left out of what the cluster says. Nil
	// says it to nobody.
	Log *slog.Logger
}

// A Client follows the Services of one cluster. Follow is for one goroutine; the
// other methods may be called by any.
type Client struct {
	path string
	dial func(ctx context.Context, network, addr string) (net.Conn, error)
	log  *slog.Logger

	mu    sync.Mutex
	conf  *kubeconfig // the last that could be read
	conns *conns      // those made with conf
	http  *http.Client
}

// New reads the kubeconfig and dials nothing. Its error is a sentence for
// people: it names the file, and says what about it cannot be used. Files that
// change may be better later.
func New(opts Options) (*Client, error) {
	c := &Client{path: opts.Kubeconfig, dial: opts.Dial, log: opts.Log}
	if c.dial == nil {
		c.dial = new(net.Dialer).DialContext
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if err := c.load(); err != nil {
		return nil, err
	}
	return c, nil
}

// Endpoint is the URL of the API server, "https://127.0.0.1:6443".
func (c *Client) Endpoint() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conf.server.String()
}

// Close drops all connections. A Client that is used again makes new ones. It
// returns no error.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns.close()
	return nil
}

// load reads the kubeconfig, and drops connections made with an earlier one.
func (c *Client) load() error {
	conf, err := readKubeconfig(c.path)
	if err != nil {
		return err
	}
	conns := newConns(c.dial)
	transport := &http.Transport{
		DialContext:     conns.Dial,
		TLSClientConfig: conf.tls,
		Proxy:           conf.rest.Proxy, // the kubeconfig's; the environment's is not asked
		// The server is as near as the VM: bytes cost less than packing them.
		DisableCompression:     true,
		ForceAttemptHTTP2:      true,
		TLSHandshakeTimeout:    answerTimeout,
		ResponseHeaderTimeout:  answerTimeout,
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        time.Minute,
		// A watch is silent for long: this finds a peer that is gone.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 10 * time.Second},
	}
	authorized, err := rest.HTTPWrappersForConfig(conf.rest, transport)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", c.path, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conns != nil {
		c.conns.close()
	}
	c.conf, c.conns = conf, conns
	c.http = &http.Client{
		Transport: authorized,
		// An API server sends nobody elsewhere, least of all to the host's loopback.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return nil
}

// get asks for Services and returns the body of an answer that is 200. The
// answer begins within answerTimeout; ctx bounds the rest.
func (c *Client) get(ctx context.Context, query url.Values) (io.ReadCloser, error) {
	c.mu.Lock()
	conf, client := c.conf, c.http
	c.mu.Unlock()
	u := conf.server.JoinPath("api/v1/services")
	u.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		if urlErr := (*url.Error)(nil); errors.As(err, &urlErr) {
			err = urlErr.Err // what it adds is the query
		}
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, readStatus(resp)
	}
	return resp.Body, nil
}

// conns are the connections of one reading of the kubeconfig. A transport does
// not close those in use, and a VM that came back has no use for them.
type conns struct {
	dial func(ctx context.Context, network, addr string) (net.Conn, error)

	mu   sync.Mutex
	life context.Context // until the next close
	end  context.CancelFunc
	open map[net.Conn]struct{}
}

func newConns(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *conns {
	s := &conns{dial: dial, open: make(map[net.Conn]struct{})}
	s.life, s.end = context.WithCancel(context.Background())
	return s
}

// Dial is for the transport, which dials on when the request that asked has
// ended: hence the life of its own.
func (s *conns) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	s.mu.Lock()
	life := s.life
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	defer context.AfterFunc(life, cancel)()
	nc, err := s.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if life.Err() != nil {
		nc.Close()
		return nil, net.ErrClosed
	}
	c := &conn{Conn: nc, of: s}
	s.open[c] = struct{}{}
	return c, nil
}

// close ends all there are and all that are being made.
func (s *conns) close() {
	s.mu.Lock()
	s.end()
	s.life, s.end = context.WithCancel(context.Background())
	open := s.open
	s.open = make(map[net.Conn]struct{})
	s.mu.Unlock()
	for c := range open {
		c.Close()
	}
}

// A conn leaves its conns when it is closed.
type conn struct {
	net.Conn
	of *conns
}

func (c *conn) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}
