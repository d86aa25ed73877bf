package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/cmd/internal/names"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/socketfile"
	"github.com/culvertnet/culvert/datapath/trace"
	vmm "github.com/culvertnet/culvert/guest/vm"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/netstack"
)

// apiGrace is how long requests of the API that are under way at the end may
// take; streams are cut off then.
const apiGrace = 200 * time.Millisecond

// Options is what a Daemon needs beside its config.
type Options struct {
	Log     *slog.Logger
	Version string // the binary's, as the metrics show it
	// Reload reads the config anew; it is called for every value of Hangup. Nil
	// where there is none.
	Reload func() (*Config, error)
	Hangup <-chan os.Signal
	// Hurry, once closed, ends the drain of a daemon that is ending. Nil where
	// nobody hurries it.
	Hurry <-chan struct{}
	// Memory gives the attachments of VMs with a memory spec; nil without.
	Memory func(context.Context) (datapath.Attachment, error)
	// Started is called when the daemon serves, if not nil.
	Started func()
}

// A Daemon is a running culvert.
type Daemon struct {
	opts      Options
	log       *slog.Logger
	policy    listener.Policy
	forwarder *stack.Forwarder
	budget    *netstack.Budget
	addresses *reconcile.Addresses // nil unless names.address is loopback
	loop      *reconcile.Loop
	static    *reconcile.Static
	vms       *reconcile.VMs
	server    *api.Server
	tracer    *trace.Tracer
	departed  departures
	ending    context.Context // done when the daemon ends

	mu        sync.Mutex
	config    *Config
	attachers map[string]*attacher // by VM
}

// Run runs a daemon until ctx ends, and returns nil then. Any error is one of
// the start, or of what could not be removed at the end; nothing else is left.
func Run(ctx context.Context, c *Config, o Options) (err error) {
	socket, claim, err := claimSocket(c.API)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, claim.Release()) }()

	d := &Daemon{
		opts: o, log: o.Log, config: c, attachers: make(map[string]*attacher), policy: listener.Policy{ExposeToLAN: c.ExposeToLAN},
	}
	ending, end := context.WithCancel(context.Background())
	defer end()
	d.ending = ending
	d.forwarder, err = stack.New(stack.Options{
		Policy: d.policy,
		Timeouts: stack.Timeouts{
			Connect: c.Timeouts.Connect, HalfClose: c.Timeouts.HalfClose, UDPIdle: c.Timeouts.UDPIdle,
			Drain: c.Timeouts.Drain, BindRetry: c.Timeouts.BindRetry,
		},
		Limits: stack.Limits{Flows: c.Limits.Flows, UDPFlows: c.Limits.UDPFlows, Descriptors: flowDescriptors()},
		Log:    o.Log,
	})
	if err != nil {
		_ = socket.Close()
		return err
	}
	if c.Names.Address == "loopback" {
		d.addresses = reconcile.NewAddresses()
	}
	d.budget = netstack.NewBudget(c.Limits.FlowBuffer, c.Limits.TotalBuffers)
	d.loop = reconcile.NewLoop(d.forwarder, o.Log)
	d.static = reconcile.NewStatic(d.loop)
	d.vms = reconcile.NewVMs(d.loop, o.Log)
	d.server = api.NewServer(d, o.Log)
	d.tracer = d.newTracer(c)
	dns, err := d.listenNames(c.Names)
	var metrics *metricsServer
	if err == nil {
		if metrics, err = d.listenMetrics(c.Metrics, dns); err != nil && dns != nil {
			_ = dns.Close()
		}
	}
	if err != nil {
		d.forwarder.Shutdown(context.Background())
		_ = socket.Close()
		return err
	}

	loopCtx, stopLoop := context.WithCancel(context.Background())
	defer stopLoop()
	var running sync.WaitGroup
	running.Go(func() {
		if err := d.loop.Run(loopCtx); err != nil {
			d.log.Error("reconcile loop ended", "err", err)
		}
	})
	if dns != nil {
		running.Go(func() {
			if err := dns.Serve(); err != nil {
				d.log.Error("DNS server ended", "err", err)
			}
		})
	}
	stop := func() {
		d.log.Info("stopping")
		end()
		if dns != nil {
			_ = dns.Close()
		}
		stopLoop()
		running.Wait()
		d.drain(o.Hurry)
		d.vms.Close()
		if err := d.tracer.Close(); err != nil {
			d.log.Warn("flight recorder not closed", "err", err)
		}
		grace, cancel := context.WithTimeout(context.Background(), apiGrace)
		defer cancel()
		metrics.shutdown(grace)
		d.server.Shutdown(grace)
	}

	if err := d.start(ctx, c); err != nil {
		stop()
		_ = socket.Close()
		if ctx.Err() != nil {
			return nil // it was told to end before it had begun
		}
		return err
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := d.server.Serve(socket); err != nil {
			d.log.Error("API ended", "err", err)
		}
	})
	metrics.serve()
	d.log.Info("ready", "api", c.API, "vms", len(c.VMs), "publishes", len(c.specs()))
	notify(d.log, daemon.SdNotifyReady)
	if o.Started != nil {
		o.Started()
	}
	d.serve(ctx)
	notify(d.log, daemon.SdNotifyStopping)
	stop()
	serving.Wait()
	return nil
}

