package bench

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/kube"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/require"
)

// A closedGuest is a VM in which nobody listens.
type closedGuest struct{}

func (closedGuest) StartTCP(_ netip.AddrPort, done func(relay.GuestConn, error)) func() {
	done(nil, syscall.ECONNREFUSED)
	return func() {}
}

func (closedGuest) DialUDP(netip.AddrPort) (relay.GuestPacketConn, error) {
	return nil, syscall.ECONNREFUSED
}

// A sayingCluster is a cluster of which is said what comes.
type sayingCluster chan []kube.Service

func (c sayingCluster) Endpoint() string { return "" }

func (c sayingCluster) Follow(ctx context.Context, told func(kube.Update)) error {
	for {
		select {
		case services := <-c:
			told(kube.Update{Services: services})
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A watchedForwarder is a Forwarder that says which owner has been published.
type watchedForwarder struct {
	*stack.Forwarder
	published chan listener.Outcome // of await alone
	await     string                // an owner's ID
}

func (f *watchedForwarder) Publish(ctx context.Context, o listener.Owner, specs []listener.Spec) []listener.Outcome {
	outs := f.Forwarder.Publish(ctx, o, specs)
	if o.ID == f.await {
		f.published <- outs[0]
	}
	return outs
}

// BenchmarkServices has a cluster of 2 000 Services: from their first listing to
// the last open port, from the listing after an edit to the edited port, each
// port on both loopback addresses, and what they cost in memory.
func BenchmarkServices(b *testing.B) {
	const services, edits = 2000, 50
	b.Run(fmt.Sprintf("path=culvert/services=%d", services), func(b *testing.B) {
		var first, edit, memory float64
		for b.Loop() {
			f, e, m := applyServices(b, services, edits)
			first += f
			edit += e
			memory += m
		}
		b.ReportMetric(first/float64(b.N), "first-ms")
		b.ReportMetric(edit/float64(b.N), "edit-ms")
		b.ReportMetric(memory/float64(b.N), "MB")
		b.ReportMetric(0, "ns/op")
	})
}

// applyServices returns the time of the first apply, the median of edits, and
// the growth of resident memory.
func applyServices(b *testing.B, services, edits int) (firstMS, editMS, megabytes float64) {
	forwarder, err := stack.New(stack.Options{})
	require.NoError(b, err)
	defer forwarder.Shutdown(context.Background())
	forwarder.AttachVM("vm", stack.VM{Guest: closedGuest{}, Node: netip.MustParseAddr(node)})
	log := slog.New(slog.DiscardHandler)
	published := &watchedForwarder{Forwarder: forwarder, published: make(chan listener.Outcome, 1)}
	loop := reconcile.NewLoop(published, log)
	cluster := make(sayingCluster)
	loop.AddSource("vm", 1, reconcile.NewServices(reconcile.ServicesOptions{
		VM: "vm", Generation: 1, Cluster: cluster, Node: netip.MustParseAddr(node), Log: log,
	}))

	list := make([]kube.Service, services)
	for i := range list {
		list[i] = kube.Service{
			Namespace: "default", Name: fmt.Sprintf("service-%05d", i), UID: fmt.Sprint(i), LoadBalancer: true, Created: time.Unix(1700000000, 0),
			Ports: []kube.Port{{Number: uint16(10000 + i), Protocol: "TCP"}}, Ingress: []kube.Ingress{{IP: node}},
		}
	}
	// apply says list and waits until the port of its Service of that index is
	// open.
	apply := func(i int) time.Duration {
		published.await = fmt.Sprintf("default/%s:%d/TCP", list[i].Name, list[i].Ports[0].Number)
		start := time.Now()
		cluster <- slices.Clone(list)
		o := <-published.published
		took := time.Since(start)
		require.Equal(b, listener.Forwarded, o.State, o.Detail)
		return took
	}

	before := self.resident(b)
	ctx, cancel := context.WithCancel(b.Context())
	ns := datapathtest.NewNetNS(b) // where every port is free
	var running sync.WaitGroup
	running.Go(func() { _ = ns.Do(func() error { return loop.Run(ctx) }) })
	defer running.Wait()
	defer cancel()
	firstMS = ms(apply(services - 1))
	megabytes = float64(self.resident(b)-before) / 1e6
	for _, r := range forwarder.Rows() {
		require.Equal(b, listener.Forwarded, r.Outcome.State, r.Outcome.Detail)
		require.Len(b, r.Outcome.Bound, 2)
	}
	took := make([]float64, edits)
	for n := range took {
		i := (n * 37) % services
		list[i].Ports = []kube.Port{{Number: uint16(20000 + n), Protocol: "TCP"}}
		took[n] = ms(apply(i))
	}
	slices.Sort(took)
	return firstMS, took[edits/2], megabytes
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
