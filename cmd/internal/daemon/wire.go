package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/attach"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/netstack"
)

// An attacher joins one VM's transport, stack and listeners: it is the
// reconcile.Attacher of that VM.
type attacher struct {
	vm        VMLink
	guest     *guest
	listener  attach.Listener
	forwarder *stack.Forwarder
	budget    *netstack.Budget
	tracer    *trace.Tracer
	log       *slog.Logger

	mu   sync.Mutex
	link *link // of this life, for the VM's view; nil between lives
}

func (d *Daemon) newAttacher(vm VMConfig) (*attacher, error) {
	l, err := attach.Listen(vm.Attach, attach.Options{MTU: vm.MTU, Memory: d.opts.Memory, Log: d.log.With("vm", vm.Name)})
	if err != nil {
		return nil, fmt.Errorf("VM %s: %w", vm.Name, err)
	}
	g := &guest{vm: vm.VMLink, policy: d.policy, addresses: d.addresses, departed: &d.departed, log: d.log}
	g.config.Store(&vm.VMGuest)
	return &attacher{
		vm: vm.VMLink, guest: g, listener: l, forwarder: d.forwarder, budget: d.budget, tracer: d.tracer, log: d.log.With("vm", vm.Name),
	}, nil
}

// Accept implements reconcile.Attacher.
func (a *attacher) Accept(ctx context.Context) (reconcile.Link, error) {
	att, err := a.listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	traced, err := a.tracer.Wrap(a.vm.Name, att)
	if err != nil {
		a.log.Warn("no flight recorder", "err", err)
	}
	s, err := netstack.New(traced, netstack.Options{
		Node: a.vm.Node, Gateway: a.vm.Gateway, MTU: a.vm.MTU, Seed: a.vm.Name, Budget: a.budget,
		Promoted: a.vm.TCP == tcpPromoted,
	})
	if err != nil {
		return nil, err
	}
	if a.vm.TCP == tcpPromoted && !s.Promoted() {
		a.log.Debug("flows are gVisor's: promoted ones take a link with checksum and segmentation offloads, and Linux 6.9", "offloads", s.Info().ToGuest.Names())
	}
	l := &link{Stack: s, vm: a.vm}
	a.mu.Lock()
	a.link = l
	a.mu.Unlock()
	return l, nil
}

// AttachVM implements reconcile.Attacher.
func (a *attacher) AttachVM(l reconcile.Link) {
	a.mu.Lock()
	a.link = l.(*link) // again, where a guest was reset: the life is another, the link is not
	a.mu.Unlock()
	a.forwarder.AttachVM(a.vm.Name, stack.VM{Guest: l.(*link).Stack, Node: a.vm.Node})
}

// DetachVM implements reconcile.Attacher.
func (a *attacher) DetachVM() {
	a.mu.Lock()
	a.link = nil
	a.mu.Unlock()
	a.guest.services.Store(nil) // a cluster that nobody reaches now; the next life has its own
	a.forwarder.DetachVM(a.vm.Name)
}

// Close implements reconcile.Attacher.
func (a *attacher) Close() error { return a.listener.Close() }

// current returns the link of the VM's present life, nil between lives.
func (a *attacher) current() *link {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.link
}

// A link is a VM's stack as reconcile sees it.
type link struct {
	*netstack.Stack
	vm VMLink
}

// Err implements reconcile.Link, in words for people.
func (l *link) Err() error {
	err := l.Stack.Err()
	if !errors.Is(err, datapath.ErrPeerGone) {
		return err
	}
	switch l.vm.Attach.Transport {
	case attach.Tap:
		return fmt.Errorf("interface %s was deleted", l.vm.Attach.Address)
	case attach.QEMU:
		return errors.New("QEMU closed the connection")
	case attach.Unixgram:
		return errors.New("the VMM's socket is gone")
	}
	return err
}
