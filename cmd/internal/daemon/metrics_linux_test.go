package daemon

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// full is a config with everything in it that makes metrics.
const full = `
names: {listen: "127.0.0.1:0"}
vms:
  - name: a
    attach: memory
    docker: tcp://10.0.2.2:2375
    kubernetes: {kubeconfig: /nonexistent/k3s.yaml}
    publish: ["0:80", "0:81", "0:53/udp"]
  - name: b
    attach: qemu:unix:/nonexistent/vm.sock,dial
`

// echo sends a line through a published port and reads it back.
func echo(t *testing.T, at string) {
	t.Helper()
	c, err := net.Dial("tcp", at)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	_, err = c.Write([]byte("0123456789"))
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 10))
	require.NoError(t, err)
}

// bound returns where the row that leads to a guest port is bound.
func (b *bed) bound(t *testing.T, guest string) string {
	t.Helper()
	rows, err := b.client.Listeners(t.Context(), "")
	require.NoError(t, err)
	i := slices.IndexFunc(rows, func(r api.Listener) bool { return r.Guest == guest && r.State == "forwarded" })
	require.GreaterOrEqual(t, i, 0, "%s: %+v", guest, rows)
	return rows[i].Bound[0]
}

func TestMetrics(t *testing.T) {
	b := start(t, full)
	s := b.scrape(t)
	assert.EqualValues(t, 1, s.value(t, "build_info", "version=v1.2.3", "goversion="+runtime.Version()))
	assert.EqualValues(t, 1, s.value(t, "vm_state", "vm=a", "state=waiting"))
	assert.EqualValues(t, 0, s.value(t, "vm_state", "vm=a", "state=ready"))
	assert.EqualValues(t, 3, s.value(t, "listeners", "vm=a", "kind=config", "state=pending"))
	assert.EqualValues(t, 0, s.value(t, "flows_total", "vm=b", "protocol=udp"), "there before the first")
	assert.EqualValues(t, 0, s.value(t, "refused_total", "vm=a", "protocol=tcp", "reason=timeout"))
	s.absent(t, "vm_probe_timestamp_seconds", "vm=a")
	s.absent(t, "vm_last_frame_timestamp_seconds", "vm=a")
	s.absent(t, "link_frames_total", "vm=a")
	assert.EqualValues(t, 0, s.value(t, "engine_reachable", "vm=a"))
	s.absent(t, "engine_reachable", "vm=b")
	s.absent(t, "cluster_reachable", "vm=b")
	assert.EqualValues(t, 1, s.value(t, "cluster_wanted", "vm=a"))
	assert.EqualValues(t, 0, s.value(t, "names"))

	began := float64(time.Now().Unix())
	b.attach(t, "a")
	echo(t, b.bound(t, "10.0.2.2:80"))
	if c, err := net.Dial("tcp", b.bound(t, "10.0.2.2:81")); err == nil { // else it was reset already
		_, err = c.Read(make([]byte, 1))
		require.Error(t, err, "nobody serves there")
		c.Close()
	}
	require.Eventually(t, func() bool { // the engine and the kubeconfig are not there
		s = b.scrape(t)
		return s.value(t, "engine_failures", "vm=a") > 0 && s.value(t, "cluster_failures", "vm=a") > 0 &&
			s.value(t, "flows", "vm=a", "protocol=tcp") == 0
	}, patience, 50*time.Millisecond)
	assert.EqualValues(t, 1, s.value(t, "vm_state", "vm=a", "state=ready"))
	assert.EqualValues(t, 1, s.value(t, "vm_state", "vm=b", "state=waiting"))
	assert.EqualValues(t, 1, s.value(t, "vm_generation", "vm=a"))
	assert.EqualValues(t, 1, s.value(t, "vm_probe_ok", "vm=a"))
	assert.Greater(t, s.value(t, "vm_probe_timestamp_seconds", "vm=a"), began-1)
	assert.Greater(t, s.value(t, "vm_last_frame_timestamp_seconds", "vm=a"), began-1)
	assert.Positive(t, s.value(t, "vm_probe_rtt_seconds", "vm=a"))
	assert.EqualValues(t, 1, s.value(t, "vm_queues", "vm=a"))
	assert.EqualValues(t, 1, s.value(t, "vm_offload", "vm=a", "offload=tso4"))
	assert.EqualValues(t, 3, s.value(t, "listeners", "vm=a", "kind=config", "state=forwarded"))
	assert.EqualValues(t, 2, s.value(t, "flows_total", "vm=a", "protocol=tcp"))
	assert.EqualValues(t, 10, s.value(t, "bytes_total", "vm=a", "protocol=tcp", "direction=to_guest"))
	assert.EqualValues(t, 10, s.value(t, "bytes_total", "vm=a", "protocol=tcp", "direction=to_host"))
	assert.EqualValues(t, 1, s.value(t, "refused_total", "vm=a", "protocol=tcp", "reason=refused"))
	assert.Positive(t, s.value(t, "link_frames_total", "vm=a", "direction=to_guest"))
	assert.Positive(t, s.value(t, "link_bytes_total", "vm=a", "direction=to_host"))
	assert.Zero(t, s.value(t, "drops_total", "vm=a", "reason=bad-checksum"))
	assert.Positive(t, s.value(t, "stack_resets_received_total", "vm=a"), "the refused flow")
	assert.EqualValues(t, 1, s.value(t, "flows_ended_total", "vm=a", "protocol=tcp", "end=closed"))
	assert.EqualValues(t, 0, s.value(t, "flows_ended_total", "vm=a", "protocol=tcp", "end=guest-reset"), "it had not taken that one")
	s.absent(t, "flows_ended_total", "protocol=udp")
	toGuest := []string{"vm=a", "queue=0", "direction=to_guest"}
	for i, name := range []string{"kicks_total", "polls_total", "calls_total", "calls_suppressed_total"} {
		assert.EqualValues(t, i+1, s.value(t, "queue_"+name, toGuest...))
	}
	assert.EqualValues(t, 5, s.value(t, "queue_offload_frames_total", append(toGuest, "offload=segmentation")...))
	assert.EqualValues(t, 6, s.value(t, "queue_offload_frames_total", append(toGuest, "offload=checksum")...))
	assert.EqualValues(t, 7, s.value(t, "queue_kicks_total", "vm=a", "queue=0", "direction=to_host"))
	assert.EqualValues(t, 0, s.value(t, "cluster_reachable", "vm=a"))
	assert.EqualValues(t, 1, s.value(t, "reconcile_snapshots_total", "source=static"))
	assert.Positive(t, s.value(t, "reconcile_publishes_total"))
	assert.Positive(t, s.value(t, "reconcile_apply_duration_seconds"))
	assert.Contains(t, s, "go_goroutines")
	assert.Contains(t, s, "process_open_fds")

	require.NoError(t, b.wantKubernetes(t, "a", false))
	assert.EqualValues(t, 0, b.scrape(t).value(t, "cluster_wanted", "vm=a"))
}