// listenNames opens the DNS server, if there is one, and keeps its port from
// publishes.
func (d *Daemon) listenNames(c NamesConfig) (*names.Server, error) {
	if c == (NamesConfig{}) {
		return nil, nil
	}
	s, err := names.New(names.Options{
		Listen: c.Listen, Zone: c.Zone, NoData: c.Unknown == "nodata", Upstreams: c.upstreams(), Table: d.loop.Names(), Log: d.log,
	})
	if err != nil {
		return nil, fmt.Errorf("%w; names.listen in the config says where names are served, and \"\" nowhere", err)
	}
	for _, proto := range []listener.Proto{listener.TCP, listener.UDP} {
		if err := d.forwarder.Reserve(proto, s.Addr(), "DNS server"); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	d.log.Info("serving names", "listen", s.Addr(), "zone", c.Zone)
	return s, nil
}

// drain stops accepting and lets flows end by themselves, for timeouts.drain or
// until hurry is closed.
func (d *Daemon) drain(hurry <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		d.forwarder.Shutdown(ctx)
	}()
	select {
	case <-drained:
	case <-hurry:
		d.log.Info("hurrying")
		cancel()
		<-drained
	}
}

// claimSocket opens the API's socket, for this process alone.
func claimSocket(path string) (net.Listener, *socketfile.Claim, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, nil, fmt.Errorf("open API socket %s: %w", path, err)
	}
	// The usual place is ours to make; any other is its owner's.
	if err := os.MkdirAll(filepath.Dir(abs), 0o755); err != nil {
		return nil, nil, fmt.Errorf("open API socket: %w", err)
	}
	claim, err := socketfile.New(abs)
	if err != nil {
		info, statErr := os.Lstat(abs)
		if errors.Is(err, socketfile.ErrInUse) && (statErr != nil || info.Mode().Type() == os.ModeSocket) {
			return nil, nil, fmt.Errorf("another daemon owns %s; stop it, or use --api for a socket of this one's own", abs)
		}
		return nil, nil, fmt.Errorf("open API socket: %w", err)
	}
	l, err := listenPrivate(abs)
	if err == nil {
		if err = claim.Bound(); err != nil {
			_ = l.Close()
		}
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open API socket %s: %w", abs, err), claim.Release())
	}
	return l, claim, nil
}

// start opens what the config names.
func (d *Daemon) start(ctx context.Context, c *Config) error {
	// Transports first, as far as they can be without their VMs: what is wrong
	// with one ends the start before any row is there.
	var made []*attacher
	for _, vm := range c.VMs {
		a, err := d.newAttacher(vm)
		if err != nil {
			for _, a := range made {
				_ = a.Close()
			}
			return err
		}
		made = append(made, a)
	}
	d.setGateways(c)
	if _, err := d.static.SetConfig(ctx, c.specs()...); err != nil {
		for _, a := range made {
			_ = a.Close()
		}
		return fmt.Errorf("publish what the config names: %w", err)
	}
	for _, a := range made {
		if err := d.addVM(a); err != nil {
			return err
		}
	}
	return nil
}

// setGateways tells what no publish may lead to.
func (d *Daemon) setGateways(c *Config) {
	for _, vm := range c.VMs {
		d.forwarder.SetGateway(vm.Name, vm.Gateway.Addr())
	}
}

