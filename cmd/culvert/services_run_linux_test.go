package main_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/culvertnet/culvert/guest/guesttest"
)

// Services end to end: a real API server in the guest, the real daemon, real
// servers and clients (C-39 to C-46). What the cluster's load balancer would say
// of a Service, the tests do.
//
//	test ──────────────────────────────────────► API server
//	test ── host ports ── culvert daemon ── tap ── node ── servers

// A servicesEnv is a running daemon with a cluster behind it.
type servicesEnv struct {
	*serviceBed
	d          *daemon
	kubeconfig string // which the daemon reads

	base, next int // host ports: the first of those that were free, and the next to use

	retried  int            // the host port that another process had, 0 before
	released time.Time      // by that process
	freed    chan time.Time // when the daemon had it
}

const (
	manyServices = 2000
	servicePorts = 150 + manyServices
)

type servicesCase struct {
	name string
	run  func(*testing.T, *servicesEnv)
}

func TestServices(t *testing.T) {
	needsTime(t)
	e := startServices(t)
	e.run(t,
		// The first has the daemon as it starts, without a kubeconfig.
		servicesCase{"BadKubeconfigs", testServiceBadKubeconfigs},
		servicesCase{"Life", testServiceLife},
		servicesCase{"FB100", testServiceFB100},
		servicesCase{"FB101", testServiceFB101},
		servicesCase{"FB102", testServiceFB102},
		servicesCase{"FB103", testServiceFB103},
		servicesCase{"FB104", testServiceFB104},
		servicesCase{"FB105", testServiceFB105},
		servicesCase{"FB106", testServiceFB106},
		servicesCase{"FB107", testServiceFB107},
		servicesCase{"FB109", testServiceFB109},
		servicesCase{"FB110", testServiceFB110},
		servicesCase{"FB112", testServiceFB112},
		servicesCase{"FB113", testServiceFB113},
		servicesCase{"Reach", testServiceReach},
		servicesCase{"Burst", testServiceBurst},
		servicesCase{"StopStart", testServiceStopStart},
		servicesCase{"StopRaces", testServiceStopRaces},
		// The port is tried again 30 s after; the watch is cut for longer.
		servicesCase{"TakenPort", testServiceTakenPort},
		servicesCase{"WatchCut50Times", testServiceWatchCut},
		servicesCase{"TakenPortFreed", testServiceTakenPortFreed},
		servicesCase{"Refused", testServiceRefused},
		servicesCase{"Untrusted", testServiceUntrusted},
		servicesCase{"NoWatch", testServiceNoWatch},
		servicesCase{"README", testServiceREADME},
		servicesCase{"FB115", testServiceFB115},
		servicesCase{"ServerKilled", testServiceServerKilled},
		servicesCase{"VMGone", testServiceVMGone},
		servicesCase{"Many", testServiceMany},
		servicesCase{"Reset", testServiceReset},
		servicesCase{"Stop", testServiceStop},
	)
}

func (e *servicesEnv) run(t *testing.T, cases ...servicesCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			require.NotNil(t, e.d.cmd, "the daemon has ended")
			c.run(t, e)
		})
	}
}

// startServices brings up the cluster and a daemon that has no kubeconfig yet.
func startServices(t *testing.T) *servicesEnv {
	t.Helper()
	e := &servicesEnv{serviceBed: newServiceBed(t), base: freePorts(t, servicePorts), freed: make(chan time.Time, 1)}
	e.next = e.base
	e.kubeconfig = shortTempDir(t) + "/kubeconfig"
	e.d = newDaemon(t, e.spec(), nil)
	e.configure(t, "auto")
	e.d.start(t)
	e.boot(t)
	e.serve(t, "own", e.base)
	out, code := e.d.cli("wait", "--timeout", "60s")
	require.Zero(t, code, "culvert wait: %s\n%s", out, e.d.logs.tail(20))
	return e
}

// configure writes the daemon's config. Its first host port is a publish of its
// own, which no fault of the cluster's may touch.
func (e *servicesEnv) configure(t *testing.T, reach string) {
	t.Helper()
	yaml, err := json.Marshal(map[string]any{ // which is YAML
		"timeouts": map[string]any{"udpIdle": udpIdle.String()},
		"vms": []any{map[string]any{"name": "default", "attach": e.spec(),
			"publish":    []string{fmt.Sprintf("%d:%d", e.base, e.base)},
			"kubernetes": map[string]any{"kubeconfig": e.kubeconfig, "via": "stack", "reach": reach}}},
	})
	require.NoError(t, err)
	replaceFile(t, e.d.args[2], yaml)
}

// reconfigure is configure for a daemon that runs.
func (e *servicesEnv) reconfigure(t *testing.T, reach string) {
	t.Helper()
	e.configure(t, reach)
	require.NoError(t, e.d.cmd.Process.Signal(syscall.SIGHUP))
}

// credentials makes the daemon's kubeconfig that of user.
func (e *servicesEnv) credentials(t *testing.T, user string) {
	t.Helper()
	text, err := os.ReadFile(e.kube.Kubeconfig(user, fmt.Sprintf("https://127.0.0.1:%d", apiPort)))
	require.NoError(t, err)
	replaceFile(t, e.kubeconfig, text)
}

// ports returns the first of n host ports in a row that no other test uses.
func (e *servicesEnv) ports(t *testing.T, n int) int {
	t.Helper()
	first := max(e.next, e.base+1)
	e.next = first + n
	require.LessOrEqual(t, e.next, e.base+servicePorts, "raise servicePorts")
	return first
}

// A clusterStatus is what `culvert kubernetes status -o json` says of one.
type clusterStatus struct {
	VM  string
	API struct {
		Endpoint  string
		Reachable bool
		Detail    string
	}
	Wanted   bool
	Failures int
	Ports    []struct {
		Namespace, Name             string
		Port                        int
		Protocol                    string
		Host, State, Detail, Source string
		RetryAt                     any
	}
}

func (e *servicesEnv) status(t *testing.T) clusterStatus {
	t.Helper()
	out, code := e.d.cli("kubernetes", "status", "-o", "json")
	require.Zero(t, code, out)
	var all []clusterStatus
	require.NoError(t, json.Unmarshal([]byte(out), &all), out)
	require.Len(t, all, 1)
	return all[0]
}

// is complains unless a port of a Service, "web:80/TCP", is in the state, and the
// detail says so. The empty state is for a port that has no row.
func (e *servicesEnv) is(t *testing.T, port, state, detail string) func() error {
	return func() error {
		got, why := "", ""
		for _, p := range e.status(t).Ports {
			if fmt.Sprintf("%s:%d/%s", p.Name, p.Port, p.Protocol) == port {
				got, why = p.State, p.Detail
			}
		}
		if got != state || !strings.Contains(why, detail) {
			return fmt.Errorf("%s is %q (%s), not %q (%s)", port, got, why, state, detail)
		}
		return nil
	}
}

// apiFails complains unless the API server does not answer, for that reason.
func (e *servicesEnv) apiFails(t *testing.T, why string) func() error {
	return func() error {
		s := e.status(t)
		if s.API.Reachable || s.Failures == 0 || !strings.Contains(s.API.Detail, why) {
			return fmt.Errorf("%+v, %d failures; want %q", s.API, s.Failures, why)
		}
		return nil
	}
}

// apiAnswers complains unless the API server does.
func (e *servicesEnv) apiAnswers(t *testing.T) func() error {
	return func() error {
		if s := e.status(t); !s.API.Reachable || s.Failures != 0 {
			return fmt.Errorf("%+v, %d failures", s.API, s.Failures)
		}
		return nil
	}
}

// within waits until f has nothing to complain about, and asserts that this is so
// within limit of since.
func (e *servicesEnv) within(t *testing.T, since time.Time, limit time.Duration, what string, f func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(limit + 20*time.Second); ; time.Sleep(5 * time.Millisecond) {
		if err = f(); err == nil {
			break
		}
		require.True(t, time.Now().Before(deadline), "%s: %v\n%s", what, err, e.d.logs.tail(20))
	}
	took := time.Since(since)
	t.Logf("%s: %v", what, took)
	assert.Less(t, took, margin*limit, what)
}

// loadBalancer is a Service of that type; ports are as in "80/TCP".
func loadBalancer(t *testing.T, name string, ports ...string) corev1.Service {
	t.Helper()
	s := corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
	for i, p := range ports {
		var number int32
		var protocol string
		_, err := fmt.Sscanf(p, "%d/%s", &number, &protocol)
		require.NoError(t, err, p)
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
			Name: fmt.Sprintf("p%d", i), Port: number, Protocol: corev1.Protocol(protocol), TargetPort: intstr.FromInt32(number),
		})
	}
	return s
}

// create makes a Service that the cluster's load balancer has not seen yet. It
// goes with the test, unless that has deleted it.
func (e *servicesEnv) create(t *testing.T, name string, ports ...string) corev1.Service {
	t.Helper()
	s := e.kube.Create(loadBalancer(t, name, ports...))
	t.Cleanup(func() { _, _ = e.api("DELETE", "/api/v1/namespaces/default/services/"+name, nil) })
	return s
}

// balance is servicelb: the Service's ports are open on the node.
func (e *servicesEnv) balance(t *testing.T, name string) {
	t.Helper()
	e.kube.SetIngress("default", name, corev1.LoadBalancerIngress{IP: nodeAddr})
}

// forwarded makes a Service with a server behind it, and a flow that has to
// outlive what the test does.
func (e *servicesEnv) forwarded(t *testing.T, name string, port int) *keptFlow {
	t.Helper()
	e.serve(t, name, port)
	e.create(t, name, fmt.Sprintf("%d/TCP", port))
	e.balance(t, name)
	e.within(t, time.Now(), time.Second, "forwarded", reaches("tcp", port, name))
	return keep(t, port)
}

// edit moves a Service to other ports.
func (e *servicesEnv) edit(t *testing.T, name string, ports ...string) {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"ports": loadBalancer(t, name, ports...).Spec.Ports}})
	require.NoError(t, err)
	e.kube.Patch("default", name, string(patch))
}

// testServiceBadKubeconfigs is a daemon whose kubeconfig is missing and then bad in
// one way after the other: one sentence each, one warning for all, everything else
// runs on, and the good one is taken without a restart (C-44).
func testServiceBadKubeconfigs(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	e.serve(t, "first", p)
	e.create(t, "first", fmt.Sprintf("%d/TCP", p))
	e.balance(t, "first")

	past := guesttest.NewCerts(t, false, time.Now().Add(-time.Hour))
	with := func(user string) []byte {
		return []byte(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
 clusters: [{name: a, cluster: {server: "https://10.0.2.2:6443"}}], users: [{name: a, user: ` + user + "}]}\n")
	}
	bads := []struct {
		text []byte
		why  string
	}{
		{nil, "no such file"},
		{[]byte("\x00\x01 nonsense"), "it is no kubeconfig"},
		{[]byte{}, "no cluster"},
		{with(`{exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/false, interactiveMode: Never}}`), "come from a program"},
		{with(fmt.Sprintf("{client-certificate: %q, client-key: %q}", past.Cert, past.Key)), "the client certificate expired on "},
	}
	for _, bad := range bads {
		if bad.text != nil {
			replaceFile(t, e.kubeconfig, bad.text)
		}
		e.within(t, time.Now(), 2*time.Second, bad.why, e.apiFails(t, bad.why))
		s := e.status(t)
		assert.NotContains(t, s.API.Detail, "\n")
		assert.Empty(t, s.Ports)
		require.NoError(t, reaches("tcp", e.base, "own")(), "everything else keeps running")
		out, code := e.d.cli("kubernetes", "status")
		require.Zero(t, code)
		assert.Len(t, strings.Split(strings.TrimSuffix(out, "\n"), "\n"), 1, out)
		assert.Contains(t, out, "VM default: API not reachable at ")
		t.Log(out)
	}
	require.Equal(t, "ready", e.d.vm(t).State)
	require.Eventually(t, func() bool { return e.status(t).Failures >= 16 }, time.Minute, 100*time.Millisecond)
	assert.Equal(t, 1, strings.Count(e.d.logs.String(), "Kubernetes API does not answer"), "one warning at the 15th failure")

	e.credentials(t, guesttest.KubeViewer)
	since := time.Now()
	e.within(t, since, 3*time.Second, "the file is good", reaches("tcp", p, "first"))
	require.NoError(t, e.apiAnswers(t)())
	assert.Equal(t, 1, strings.Count(e.d.logs.String(), "Kubernetes API answers again"))
}

// testServiceStop leaves with SIGTERM while Services are forwarded.
func testServiceStop(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	e.forwarded(t, "last", p)
	e.d.stop(t)
	require.NoError(t, portsFree(e.base, servicePorts))
}