func (b *bed) wantKubernetes(t *testing.T, vm string, wanted bool) error {
	_, err := b.client.WantKubernetes(t.Context(), api.KubernetesRequest{VM: vm, Wanted: wanted})
	return err
}

// TestMetricsOfTrace: who reads, and what the flight recorder keeps.
func TestMetricsOfTrace(t *testing.T) {
	b := start(t, "trace: {flightRecorder: 10}\nvms: [{name: a, attach: memory}]")
	s := b.scrape(t)
	assert.Zero(t, s.value(t, "trace_readers"))
	assert.Zero(t, s.value(t, "trace_lost_records_total"))
	b.attach(t, "a")
	assert.Positive(t, b.scrape(t).value(t, "flight_recorder_frames_total", "vm=a"))
	ctx, leave := context.WithCancel(t.Context())
	stream, err := b.client.Trace(ctx, api.TraceRequest{})
	require.NoError(t, err)
	assert.EqualValues(t, 1, b.scrape(t).value(t, "trace_readers"))
	require.NoError(t, stream.Close())
	leave()
	require.Eventually(t, func() bool { return b.scrape(t).value(t, "trace_readers") == 0 }, patience, 10*time.Millisecond)
}

// Names follow Prometheus' conventions, and what is described is what is shown.
func TestMetricsLint(t *testing.T) {
	b := start(t, full)
	b.attach(t, "a")
	problems, err := promlint.New(strings.NewReader(b.text(t))).Lint()
	require.NoError(t, err)
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "culvert_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
	for name := range b.scrape(t) {
		assert.True(t, strings.HasPrefix(name, "culvert_") || strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_"), name)
	}
	// A pedantic registry compares each metric with its description.
	d := newIdle(t)
	r := prometheus.NewPedanticRegistry()
	require.NoError(t, r.Register(&collector{d, nil}))
	_, err = r.Gather()
	require.NoError(t, err)
}

// Whatever clients and rows there are, there is no series for one of them.
func TestMetricsBoundedSeries(t *testing.T) {
	b := start(t, full)
	b.attach(t, "a")
	count := func() (n int) {
		for name, f := range b.scrape(t) {
			if strings.HasPrefix(name, "culvert_") {
				n += len(f.Metric)
			}
		}
		return n
	}
	echo(t, b.bound(t, "10.0.2.2:80"))
	_, err := b.client.Publish(t.Context(), api.PublishRequest{VM: "a", Publish: []string{"0:80"}})
	require.NoError(t, err)
	before := count()
	for i := range 40 {
		rows, err := b.client.Publish(t.Context(), api.PublishRequest{VM: "a", Publish: []string{fmt.Sprintf("0:10.0.2.%d:80", i+10), "0:80"}})
		require.NoError(t, err)
		echo(t, rows[1].Bound[0])
	}
	assert.Equal(t, before, count())
	text := b.text(t)
	assert.NotContains(t, text, "127.0.0.1")
	assert.NotContains(t, text, "10.0.2.")
}

func TestMetricsServer(t *testing.T) {
	b := start(t, "vms: [{name: a, attach: memory}]")
	for path, want := range map[string]int{"/": 404, "/metrics/": 404, "/v1/vms": 404, "/healthz": 404, "/debug/pprof/": 404, "/metrics": 200} {
		resp, err := http.Get("http://" + b.metrics + path)
		require.NoError(t, err)
		resp.Body.Close()
		assert.Equal(t, want, resp.StatusCode, path)
	}
	resp, err := http.Post("http://"+b.metrics+"/metrics", "text/plain", strings.NewReader("x"))
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode)
	req, err := http.NewRequest(http.MethodGet, "http://"+b.metrics+"/metrics", nil)
	require.NoError(t, err)
	req.Header.Set("X-Long", strings.Repeat("x", 64<<10))
	resp, err = http.DefaultClient.Do(req)
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, http.StatusRequestHeaderFieldsTooLarge, resp.StatusCode)
	s := b.scrape(t)
	s.absent(t, "names")
	s.absent(t, "dns_queries_total")
}

