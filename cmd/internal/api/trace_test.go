package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Trace implements Backend: it says back what it was asked, until its reader
// leaves.
func (f *fake) Trace(r TraceRequest) (Trace, error) {
	if f.err != nil {
		return nil, f.err
	}
	return &fakeTrace{asked: r, left: f.started}, nil
}

type fakeTrace struct {
	asked TraceRequest
	left  chan struct{} // closed by Close
}

func (t *fakeTrace) Stream(ctx context.Context, w io.Writer, flush func() error) error {
	text := t.asked.VM + " " + t.asked.Filter
	if t.asked.Snap == 96 && t.asked.Drops {
		text += " cut drops"
	}
	_, err := io.WriteString(w, text)
	if err := errors.Join(err, flush()); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (t *fakeTrace) Close() { close(t.left) }

func TestTrace(t *testing.T) {
	f := &fake{started: make(chan struct{})}
	c := serve(t, f)
	ctx, leave := context.WithCancel(t.Context())
	in, err := c.Trace(ctx, TraceRequest{VM: "vm1", Filter: "port 80 && !udp", Snap: 96, Drops: true})
	require.NoError(t, err)
	want := "vm1 port 80 && !udp cut drops"
	got := make([]byte, len(want))
	_, err = io.ReadFull(in, got)
	require.NoError(t, err, "it comes while the stream goes on")
	assert.Equal(t, want, string(got))
	leave()
	<-f.started // the reader is closed when its client has left
	_ = in.Close()

	f.err = &Problem{Status: http.StatusBadRequest, Detail: "no such filter"}
	_, err = c.Trace(t.Context(), TraceRequest{})
	assert.EqualError(t, err, "no such filter")
	for _, q := range []string{"snaplen=x", "snaplen=-1", "drops=maybe", "nonsense=1"} {
		values, err := url.ParseQuery(q)
		require.NoError(t, err)
		var p *Problem
		_, err = readTrace(values)
		require.ErrorAs(t, err, &p, q)
		assert.Equal(t, http.StatusBadRequest, p.Status)
	}
}