func (d *Daemon) addVM(a *attacher) error {
	d.mu.Lock()
	d.attachers[a.vm.Name] = a
	d.mu.Unlock()
	vm := reconcile.VM{Name: a.vm.Name, Attacher: a, Sources: a.guest.sources}
	if a.vm.QMP != "" {
		vm.VMM = vmm.NewQMP(a.vm.QMP)
	}
	return d.vms.Add(vm)
}

// vm returns the attacher of a VM, nil if there is none.
func (d *Daemon) vm(name string) *attacher {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.attachers[name]
}

// serve applies reloads until ctx ends.
func (d *Daemon) serve(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.opts.Hangup:
			if d.opts.Reload == nil {
				d.log.Info("no config file to read again")
				continue
			}
			notify(d.log, daemon.SdNotifyReloading)
			d.reload(ctx)
			notify(d.log, daemon.SdNotifyReady)
		}
	}
}

// reload reads the config again and applies the difference. A config with an
// error changes nothing.
func (d *Daemon) reload(ctx context.Context) {
	c, err := d.opts.Reload()
	if err != nil {
		d.log.Error("config not reloaded, nothing was changed", "err", err)
		return
	}
	if c.blank && len(d.config.VMs) > 0 {
		// As an editor leaves it between truncating and writing.
		d.log.Error("config not reloaded, nothing was changed", "err", "the file is empty; one that asks for nothing says so with `vms: []`")
		return
	}
	for key, same := range map[string]bool{
		"api": c.API == d.config.API, "exposeToLAN": c.ExposeToLAN == d.config.ExposeToLAN,
		"timeouts": c.Timeouts == d.config.Timeouts, "limits": c.Limits == d.config.Limits, "log": c.Log == d.config.Log,
		"names": c.Names == d.config.Names, "trace": c.Trace == d.config.Trace, "metrics": c.Metrics == d.config.Metrics,
	} {
		if !same {
			d.log.Warn("config key needs a restart to change; the running value stays", "key", key)
		}
	}
	old := make(map[string]VMConfig)
	for _, vm := range d.config.VMs {
		old[vm.Name] = vm
	}
	now := make(map[string]VMConfig)
	for _, vm := range c.VMs {
		now[vm.Name] = vm
	}
	for name, vm := range old {
		if now[name].VMLink != vm.VMLink {
			d.removeVM(name)
		}
	}
	d.setGateways(c)
	if _, err := d.static.SetConfig(ctx, c.specs()...); err != nil {
		d.log.Error("publishes not reloaded", "err", err)
	}
	for _, vm := range c.VMs {
		if was := old[vm.Name]; was.VMLink == vm.VMLink {
			if was.VMGuest != vm.VMGuest {
				d.vm(vm.Name).guest.config.Store(&vm.VMGuest)
				d.vms.Refollow(vm.Name)
			}
			continue
		}
		a, err := d.newAttacher(vm)
		if err == nil {
			err = d.addVM(a)
		}
		if err != nil {
			d.log.Error("VM not added", "vm", vm.Name, "err", err)
			delete(now, vm.Name) // tried again by the next reload
		}
	}
	applied := *c
	applied.API, applied.ExposeToLAN, applied.Timeouts, applied.Limits, applied.Log, applied.Names, applied.Trace, applied.Metrics =
		d.config.API, d.config.ExposeToLAN, d.config.Timeouts, d.config.Limits, d.config.Log, d.config.Names, d.config.Trace, d.config.Metrics
	applied.VMs = nil
	for _, vm := range c.VMs {
		if _, ok := now[vm.Name]; ok {
			applied.VMs = append(applied.VMs, vm)
		}
	}
	d.mu.Lock()
	d.config = &applied
	d.mu.Unlock()
	d.log.Info("config reloaded", "vms", len(applied.VMs), "publishes", len(c.specs()))
}

func (d *Daemon) removeVM(name string) {
	d.vms.Remove(name)
	d.mu.Lock()
	delete(d.attachers, name)
	d.mu.Unlock()
}

// notify tells systemd, if it asked to be told (sd_notify(3)).
func notify(log *slog.Logger, state string) {
	if state == daemon.SdNotifyReloading {
		state += fmt.Sprintf("\nMONOTONIC_USEC=%d", monotonicMicroseconds())
	}
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("systemd not notified", "err", err)
	}
}
