package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/names"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
)

// Whoever reaches the port may ask, so what asking costs is bounded.
const (
	// scrapesAtOnce are answered; more are told to come again (503).
	scrapesAtOnce = 3
	// scrapeLimit is how long one may take: Prometheus' own default.
	scrapeLimit = 10 * time.Second
	// maxScrapers are the connections at a time; others wait to be accepted.
	maxScrapers = 64
	// scraperIdle is longer than the usual time between two scrapes (15 s to a
	// minute), so that one connection serves them all.
	scraperIdle = 2 * time.Minute
	// maxScrapeHeader bounds a request, which is a GET without a body.
	maxScrapeHeader = 8 << 10
)

// A metricsServer serves the daemon's metrics over HTTP, in Prometheus' text
// format. Nil serves none.
type metricsServer struct {
	listener net.Listener
	http     http.Server
	log      *slog.Logger
	serving  sync.WaitGroup
}

// listenMetrics opens the metrics' port, if there is to be one, and keeps it from
// publishes. A taken port is an error that names its holder, where the kernel
// tells. dns is nil where no names are served.
func (d *Daemon) listenMetrics(ap netip.AddrPort, dns *names.Server) (*metricsServer, error) {
	if !ap.IsValid() {
		return nil, nil
	}
	network := "tcp6"
	switch {
	case ap.Addr().Is4():
		network = "tcp4"
	case ap.Addr().IsUnspecified():
		network = "tcp" // both
	}
	l, err := net.ListenTCP(network, net.TCPAddrFromAddrPort(ap))
	if err != nil {
		_, detail, _ := listener.Explain(listener.TCP, ap, err)
		return nil, fmt.Errorf("metrics: %s; metrics in the config says where they are served, and \"\" nowhere", detail)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	if err := d.forwarder.Reserve(listener.TCP, netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), "metrics"); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	d.log.Info("serving metrics", "listen", at)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(d.registry(dns), promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelWarn), ErrorHandling: promhttp.ContinueOnError,
		MaxRequestsInFlight: scrapesAtOnce, Timeout: scrapeLimit,
	}))
	return &metricsServer{
		listener: netutil.LimitListener(l, maxScrapers), log: d.log,
		http: http.Server{
			Handler: mux, ReadHeaderTimeout: headerLimit, ReadTimeout: headerLimit, WriteTimeout: scrapeLimit + headerLimit,
			IdleTimeout: scraperIdle, MaxHeaderBytes: maxScrapeHeader, ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
		},
	}, nil
}

// headerLimit is how long a client may take to say what it wants.
const headerLimit = 5 * time.Second

// registry returns all that a scrape shows: culvert's own, and what Go and the
// kernel know of the process.
func (d *Daemon) registry(dns *names.Server) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(&collector{d, dns}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// serve answers scrapes until shutdown.
func (m *metricsServer) serve() {
	if m == nil {
		return
	}
	m.serving.Go(func() {
		if err := m.http.Serve(m.listener); !errors.Is(err, http.ErrServerClosed) {
			m.log.Error("metrics ended", "err", err)
		}
	})
}

// shutdown closes the port, lets scrapes under way end until ctx does, and cuts
// off the rest.
func (m *metricsServer) shutdown(ctx context.Context) {
	if m == nil {
		return
	}
	if m.http.Shutdown(ctx) != nil {
		_ = m.http.Close()
	}
	_ = m.listener.Close() // where serve was never called
	m.serving.Wait()
}
