package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// A TraceRequest says what of the frames that pass a trace is to show. In the
// query of GET /v1/trace its fields are vm, filter, snaplen and drops.
type TraceRequest struct {
	VM     string // of this VM alone; empty for all
	Filter string // in the language of pcap-filter(7); empty for everything
	Snap   int    // bytes of a frame at most; 0 for all
	Drops  bool   // dropped frames alone
}

// A Trace is one reader's view of the frames that pass.
type Trace interface {
	// Stream writes pcapng to w until ctx or the daemon ends, or w fails (its
	// error). It calls flush when there is nothing more to write for now.
	Stream(ctx context.Context, w io.Writer, flush func() error) error
	Close()
}

func (s *Server) trace(w http.ResponseWriter, r *http.Request) {
	req, err := readTrace(r.URL.Query())
	if err != nil {
		problem(w, err)
		return
	}
	t, err := s.backend.Trace(req)
	if err != nil {
		problem(w, err)
		return
	}
	defer t.Close()
	w.Header().Set("Content-Type", "application/x-pcapng")
	_ = t.Stream(r.Context(), w, http.NewResponseController(w).Flush) // a client that left is no error of ours
}

// readTrace reads a request and refuses what it does not know; the error is a
// *Problem.
func readTrace(q url.Values) (req TraceRequest, err error) {
	for key, values := range q {
		value := values[len(values)-1]
		switch key {
		case "vm":
			req.VM = value
		case "filter":
			req.Filter = value
		case "snaplen":
			if req.Snap, err = strconv.Atoi(value); err != nil || req.Snap < 0 {
				return req, &Problem{Status: http.StatusBadRequest, Detail: fmt.Sprintf("snaplen %q is no number of bytes", value)}
			}
		case "drops":
			if req.Drops, err = strconv.ParseBool(value); err != nil {
				return req, &Problem{Status: http.StatusBadRequest, Detail: fmt.Sprintf("drops %q is neither true nor false", value)}
			}
		default:
			return req, &Problem{Status: http.StatusBadRequest, Detail: fmt.Sprintf("a trace knows no %q", key)}
		}
	}
	return req, nil
}

// Trace returns a trace as a stream of pcapng, which ends when ctx or the daemon
// does. Whoever reads it closes it. What the request has wrong is a *Problem.
func (c *Client) Trace(ctx context.Context, r TraceRequest) (io.ReadCloser, error) {
	q := make(url.Values)
	for key, value := range map[string]string{"vm": r.VM, "filter": r.Filter} {
		if value != "" {
			q.Set(key, value)
		}
	}
	if r.Snap > 0 {
		q.Set("snaplen", strconv.Itoa(r.Snap))
	}
	if r.Drops {
		q.Set("drops", "true")
	}
	resp, err := c.do(ctx, http.MethodGet, "/v1/trace?"+q.Encode(), nil)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
