package main

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A clusterBackend has clusters, and none when list is nil.
type clusterBackend struct {
	fakeBackend
	list  []api.Kubernetes
	asked []api.KubernetesRequest
}

func (b *clusterBackend) Kubernetes() []api.Kubernetes { return b.list }

func (b *clusterBackend) WantKubernetes(_ context.Context, r api.KubernetesRequest) error {
	if b.list == nil {
		return &api.Problem{Status: http.StatusNotFound, Detail: "no VM has kubernetes in its config"}
	}
	b.asked = append(b.asked, r)
	return nil
}

// fakeClusters are in every state there is.
var fakeClusters = []api.Kubernetes{
	{
		VM: "default", API: api.ClusterAPI{Endpoint: "https://10.0.2.2:6443", Reachable: true}, Wanted: true,
		Ports: []api.ServicePort{
			{Namespace: "default", Name: "web", Port: 80, Protocol: "TCP", Host: "127.0.0.1:80", State: "forwarded"},
			{Namespace: "default", Name: "dns", Port: 53, Protocol: "UDP", Host: "127.0.0.1:53", State: "pending", Detail: "waiting for the cluster's load balancer: no ingress address yet"},
			{Namespace: "shop", Name: "sig", Port: 3868, Protocol: "SCTP", Host: "127.0.0.1:3868", State: "skipped", Detail: "protocol SCTP not supported"},
			{
				Namespace: "shop", Name: "db", Port: 5432, Protocol: "TCP", Host: "127.0.0.1:5432", State: "failed",
				Detail: "host port 127.0.0.1:5432/tcp is in use by postgres\x1b[2J (pid 12)", RetryAt: fakeTime,
			},
			{
				Namespace: "shop", Name: "web", Port: 80, Protocol: "TCP", Host: "127.0.0.1:80", State: "failed",
				Detail: "host port 127.0.0.1:80/tcp belongs to kubernetes default/web:80/TCP (80:80/tcp)",
			},
		},
	},
	{VM: "edge", API: api.ClusterAPI{Endpoint: "https://10.0.3.2:6443", Detail: "connection refused"}, Wanted: true, Failures: 17, Ports: []api.ServicePort{
		{Namespace: "default", Name: "web", Port: 8080, Protocol: "TCP", Host: "127.0.0.1:8080", State: "forwarded"},
	}},
	{VM: "empty", API: api.ClusterAPI{Endpoint: "https://10.0.4.2:6443", Reachable: true}, Wanted: true, Ports: []api.ServicePort{}},
	{VM: "held", API: api.ClusterAPI{Endpoint: "https://10.0.5.2:6443", Reachable: true}, Ports: []api.ServicePort{}},
}

// C-46: status says whether the API answers and what became of each port.
func TestKubernetesStatus(t *testing.T) {
	socket := serveBackend(t, &clusterBackend{list: fakeClusters})
	for name, args := range map[string][]string{
		"kubernetes":      {"kubernetes", "status"},
		"kubernetes-json": {"k8s", "status", "-o", "json"},
	} {
		out, errs, code := cli(t, append([]string{"--api", socket}, args...)...)
		assert.Zero(t, code)
		assert.Empty(t, errs)
		golden(t, name, out)
	}
}

// On a terminal a line has one colour, that of its state, and one line's length.
func TestKubernetesStatusOnATerminal(t *testing.T) {
	var coloured []string
	for _, l := range clusterLines(fakeClusters) {
		text := l.text(0, true)
		_, state, _ := strings.Cut(text, ": ")
		state, _, _ = strings.Cut(state, "\x1b[0m")
		coloured = append(coloured, state)
		assert.NotContains(t, l.text(0, false), "\x1b", "nothing of the guest's reaches the terminal")
		assert.Equal(t, l.text(0, false), strings.NewReplacer(
			"\x1b[32m", "", "\x1b[33m", "", "\x1b[31m", "", "\x1b[2m", "", "\x1b[0m", "").Replace(text))
		for width := 1; width < 60; width++ {
			line := strings.TrimSuffix(l.text(width, false), "\n")
			assert.LessOrEqual(t, utf8.RuneCountInString(line), width)
			assert.NotContains(t, line, "\n")
		}
	}
	assert.Equal(t, []string{
		"\x1b[32mAPI reachable", "\x1b[32mforwarded", "\x1b[33mpending", "\x1b[2mnot forwarded", "\x1b[31mbind failed, retrying", "\x1b[31mnot forwarded",
		"\x1b[31mAPI not reachable", "\x1b[32mforwarded", "\x1b[32mAPI reachable", "\x1b[2mno Service of type LoadBalancer",
		"\x1b[32mAPI reachable", "\x1b[2mstopped",
	}, coloured)
}

func TestKubernetesStartStop(t *testing.T) {
	b := &clusterBackend{list: fakeClusters}
	socket := serveBackend(t, b)
	for _, args := range []string{"kubernetes stop", "k8s stop --vm edge", "kubernetes start --vm edge"} {
		out, errs, code := cli(t, append([]string{"--api", socket}, strings.Fields(args)...)...)
		assert.Zero(t, code, errs)
		assert.Empty(t, out+errs)
	}
	assert.Equal(t, []api.KubernetesRequest{{}, {VM: "edge"}, {VM: "edge", Wanted: true}}, b.asked)
}

// Without a cluster there is one sentence.
func TestKubernetesNone(t *testing.T) {
	socket := serveBackend(t, &clusterBackend{})
	for _, args := range []string{"kubernetes status", "kubernetes status -o json", "kubernetes start", "kubernetes stop"} {
		out, errs, code := cli(t, append([]string{"--api", socket}, strings.Fields(args)...)...)
		assert.Equal(t, 1, code)
		assert.Empty(t, out)
		assert.Equal(t, "culvert: no VM has kubernetes in its config\n", errs)
	}
	for args, want := range map[string]string{
		"kubernetes status -o xml": "xml", "kubernetes status x": "--help", "kubernetes stop x": "--help", "kubernetes frobnicate": "frobnicate",
	} {
		_, errs, code := cli(t, append([]string{"--api", socket}, strings.Fields(args)...)...)
		assert.Equal(t, 2, code, errs)
		assert.Contains(t, errs, want)
	}
	_, errs, code := cli(t, "kubernetes")
	require.Zero(t, code, errs)
}
