package daemon

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

// Kubernetes implements api.Backend.
func (d *Daemon) Kubernetes() []api.Kubernetes {
	var list []api.Kubernetes
	var rows []api.Listener
	for _, a := range d.clusters() {
		if rows == nil {
			rows = d.ledger()
		}
		k := api.Kubernetes{VM: a.vm.Name, Wanted: !d.loop.Held(a.vm.Name, reconcile.ServicesName), Ports: []api.ServicePort{}}
		k.API.Endpoint = a.guest.config.Load().Kubernetes.Kubeconfig
		view, _ := d.vms.View(a.vm.Name)
		// What was learned in an earlier life of the VM is no news.
		if s := a.guest.services.Load(); s != nil && a.current() != nil && s.Generation() == view.Generation {
			status := s.Status()
			k.API, k.Failures = api.ClusterAPI{Endpoint: status.Endpoint, Reachable: status.Reachable, Detail: status.Detail}, status.Failures
		} else {
			k.API.Detail = fmt.Sprintf("VM %s is %s", a.vm.Name, view.State)
		}
		for _, r := range rows {
			if r.Owner.Kind != listener.KindKubernetes || r.VM != a.vm.Name {
				continue
			}
			p, err := reconcile.ParseServicePort(r.Owner.ID)
			if err != nil {
				continue // no id of the source's
			}
			k.Ports = append(k.Ports, api.ServicePort{
				Namespace: p.Namespace, Name: p.Name, Port: p.Port, Protocol: p.Protocol,
				Host: r.Host, State: r.State, Detail: r.Detail, RetryAt: r.RetryAt,
			})
		}
		slices.SortFunc(k.Ports, func(a, b api.ServicePort) int {
			return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
		})
		list = append(list, k)
	}
	return list
}

// WantKubernetes implements api.Backend.
func (d *Daemon) WantKubernetes(_ context.Context, r api.KubernetesRequest) error {
	a, err := d.pickCluster(r.VM)
	if err != nil {
		return err
	}
	d.loop.Hold(a.vm.Name, reconcile.ServicesName, !r.Wanted)
	return nil
}

// clusters returns the VMs whose config names a cluster, in its order.
func (d *Daemon) clusters() []*attacher {
	var with []*attacher
	for _, v := range d.vms.Views() {
		if a := d.vm(v.Name); a != nil && a.guest.config.Load().Kubernetes != (KubernetesConfig{}) {
			with = append(with, a)
		}
	}
	return with
}

// pickCluster returns the VM that a request means.
func (d *Daemon) pickCluster(name string) (*attacher, error) {
	with := d.clusters()
	names := make([]string, len(with))
	for i, a := range with {
		if a.vm.Name == name || name == "" && len(with) == 1 {
			return a, nil
		}
		names[i] = a.vm.Name
	}
	switch {
	case len(with) == 0:
		return nil, &api.Problem{Status: http.StatusNotFound, Detail: "no VM has kubernetes in its config"}
	case name == "":
		return nil, &api.Problem{Status: http.StatusBadRequest, Detail: "several VMs have a cluster (" + strings.Join(names, ", ") + "): name one with --vm"}
	}
	return nil, &api.Problem{Status: http.StatusNotFound, Detail: fmt.Sprintf("VM %q has no kubernetes in its config, if there is such a VM", name)}
}
