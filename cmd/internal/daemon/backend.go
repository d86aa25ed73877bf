package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
)

// The daemon is the api.Backend: it says in the API's words what its parts know.

var _ api.Backend = (*Daemon)(nil)

// Listeners implements api.Backend.
func (d *Daemon) Listeners(of string) ([]api.Listener, error) {
	all := d.ledger()
	if of == "" {
		return all, nil
	}
	matches, err := d.meant(of, all)
	if err != nil {
		return nil, err
	}
	rows := slices.DeleteFunc(all, func(l api.Listener) bool { return !matches(l) })
	if len(rows) == 0 {
		return nil, &api.Problem{Status: http.StatusNotFound, Detail: fmt.Sprintf("there is no row of a container, a Service or a publish called %q", of)}
	}
	return rows, nil
}

// ledger returns every row: those of the forwarder, and those that sources know
// no listener for.
func (d *Daemon) ledger() []api.Listener {
	rows, notes := d.forwarder.Rows(), d.loop.Notes()
	called := d.calledNames()
	list := make([]api.Listener, 0, len(rows)+len(notes))
	for _, r := range rows {
		l := d.listener(r)
		l.Name = called[r.Owner]
		list = append(list, l)
	}
	for _, n := range notes {
		list = append(list, api.Listener{
			Owner: ownerOf(n.Owner), Name: called[n.Owner], Protocol: n.Protocol, Host: n.Host, Bound: []string{}, VM: n.Owner.VM, Guest: n.Guest,
			State: n.State.String(), Detail: n.Detail, RetryAt: api.Time{Time: n.RetryAt}, Source: listener.SourceGateway.String(),
			Since: api.Time{Time: n.Since}, Flows: api.FlowCount{Refusals: map[string]uint64{}},
		})
	}
	return list
}

// calledNames returns what people call the owners: of a container's names the
// bare one, which has no Compose project behind it.
func (d *Daemon) calledNames() map[listener.Owner]string {
	called := make(map[listener.Owner]string)
	for _, v := range d.loop.Names().Views() {
		for _, o := range v.Owners {
			if called[o] == "" || !strings.Contains(v.Name, ".") {
				called[o] = v.Name
			}
		}
	}
	return called
}

func (d *Daemon) listener(r stack.Row) api.Listener {
	o, spec := r.Outcome, r.Outcome.Spec
	l := api.Listener{
		Owner: ownerOf(r.Owner), Protocol: spec.Proto.String(), Host: r.Host, Bound: []string{},
		VM: spec.Target.VM, Guest: r.Guest, State: o.State.String(), Detail: o.Detail,
		RetryAt: api.Time{Time: o.RetryAt}, Source: spec.Source.String(), Since: api.Time{Time: o.Since},
		Flows: api.FlowCount{Active: r.Flows.Active, Total: r.Flows.Total, Refusals: map[string]uint64{}},
		Bytes: api.Traffic{ToGuest: r.ToGuest, ToHost: r.ToHost},
	}
	if vm := d.vm(spec.Target.VM); vm != nil {
		l.Guest = spec.GuestString(vm.vm.Node) // also while the VM is not there
	}
	if errors.Is(o.Err, listener.ErrNoVM) {
		l.Detail = d.absent(spec.Target.VM, o.Detail)
	}
	if spec.Host.Port() == 0 && len(o.Bound) > 0 { // the row shows the port that the kernel picked (C-1)
		spec.Host = netip.AddrPortFrom(spec.Host.Addr(), o.Bound[0].Port())
		l.Host = spec.HostString(d.policy)
	}
	for _, b := range o.Bound {
		l.Bound = append(l.Bound, b.String())
	}
	for reason, n := range r.Flows.Refused {
		l.Flows.Refusals[reason] = n
		l.Flows.Refused += n
	}
	return l
}

// absent says what a row waits for whose VM is not there for listeners: it may be
// attached and not have answered. said is the row's own word for it.
func (d *Daemon) absent(vm, said string) string {
	for _, v := range d.vms.Views() {
		if v.Name == vm && v.State != reconcile.VMReady && v.Detail != "" {
			return fmt.Sprintf("VM %s is %s: %s", vm, v.State, v.Detail)
		}
	}
	return said
}

func ownerOf(o listener.Owner) api.Owner { return api.Owner{Kind: o.Kind, ID: o.ID} }

// Flows implements api.Backend.
func (d *Daemon) Flows() []api.Flow {
	now := time.Now()
	views := d.forwarder.Flows()
	list := make([]api.Flow, len(views))
	for i, v := range views {
		list[i] = api.Flow{
			ID: v.ID, Protocol: v.Proto.String(), Owner: ownerOf(v.Owner), VM: v.VM,
			Client: v.Client.String(), Host: v.Host.String(), Source: v.Source, Guest: v.Guest.String(), State: v.State,
			Age: seconds(now.Sub(v.Started)), Idle: seconds(now.Sub(v.LastActive)),
			Bytes: api.Traffic{ToGuest: v.ToGuest, ToHost: v.ToHost},
		}
	}
	return list
}

// Names implements api.Backend.
func (d *Daemon) Names() []api.Name {
	views := d.loop.Names().Views()
	list := make([]api.Name, len(views))
	for i, v := range views {
		list[i] = api.Name{Name: v.Name, VM: v.VM, Owners: []api.Owner{}, Addresses: []string{}}
		for _, o := range v.Owners {
			list[i].Owners = append(list[i].Owners, ownerOf(o))
		}
		for _, a := range v.Addrs {
			list[i].Addresses = append(list[i].Addresses, a.String())
		}
	}
	return list
}

func seconds(d time.Duration) float64 { return max(0, d.Seconds()) }