// TestFB172MetricsPort: the metrics' port is none that a publish gets.
func TestFB172MetricsPort(t *testing.T) {
	b := start(t, "vms: [{name: a, attach: memory}]")
	b.attach(t, "a")
	port := netip.MustParseAddrPort(b.metrics).Port()
	for _, publish := range []string{fmt.Sprintf("%d:80", port), fmt.Sprintf("127.0.0.1:%d:80", port), fmt.Sprintf("0.0.0.0:%d:80", port)} {
		rows, err := b.client.Publish(t.Context(), api.PublishRequest{Publish: []string{publish}})
		require.NoError(t, err)
		assert.Equal(t, "failed", rows[0].State, publish)
		assert.Contains(t, rows[0].Detail, "reserved by culvert's metrics", publish)
	}
	b.scrape(t)
}

// A reload does not move the port, and says so.
func TestMetricsReload(t *testing.T) {
	b := start(t, "vms: [{name: a, attach: memory}]")
	config := "metrics: ''\nvms: [{name: a, attach: memory, publish: ['0:80']}]"
	b.next.Store(&config)
	b.hangup <- os.Interrupt
	require.Eventually(t, func() bool { return strings.Contains(b.log.String(), "config reloaded") }, patience, 10*time.Millisecond)
	assert.Contains(t, b.log.String(), `msg="config key needs a restart to change; the running value stays" key=metrics`)
	assert.EqualValues(t, 1, b.scrape(t).value(t, "listeners", "vm=a", "state=pending"), "the rest was applied")
}

func TestMetricsPortTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	noLeaks(t)
	socket := filepath.Join(t.TempDir(), "api.sock")
	c, err := ParseConfig("c.yaml", []byte(fmt.Sprintf("metrics: %s\nnames: {listen: '127.0.0.1:0'}\nvms: [{attach: memory}]", l.Addr())), Overrides{APISocket: socket})
	require.NoError(t, err)
	err = Run(t.Context(), c, Options{Log: slog.New(slog.DiscardHandler)})
	require.ErrorContains(t, err, fmt.Sprintf("metrics: host port %s/tcp is in use by ", l.Addr()))
	assert.ErrorContains(t, err, fmt.Sprintf("(pid %d)", os.Getpid()))
	assert.NotContains(t, err.Error(), "\n")
	assert.NoFileExists(t, socket)
}

func TestMetricsConfig(t *testing.T) {
	for text, want := range map[string]string{
		`metrics: ""`:             "invalid AddrPort",
		"metrics: 127.0.0.1:9464": "127.0.0.1:9464",
		"metrics: 0.0.0.0:9464":   "0.0.0.0:9464",
		"metrics: '[::]:9464'":    "[::]:9464",
	} {
		c, err := ParseConfig("c.yaml", []byte(text), Overrides{APISocket: "/tmp/x.sock"})
		require.NoError(t, err, text)
		assert.Equal(t, want, c.Metrics.String(), text)
	}
	for _, text := range []string{"metrics: 9464", "metrics: localhost:9464", "metrics: 127.0.0.1", "metrics: 127.0.0.1:99999"} {
		_, err := ParseConfig("c.yaml", []byte(text), Overrides{APISocket: "/tmp/x.sock"})
		require.ErrorContains(t, err, "is not an IP address and port such as 127.0.0.1:9464", text)
		assert.ErrorContains(t, err, "c.yaml:1:10:", text)
	}
}

