package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/guest/kube"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

// A guest is what runs in one VM as far as it is followed: the sources of its
// engine and its cluster, anew in each life.
type guest struct {
	vm        VMLink
	policy    listener.Policy
	addresses *reconcile.Addresses // nil unless names.address is loopback
	departed  *departures
	log       *slog.Logger

	config     atomic.Pointer[VMGuest]
	containers atomic.Pointer[reconcile.Containers] // of this life, or the last
	services   atomic.Pointer[reconcile.Services]
}

// sources makes the sources of one life of the VM. It is VM.Sources of reconcile.
func (g *guest) sources(generation uint64, l reconcile.Link) []reconcile.Source {
	stack := l.(*link).Stack
	config := g.config.Load()
	var sources []reconcile.Source
	g.containers.Store(nil)
	g.services.Store(nil)
	if c := config.Docker; c != (DockerConfig{}) {
		e := &engine{options: docker.Options{
			Endpoint: c.Endpoint, TLS: docker.TLSFiles{CA: c.CA, Cert: c.Cert, Key: c.Key}, Dial: stack.DialContext,
		}}
		s := reconcile.NewContainers(reconcile.ContainersOptions{
			VM: g.vm.Name, Generation: generation, Engine: e, Policy: g.policy, Node: g.vm.Node, HostAddr: hostHas,
			Addresses: g.addresses, Log: g.log,
			Reach: func(ctx context.Context, to netip.AddrPort) error {
				conn, err := stack.DialContext(ctx, "tcp", to.String())
				if err == nil {
					err = conn.Close()
				}
				return err
			},
		})
		g.containers.Store(s)
		sources = append(sources, &watchedSource{Source: closingSource{s, e.close}, departed: g.departed})
	}
	if c := config.Kubernetes; c != (KubernetesConfig{}) {
		k := &cluster{options: kube.Options{Kubeconfig: c.Kubeconfig, Log: g.log.With("vm", g.vm.Name)}}
		if c.Via == "stack" {
			k.options.Dial = g.dialNode(stack.DialContext)
		}
		s := reconcile.NewServices(reconcile.ServicesOptions{
			VM: g.vm.Name, Generation: generation, Cluster: k, Node: g.vm.Node,
			Gateway: g.vm.Gateway.Addr(), Reach: c.Reach, Policy: g.policy, Log: g.log,
		})
		g.services.Store(s)
		sources = append(sources, &watchedSource{Source: s, departed: g.departed})
	}
	return sources
}

type dialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// dialNode dials the node where a kubeconfig of the guest's says its own
// loopback, as that of k3s does. The guest's names are not ours to resolve.
func (g *guest) dialNode(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		a, err := netip.ParseAddr(host)
		switch {
		case host == "localhost" || err == nil && a.IsLoopback():
			host = g.vm.Node.String()
		case err != nil:
			return nil, fmt.Errorf("%s is a name, and the way through the VM's link takes an address; put the node's, %s, into the kubeconfig, with tls-server-name beside it", host, g.vm.Node)
		}
		return dial(ctx, network, net.JoinHostPort(host, port))
	}
}

// hostHas says whether the host has an address, now.
func hostHas(a netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, had := range addrs {
		if p, err := netip.ParsePrefix(had.String()); err == nil && p.Addr().Unmap() == a {
			return true
		}
	}
	return false
}

// A closingSource drops its client's connections when it ends.
type closingSource struct {
	reconcile.Source
	close func()
}

// Run implements reconcile.Source.
func (s closingSource) Run(ctx context.Context, out chan<- reconcile.Snapshot) error {
	defer s.close()
	return s.Source.Run(ctx, out)
}

// An engine is a client that is made when it is first asked something: files that
// cannot be read are an answer that failed, as others are, and tried again.
type engine struct {
	options docker.Options

	mu     sync.Mutex
	client *docker.Client
}

func (e *engine) get() (*docker.Client, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.client == nil {
		c, err := docker.New(e.options)
		if err != nil {
			return nil, err
		}
		e.client = c
	}
	return e.client, nil
}

func (e *engine) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.client != nil {
		_ = e.client.Close()
	}
}

// Containers asks the engine.
func (e *engine) Containers(ctx context.Context) ([]docker.Container, error) {
	c, err := e.get()
	if err != nil {
		return nil, err
	}
	return c.Containers(ctx)
}

// Watch follows the engine's events.
func (e *engine) Watch(ctx context.Context, subscribed func(), changed func(docker.Event)) error {
	c, err := e.get()
	if err != nil {
		return err
	}
	return c.Watch(ctx, subscribed, changed)
}

// kubeconfigRetry is how often a kubeconfig that cannot be used is read again: a
// cluster that starts writes it when it is ready.
const kubeconfigRetry = 2 * time.Second

// A cluster is a client that is made once its kubeconfig can be used.
type cluster struct {
	options kube.Options
	client  atomic.Pointer[kube.Client]
}

// Endpoint is the API server's URL, or the kubeconfig that does not tell yet.
func (k *cluster) Endpoint() string {
	if c := k.client.Load(); c != nil {
		return c.Endpoint()
	}
	return k.options.Kubeconfig
}

// Follow implements what reconcile.Services asks.
func (k *cluster) Follow(ctx context.Context, told func(kube.Update)) error {
	for failures := 1; ; failures++ {
		c, err := kube.New(k.options)
		if err == nil {
			k.client.Store(c)
			defer func() { _ = c.Close() }()
			return c.Follow(ctx, told)
		}
		told(kube.Update{Err: err, Failures: failures})
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(kubeconfigRetry):
		}
	}
}