// VMs implements api.Backend.
func (d *Daemon) VMs() []api.VM {
	views := d.vms.Views()
	list := make([]api.VM, 0, len(views))
	for _, v := range views {
		a := d.vm(v.Name)
		if a == nil {
			continue // removed meanwhile
		}
		vm := api.VM{
			Name: v.Name, Attach: a.vm.Attach.String(), State: v.State.String(), Detail: v.Detail,
			Node: a.vm.Node.String(), Gateway: a.vm.Gateway.String(), Generation: v.Generation,
			Offloads: []string{}, Drops: map[string]uint64{}, VMM: v.VMM, Since: api.Time{Time: v.Since},
			Probe: api.Probe{OK: v.Probe.OK, At: api.Time{Time: v.Probe.At}, RTT: v.Probe.RTT.Seconds()},
		}
		if c := a.guest.config.Load().Docker; c != (DockerConfig{}) {
			vm.Engine = engineOf(c.Endpoint, a)
		}
		if l := a.current(); l != nil {
			s := l.Stats()
			vm.Offloads = l.Info().ToGuest.Names()
			vm.Queues = s.Queues
			vm.TCP = tcpNetstack
			if l.Promoted() {
				vm.TCP = tcpPromoted
			}
			vm.LastFrame = api.Time{Time: l.LastFrame()}
			vm.Frames = api.Traffic{ToGuest: s.Link.ToGuest.Frames.Load(), ToHost: s.Link.FromGuest.Frames.Load()}
			vm.Bytes = api.Traffic{ToGuest: s.Link.ToGuest.Bytes.Load(), ToHost: s.Link.FromGuest.Bytes.Load()}
			vm.Drops = s.Link.AllDrops()
			vm.Flows = s.Flows
			vm.Endpoints = s.Endpoints
			if l.Stalled() >= stallShown {
				vm.Detail = joined(vm.Detail, "the guest takes no frames")
			}
		}
		list = append(list, vm)
	}
	return list
}

// stallShown is for how long a guest takes no frames that wait for it before that
// is worth a word: a busy one is behind for milliseconds.
const stallShown = time.Second

// joined joins what is known of a VM.
func joined(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "; ")
}

// engineOf says how it stands with a VM's engine.
func engineOf(endpoint string, a *attacher) api.Engine {
	e := api.Engine{Endpoint: endpoint}
	if s := a.guest.containers.Load(); s != nil && a.current() != nil {
		status := s.Status()
		e.Reachable, e.Detail, e.Failures, e.Listed = status.Reachable, status.Detail, status.Failures, api.Time{Time: status.Listed}
	}
	return e
}

// Publish implements api.Backend.
func (d *Daemon) Publish(ctx context.Context, r api.PublishRequest) ([]api.Listener, error) {
	vm, err := d.pick(r.VM)
	if err != nil {
		return nil, err
	}
	specs, err := parsePublishes(r.Publish, vm)
	if err != nil {
		return nil, err
	}
	owners, err := d.static.Add(ctx, specs...)
	if err != nil {
		return nil, err
	}
	return d.rowsOf(owners), nil
}

// Unpublish implements api.Backend. What is not published is no error (C-4);
// what the config publishes is, as its port stays taken.
func (d *Daemon) Unpublish(ctx context.Context, r api.PublishRequest) ([]api.Listener, error) {
	vm := r.VM // which a reload may have removed, and left its rows
	if vm == "" {
		var err error
		if vm, err = d.pick(""); err != nil {
			return nil, err
		}
	}
	specs, err := parsePublishes(r.Publish, vm)
	if err != nil {
		return nil, err
	}
	var owners []listener.Owner
	for _, s := range specs {
		if o, ok := d.static.Owner(listener.KindCLI, s); ok {
			owners = append(owners, o)
		} else if _, ok := d.static.Owner(listener.KindConfig, s); ok {
			return nil, &api.Problem{
				Status: http.StatusConflict,
				Detail: fmt.Sprintf("%s is published by the config: take it out there and send SIGHUP", s),
			}
		}
	}
	rows := d.rowsOf(owners)
	if _, err := d.static.Remove(ctx, specs...); err != nil {
		return nil, err
	}
	return rows, nil
}

// rowsOf returns the rows of publishes' owners, in their order. Each has one row
// and no name, and the rest of the ledger is not looked at.
func (d *Daemon) rowsOf(owners []listener.Owner) []api.Listener {
	rows := d.forwarder.RowsOf(owners...)
	list := make([]api.Listener, len(rows))
	for i, r := range rows {
		list[i] = d.listener(r)
	}
	return list
}

// parsePublishes reads a request's publishes.
func parsePublishes(texts []string, vm string) (specs []listener.Spec, err error) {
	specs = make([]listener.Spec, len(texts))
	for i, text := range texts {
		if specs[i], err = parsePublish(text, vm); err != nil {
			return nil, &api.Problem{Status: http.StatusBadRequest, Detail: err.Error()}
		}
	}
	return specs, nil
}

// pick returns the VM that a request means.
func (d *Daemon) pick(name string) (string, error) {
	views := d.vms.Views()
	if name == "" && len(views) == 1 {
		return views[0].Name, nil
	}
	for _, v := range views {
		if v.Name == name {
			return name, nil
		}
	}
	if len(views) == 0 {
		return "", &api.Problem{Status: http.StatusNotFound, Detail: "there is no VM: the daemon's config or --attach names them"}
	}
	if name == "" {
		return "", &api.Problem{Status: http.StatusBadRequest, Detail: fmt.Sprintf("there are %d VMs: name one with --vm", len(views))}
	}
	return "", &api.Problem{Status: http.StatusNotFound, Detail: fmt.Sprintf("there is no VM named %q", name)}
}
