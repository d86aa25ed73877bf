package daemon

import (
	"context"
	"net/http"

	"github.com/culvertnet/culvert/cmd/internal/api"
)

// Kubernetes implements api.Backend. The config names no cluster yet.
func (d *Daemon) Kubernetes() []api.Kubernetes { return nil }

// WantKubernetes implements api.Backend.
func (d *Daemon) WantKubernetes(context.Context, api.KubernetesRequest) error {
	return &api.Problem{Status: http.StatusNotFound, Detail: "no VM has kubernetes in its config"}
}