// What `vms`, wait, /healthz and the metrics say of a VM is one truth (C-25),
// also of one that stops answering while its link is up.
func TestTruthIsOne(t *testing.T) {
	b := start(t, "vms: [{name: a, attach: memory}]")
	healthz := func() string {
		resp, err := b.health.Get("http://culvert/healthz")
		require.NoError(t, err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return string(text)
	}
	agree := func(state string) (api.VM, shown) {
		vm, s := b.vm(t, "a"), b.scrape(t)
		require.Equal(t, state, vm.State)
		for _, other := range states {
			assert.Equal(t, truth(other.String() == state), s.value(t, "vm_state", "vm=a", "state="+other.String()))
		}
		assert.Equal(t, truth(vm.Probe.OK), s.value(t, "vm_probe_ok", "vm=a"))
		assert.Contains(t, healthz(), "a: "+state)
		return vm, s
	}
	agree("waiting")
	g := b.attach(t, "a")
	vm, s := agree("ready")
	assert.Equal(t, "ok\na: ready\n", healthz())
	assert.InDelta(t, float64(vm.LastFrame.UnixMilli())/1e3, s.value(t, "vm_last_frame_timestamp_seconds", "vm=a"), 5)
	assert.InDelta(t, float64(vm.Probe.At.UnixMilli())/1e3, s.value(t, "vm_probe_timestamp_seconds", "vm=a"), 5)

	g.mute.Store(true)
	began := time.Now()
	b.waitState(t, "a", "stalled")
	assert.Less(t, time.Since(began), 20*time.Second, "10 s on a quiet machine")
	vm, s = agree("stalled")
	assert.Equal(t, "the node does not answer", vm.Detail)
	assert.False(t, vm.Probe.OK)
	assert.Equal(t, "ok\na: stalled (the node does not answer)\n", healthz())
	assert.InDelta(t, float64(vm.LastFrame.UnixNano())/1e9, s.value(t, "vm_last_frame_timestamp_seconds", "vm=a"), 1e-3, "the age of the last frame grows")
	assert.Less(t, vm.LastFrame.Sub(began), time.Second)

	g.mute.Store(false)
	b.waitState(t, "a", "ready")
	agree("ready")
	g.Close()
	b.waitState(t, "a", "gone")
	vm, s = agree("gone")
	assert.False(t, vm.Probe.OK)
	s.absent(t, "vm_last_frame_timestamp_seconds", "vm=a")
}

// TestStalledLink: a guest that takes no frames is seen as such everywhere, and no
// more once it takes them.
func TestStalledLink(t *testing.T) {
	b := start(t, "vms: [{name: a, attach: memory}]")
	ours, guest := memory.Pair(memory.Options{Depth: 1})
	defer guest.Close()
	b.guests <- ours
	const detail = "the guest takes no frames"
	require.Eventually(t, func() bool { return strings.Contains(b.vm(t, "a").Detail, detail) }, patience, 50*time.Millisecond)
	assert.GreaterOrEqual(t, b.scrape(t).value(t, "vm_stalled_seconds", "vm=a"), stallShown.Seconds())
	_, broken := b.doctor(t, "a", "")
	require.Len(t, broken, 1)
	assert.Contains(t, broken[0], "link: frames wait, of which the guest has taken none for ")

	read := make(chan struct{})
	go func() {
		defer close(read)
		frames := make([]datapath.Frame, 8)
		for {
			if _, err := guest.QueuePairs()[0].ReadBatch(frames, func(n int) [][]byte { return [][]byte{make([]byte, n)} }); err != nil {
				return
			}
		}
	}()
	require.Eventually(t, func() bool { return !strings.Contains(b.vm(t, "a").Detail, detail) }, patience, 50*time.Millisecond)
	assert.Less(t, b.scrape(t).value(t, "vm_stalled_seconds", "vm=a"), stallShown.Seconds())
	require.NoError(t, guest.Close())
	<-read
}

// BenchmarkScrape is a whole scrape, as text, with 10 000 rows, and with none;
// stack's BenchmarkTotals is what flows cost.
func BenchmarkScrape(b *testing.B) {
	for _, rows := range []int{0, 10_000} {
		b.Run(fmt.Sprintf("rows=%d", rows), func(b *testing.B) {
			d := newIdle(b)
			specs := make([]listener.Spec, rows)
			for i := range specs {
				var err error
				specs[i], err = parsePublish(fmt.Sprintf("%d:80", i+10_000), "a")
				require.NoError(b, err)
			}
			d.forwarder.Publish(context.Background(), listener.Owner{Kind: listener.KindCLI, ID: "all"}, specs)
			scrape := promhttp.HandlerFor(d.registry(nil), promhttp.HandlerOpts{})
			req := httptest.NewRequest(http.MethodGet, "/metrics", nil)
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				scrape.ServeHTTP(w, req)
				b.ReportMetric(float64(w.Body.Len()), "bytes")
			}
		})
	}
}
