package vhostuser

import (
	"bytes"
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

func mustListen(t *testing.T, o Options) *Listener {
	t.Helper()
	l, err := Listen(filepath.Join(t.TempDir(), "s"), o)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	return l
}

func mustAccept(t *testing.T, l *Listener) datapath.Attachment {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a, err := l.Accept(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, a.Close()) })
	return a
}

// TestConformance runs the suite under each combination of what changes the way
// of a frame.
func TestConformance(t *testing.T) {
	for name, change := range map[string]func(*config){
		"everything":   func(*config) {},
		"no EVENT_IDX": func(c *config) { c.features &^= featureEventIdx },
		"no MRG_RXBUF": func(c *config) { c.features &^= featureMrgRxBuf; c.rxSize = 12 + datapath.MaxFrame },
		"legacy":       func(c *config) { c.features = 0; c.rxSize = 10 + datapath.MaxFrame },
		"no indirect":  func(c *config) { c.features &^= featureIndirectDesc },
		"two pairs":    func(c *config) { c.features |= featureMQ; c.pairs = 2 },
		"memory slots": func(c *config) { c.slots = true },
		"small ring":   func(c *config) { c.num = 64 },
		"big buffers":  func(c *config) { c.rxSize = 4096; c.num = 1024 },
		"no kicks":     func(c *config) { c.noKick = true },
		"no reply-ack": func(c *config) { c.protocol &^= protocolReplyAck },
		"no protocol":  func(c *config) { c.noProtocol = true },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := plain()
			change(&cfg)
			datapathtest.Conformance(t, func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
				l := mustListen(t, Options{Queues: 2})
				v := mustConnect(t, l.path, cfg)
				return mustAccept(t, l), &peer{v}
			})
		})
	}
}

// A logBuffer is where a test's log goes.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) lines() int { return strings.Count(l.String(), "\n") }

func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }
