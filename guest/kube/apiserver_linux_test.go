package kube_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/culvertnet/culvert/guest/guesttest"
	"github.com/culvertnet/culvert/guest/kube"
)

// long is how long a test waits for what it is sure of.
const long = time.Minute

// A watcher is a Follow under way, and what it was told last.
type watcher struct {
	tb testing.TB
	mu sync.Mutex
	kube.Update
	failures []kube.Update
	updates  int
}

// follow follows k's Services until the test's end.
func follow(t *testing.T, k *guesttest.Kube, user string) *watcher {
	t.Helper()
	c, err := kube.New(kube.Options{Kubeconfig: k.Kubeconfig(user, ""), Dial: k.DialContext})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	w := &watcher{tb: t}
	done := make(chan error, 1)
	go func() {
		done <- c.Follow(ctx, func(u kube.Update) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.Update = u
			w.updates++
			if u.Err != nil {
				w.failures = append(w.failures, u)
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		assert.ErrorIs(t, <-done, context.Canceled)
		assert.NoError(t, c.Close())
	})
	return w
}

// until waits for an update that is right.
func (w *watcher) until(what string, right func(kube.Update) bool) kube.Update {
	w.tb.Helper()
	var last kube.Update
	require.Eventually(w.tb, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		last = w.Update
		return right(last)
	}, long, 5*time.Millisecond, what)
	return last
}

// untilServices waits for the LoadBalancer Services to be exactly these, each as
// "name:port/PROTO" with all of its ports.
func (w *watcher) untilServices(want ...string) kube.Update {
	w.tb.Helper()
	slices.Sort(want)
	return w.until(fmt.Sprint(want), func(u kube.Update) bool { return u.Err == nil && slices.Equal(want, balanced(u)) })
}

func balanced(u kube.Update) []string {
	var all []string
	for _, s := range u.Services {
		if !s.LoadBalancer {
			continue
		}
		text := s.Name
		for _, p := range s.Ports {
			text += fmt.Sprintf(":%d/%s", p.Number, p.Protocol)
		}
		all = append(all, text)
	}
	slices.Sort(all)
	return all
}

func loadBalancer(name string, ports ...corev1.ServicePort) corev1.Service {
	return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: ports}}
}

func tcp(port int32) corev1.ServicePort {
	return corev1.ServicePort{Name: fmt.Sprintf("t%d", port), Protocol: corev1.ProtocolTCP, Port: port}
}

func udp(port int32) corev1.ServicePort {
	return corev1.ServicePort{Name: fmt.Sprintf("u%d", port), Protocol: corev1.ProtocolUDP, Port: port}
}

// What a real API server says, through the life of its Services and its own.
func TestAPIServer(t *testing.T) {
	k := guesttest.NewKube(t, guesttest.KubeOptions{})
	w := follow(t, k, guesttest.KubeViewer)
	w.untilServices() // the kubernetes Service is none of type LoadBalancer
	poller := follow(t, k, guesttest.KubeLister)
	nobody := follow(t, k, guesttest.KubeNobody)

	// Created, and published by the load balancer, with everything (FB-107, FB-109).
	made := k.Create(loadBalancer("web", tcp(80), udp(80), corev1.ServicePort{Name: "s", Protocol: corev1.ProtocolSCTP, Port: 3868}))
	u := w.untilServices("web:80/TCP:80/UDP:3868/SCTP")
	web := u.Services[slices.IndexFunc(u.Services, func(s kube.Service) bool { return s.Name == "web" })]
	require.Equal(t, string(made.UID), web.UID)
	require.True(t, made.CreationTimestamp.Time.Equal(web.Created))
	require.Empty(t, web.Ingress)
	require.EqualValues(t, made.Spec.Ports[0].NodePort, web.Ports[0].NodePort)
	require.NotZero(t, web.Ports[0].NodePort)
	proxy := corev1.LoadBalancerIPModeProxy
	k.SetIngress("default", "web", corev1.LoadBalancerIngress{IP: "10.0.2.2"}, corev1.LoadBalancerIngress{Hostname: "node"},
		corev1.LoadBalancerIngress{IP: "fd00::1", IPMode: &proxy})
	w.until("ingress", func(u kube.Update) bool {
		i := slices.IndexFunc(u.Services, func(s kube.Service) bool { return s.Name == "web" })
		return i >= 0 && slices.Equal(u.Services[i].Ingress, []kube.Ingress{{IP: "10.0.2.2", Mode: "VIP"}, {Hostname: "node"}, {IP: "fd00::1", Mode: "Proxy"}})
	})

	// Edited (FB-105), of another type and back (FB-103), deleted and made anew (FB-102).
	k.Patch("default", "web", `{"spec":{"ports":[{"name":"t53","port":53,"protocol":"TCP"},{"name":"u53","port":53,"protocol":"UDP"}],"loadBalancerSourceRanges":["10.9.0.0/16"]}}`)
	u = w.untilServices("web:53/TCP:53/UDP")
	require.Equal(t, []string{"10.9.0.0/16"}, u.Services[slices.IndexFunc(u.Services, func(s kube.Service) bool { return s.Name == "web" })].SourceRanges)
	for range 10 {
		k.Patch("default", "web", `{"spec":{"type":"ClusterIP","loadBalancerSourceRanges":null}}`)
		w.untilServices()
		k.Patch("default", "web", `{"spec":{"type":"LoadBalancer"}}`)
		w.untilServices("web:53/TCP:53/UDP")
	}
	k.Delete("default", "web")
	again := k.Create(loadBalancer("web", tcp(81)))
	require.NotEqual(t, made.UID, again.UID)
	u = w.untilServices("web:81/TCP")
	require.Equal(t, string(again.UID), u.Services[slices.IndexFunc(u.Services, func(s kube.Service) bool { return s.Name == "web" })].UID)

	// Where watching is refused, polling sees the same; where all is, it is said.
	poller.untilServices("web:81/TCP")
	k.Create(loadBalancer("dns", udp(53)))
	w.untilServices("dns:53/UDP", "web:81/TCP")
	poller.untilServices("dns:53/UDP", "web:81/TCP")
	require.Empty(t, poller.failures)
	require.Empty(t, w.failures)
	u = nobody.until("refusal", func(u kube.Update) bool { return u.Failures > 1 })
	require.EqualError(t, u.Err, `API server at https://127.0.0.1:6443 refuses: services is forbidden: User "nobody" cannot list resource "services" in API group "" at the cluster scope (README shows the Role that is enough)`)

	// A burst is few updates.
	before := w.updates
	for i := range 100 {
		k.Create(loadBalancer(fmt.Sprintf("b%d", i), tcp(int32(1000+i))))
	}
	w.until("the burst", func(u kube.Update) bool { return len(balanced(u)) == 102 })
	t.Logf("100 Services made one after the other: %d updates", w.updates-before)
	for i := range 100 {
		k.Delete("default", fmt.Sprintf("b%d", i))
	}
	w.untilServices("dns:53/UDP", "web:81/TCP")

	// One Service with more ports than are kept.
	huge := loadBalancer("huge")
	huge.Spec.AllocateLoadBalancerNodePorts = new(bool)
	for i := range int32(5000) {
		huge.Spec.Ports = append(huge.Spec.Ports, tcp(1+i))
	}
	k.Create(huge)
	w.until("the huge Service", func(u kube.Update) bool {
		i := slices.IndexFunc(u.Services, func(s kube.Service) bool { return s.Name == "huge" })
		return i >= 0 && len(u.Services[i].Ports) == 1024
	})
	k.Delete("default", "huge")
	w.untilServices("dns:53/UDP", "web:81/TCP")

	// The API server dies, and is away for a while: nothing is told but failures.
	k.Kill()
	u = w.until("failures", func(u kube.Update) bool { return u.Failures >= 2 })
	require.EqualError(t, u.Err, "API server at https://127.0.0.1:6443 refused the connection")
	k.Start()
	k.Delete("default", "dns")
	w.untilServices("web:81/TCP")
	k.Stop()
	k.Start()
	k.Create(loadBalancer("late", tcp(82)))
	w.untilServices("late:82/TCP", "web:81/TCP")

	// A cluster without its past: resource versions are lower than they were.
	k.Reset()
	w.untilServices()
	k.Create(loadBalancer("new", tcp(83)))
	w.untilServices("new:83/TCP")
	poller.untilServices("new:83/TCP")
}
