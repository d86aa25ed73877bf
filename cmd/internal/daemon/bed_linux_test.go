package daemon

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/netstack"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Whole daemons, with guests in memory:
//
//	http ── metrics ── Run ── memory.Pair ── a second stack with an echo server

const patience = 30 * time.Second

// A bed is a daemon that runs until the test ends.
type bed struct {
	metrics string // its address
	client  *api.Client
	health  http.Client // of the API's socket
	guests  chan datapath.Attachment
	log     logBuffer
	next    atomic.Pointer[string] // the config that a reload reads
	hangup  chan os.Signal
}

// A logBuffer keeps what is logged.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

var metricsAt = regexp.MustCompile(`msg="serving metrics" listen=(\S+)`)

// start runs a daemon with a config to which the API's socket and the metrics are
// added, and returns when it serves.
func start(t testing.TB, config string) *bed {
	t.Helper()
	noLeaks(t)
	socket := filepath.Join(t.TempDir(), "api.sock")
	parse := func(config string) (*Config, error) {
		return ParseConfig("c.yaml", []byte(config), Overrides{APISocket: socket})
	}
	c, err := parse("metrics: 127.0.0.1:0\n" + config)
	require.NoError(t, err)
	b := &bed{client: api.NewClient(socket), guests: make(chan datapath.Attachment, 4), hangup: make(chan os.Signal, 1)}
	b.health.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	ctx, end := context.WithCancel(context.Background())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- Run(ctx, c, Options{
			Log:     slog.New(slog.NewTextHandler(&b.log, nil)),
			Version: "v1.2.3", Memory: func(ctx context.Context) (datapath.Attachment, error) {
				select {
				case att := <-b.guests:
					return att, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			},
			Started: func() { close(started) }, Hangup: b.hangup, Reload: func() (*Config, error) { return parse(*b.next.Load()) },
		})
	}()
	t.Cleanup(func() {
		b.client.Close()
		b.health.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
		end()
		assert.NoError(t, <-ended)
	})
	select {
	case <-started:
	case err := <-ended:
		ended <- nil
		require.FailNow(t, "the daemon does not start", "%v", err)
	}
	m := metricsAt.FindStringSubmatch(b.log.String())
	require.NotNil(t, m, "%s", b.log.String())
	b.metrics = m[1]
	return b
}

// noLeaks fails the test when its end leaves a goroutine.
func noLeaks(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for wait := 0; runtime.NumGoroutine() > before; wait++ {
			if wait == 300 {
				buf := make([]byte, 1<<18)
				t.Errorf("goroutines are left:\n%s", buf[:runtime.Stack(buf, true)])
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
}

// A guestEnd is the guest's end of a link. A mute one loses what the guest sends.
type guestEnd struct {
	datapath.Attachment
	pairs []datapath.QueuePair
	mute  atomic.Bool
}

func (g *guestEnd) QueuePairs() []datapath.QueuePair { return g.pairs }

type mutablePair struct {
	datapath.QueuePair
	end *guestEnd
}

func (p mutablePair) WriteBatch(frames []datapath.Frame) (int, error) {
	if p.end.mute.Load() {
		return len(frames), nil
	}
	return p.QueuePair.WriteBatch(frames)
}

// attach gives the daemon a guest that echoes at TCP port 80 and has no other
// port, and waits until the VM is ready.
func (b *bed) attach(t testing.TB, vm string) *guestEnd {
	t.Helper()
	offloads := virtio.OffloadCSum | virtio.OffloadTSO4
	ours, theirs := memory.Pair(memory.Options{ToGuest: offloads, FromGuest: offloads})
	ours.Stats().SetQueues(func() []datapath.Queue { // which a link in memory has none of
		return []datapath.Queue{{ToGuest: true, Kicks: 1, Polls: 2, Calls: 3, Quiet: 4, Super: 5, Partial: 6}, {Kicks: 7}}
	})
	g := &guestEnd{Attachment: theirs}
	for _, qp := range theirs.QueuePairs() {
		g.pairs = append(g.pairs, mutablePair{qp, g})
	}
	s, err := netstack.New(g, netstack.Options{
		Node: netip.MustParseAddr("10.0.2.1"), Gateway: netip.MustParsePrefix("10.0.2.2/24"), MTU: 1500, Seed: "guest",
	})
	require.NoError(t, err)
	l, err := s.ListenTCP(80)
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(c, c)
			c.Close()
		}
	}()
	t.Cleanup(func() {
		s.Close()
		<-ended
	})
	b.guests <- ours
	b.waitState(t, vm, "ready")
	return g
}

func (b *bed) vm(t testing.TB, name string) api.VM {
	t.Helper()
	vms, err := b.client.VMs(t.Context())
	require.NoError(t, err)
	i := slices.IndexFunc(vms, func(vm api.VM) bool { return vm.Name == name })
	require.GreaterOrEqual(t, i, 0, "no VM %s", name)
	return vms[i]
}

func (b *bed) waitState(t testing.TB, vm, state string) {
	t.Helper()
	require.Eventually(t, func() bool { return b.vm(t, vm).State == state }, patience, 20*time.Millisecond, "%s is not %s", vm, state)
}

// text scrapes.
func (b *bed) text(t *testing.T) string {
	t.Helper()
	resp, err := http.Get("http://" + b.metrics + "/metrics")
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, "%s", text)
	assert.Contains(t, resp.Header.Get("Content-Type"), "text/plain")
	return string(text)
}

// A shown is what one scrape shows, by the name of the metric.
type shown map[string]*dto.MetricFamily

func (b *bed) scrape(t *testing.T) shown {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(b.text(t)))
	require.NoError(t, err)
	return families
}

// find returns the value of the one series with the labels, given as "name=value".
func (s shown) find(name string, labels ...string) (v float64, ok bool) {
	f := s["culvert_"+name]
	if f == nil {
		return 0, false
	}
	for _, m := range f.Metric {
		left := slices.Clone(labels)
		for _, l := range m.Label {
			left = slices.DeleteFunc(left, func(want string) bool { return want == l.GetName()+"="+l.GetValue() })
		}
		if len(left) == 0 {
			return m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount()), true
		}
	}
	return 0, false
}

func (s shown) value(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	v, ok := s.find(name, labels...)
	require.True(t, ok, "no culvert_%s%v in the scrape", name, labels)
	return v
}

func (s shown) absent(t *testing.T, name string, labels ...string) {
	t.Helper()
	_, ok := s.find(name, labels...)
	assert.False(t, ok, "culvert_%s%v is in the scrape", name, labels)
}

// newIdle returns a daemon of which nothing runs.
func newIdle(tb testing.TB) *Daemon {
	tb.Helper()
	d := &Daemon{opts: Options{Version: "v1"}, attachers: make(map[string]*attacher)}
	log := slog.New(slog.DiscardHandler)
	d.loop = reconcile.NewLoop(nobody{}, log)
	d.vms = reconcile.NewVMs(d.loop, log)
	d.tracer = trace.New(trace.Options{})
	tb.Cleanup(d.vms.Close)
	var err error
	d.forwarder, err = stack.New(stack.Options{})
	require.NoError(tb, err)
	tb.Cleanup(func() { d.forwarder.Shutdown(context.Background()) })
	return d
}

// nobody is a Publisher without listeners.
type nobody struct{}

func (nobody) Publish(_ context.Context, _ listener.Owner, specs []listener.Spec) []listener.Outcome {
	return make([]listener.Outcome, len(specs))
}
func (nobody) Withdraw(context.Context, listener.Owner) {}
func (nobody) Owners() []listener.Owner                 { return nil }
