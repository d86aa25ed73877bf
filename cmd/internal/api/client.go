package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"syscall"
)

// A Client calls a daemon's API. It is safe for concurrent use.
type Client struct {
	socket string
	http   http.Client
}

// NewClient returns a Client of the daemon at socket; it connects when called.
func NewClient(socket string) *Client {
	c := &Client{socket: socket}
	c.http.Transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
	return c
}

// A NoDaemonError says that nobody answers at the socket.
type NoDaemonError struct {
	Socket string
	Err    error
}

func (e *NoDaemonError) Error() string {
	why := "nothing is there"
	switch {
	case errors.Is(e.Err, syscall.ECONNREFUSED):
		why = "its socket is left over from one that has ended"
	case errors.Is(e.Err, fs.ErrPermission):
		why = "permission denied: the daemon belongs to another user"
	}
	return fmt.Sprintf("no daemon at %s (%s); start one with `culvert daemon`, or name another with --api or CULVERT_API", e.Socket, why)
}

// Unwrap returns the cause.
func (e *NoDaemonError) Unwrap() error { return e.Err }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Listeners returns the ledger, or the rows of what of names: a container, a
// Service or a publish. What is unknown is a *Problem of status 404.
func (c *Client) Listeners(ctx context.Context, of string) (l []Listener, err error) {
	path := "/v1/listeners"
	if of != "" {
		path += "?of=" + url.QueryEscape(of)
	}
	return l, c.call(ctx, http.MethodGet, path, nil, &l)
}

// Names returns the names in the zone.
func (c *Client) Names(ctx context.Context) (n []Name, err error) {
	return n, c.call(ctx, http.MethodGet, "/v1/names", nil, &n)
}

// Flows returns the live flows.
func (c *Client) Flows(ctx context.Context) (f []Flow, err error) {
	return f, c.call(ctx, http.MethodGet, "/v1/flows", nil, &f)
}

// VMs returns the VMs.
func (c *Client) VMs(ctx context.Context) (v []VM, err error) {
	return v, c.call(ctx, http.MethodGet, "/v1/vms", nil, &v)
}

// Doctor has the daemon walk from the host to what of names, a host port or what
// Listeners takes, or to everything; it takes up to ten seconds.
func (c *Client) Doctor(ctx context.Context, vm, of string) (s []Step, err error) {
	return s, c.call(ctx, http.MethodGet, "/v1/doctor?"+url.Values{"vm": {vm}, "of": {of}}.Encode(), nil, &s)
}

// Publish adds publishes and returns their rows.
func (c *Client) Publish(ctx context.Context, r PublishRequest) (l []Listener, err error) {
	return l, c.call(ctx, http.MethodPut, "/v1/publishes", r, &l)
}

// Unpublish removes publishes and returns the rows as they were.
func (c *Client) Unpublish(ctx context.Context, r PublishRequest) (l []Listener, err error) {
	return l, c.call(ctx, http.MethodDelete, "/v1/publishes", r, &l)
}

// Kubernetes returns the clusters.
func (c *Client) Kubernetes(ctx context.Context) (k []Kubernetes, err error) {
	return k, c.call(ctx, http.MethodGet, "/v1/kubernetes", nil, &k)
}

// WantKubernetes says whether a cluster's ports are wanted, and returns the
// clusters as they are then: when they are not, every port is closed.
func (c *Client) WantKubernetes(ctx context.Context, r KubernetesRequest) (k []Kubernetes, err error) {
	return k, c.call(ctx, http.MethodPut, "/v1/kubernetes", r, &k)
}

// Events calls each for every change from now on, until ctx ends (its error),
// the daemon does (nil), or started or each fails (its error). started is called
// first, when no later change will be missed.
func (c *Client) Events(ctx context.Context, started func() error, each func(Event) error) error {
	resp, err := c.do(ctx, http.MethodGet, "/v1/events", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := started(); err != nil {
		return err
	}
	lines := json.NewDecoder(resp.Body)
	for {
		var e Event
		if err := lines.Decode(&e); err != nil {
			return ctx.Err() // the stream has ended
		}
		if err := each(e); err != nil {
			return err
		}
	}
}

// call makes a request and reads its answer into out.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	resp, err := c.do(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("read answer of %s: %w", path, err)
	}
	return nil
}

// do makes a request and returns the answer if it is a success.
func (c *Client) do(ctx context.Context, method, path string, in any) (*http.Response, error) {
	var body bytes.Buffer
	if in != nil {
		if err := json.NewEncoder(&body).Encode(in); err != nil {
			return nil, fmt.Errorf("write request: %w", err)
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://culvert"+path, &body)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if dial := (*net.OpError)(nil); errors.As(err, &dial) && dial.Op == "dial" {
			return nil, &NoDaemonError{Socket: c.socket, Err: dial.Err}
		}
		return nil, fmt.Errorf("call daemon at %s: %w", c.socket, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	p := &Problem{Status: resp.StatusCode}
	if err := json.NewDecoder(resp.Body).Decode(p); err != nil || p.Detail == "" {
		p.Detail = fmt.Sprintf("daemon answered %s to %s", resp.Status, path)
	}
	return nil, p
}
