package main_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// testServiceStopStart is `culvert kubernetes stop` and what undoes it (C-43).
func testServiceStopStart(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	kept := e.forwarded(t, "wanted", p)
	e.create(t, "waits", fmt.Sprintf("%d/TCP", p+1))

	out, code := e.d.cli("kubernetes", "stop")
	require.Zero(t, code, out)
	require.NoError(t, portsFree(p, 2), "stop has returned")
	kept.assertReset(t)
	s := e.status(t)
	assert.False(t, s.Wanted)
	assert.Empty(t, s.Ports)
	assert.True(t, s.API.Reachable)
	out, _ = e.d.cli("kubernetes", "status")
	assert.Contains(t, out, "VM default: stopped, no port is forwarded")
	require.NoError(t, reaches("tcp", e.base, "own")(), "a publish is no Service")

	e.edit(t, "waits", fmt.Sprintf("%d/TCP", p+1), "9/SCTP")
	out, code = e.d.cli("kubernetes", "stop")
	require.Zero(t, code, "twice is no error: %s", out)
	require.NoError(t, portsFree(p, 2), "an edit while stopped opens nothing")

	out, code = e.d.cli("kubernetes", "start")
	require.Zero(t, code, out)
	since := time.Now()
	e.within(t, since, time.Second, "back", reaches("tcp", p, "wanted"))
	e.within(t, since, time.Second, "what happened meanwhile", e.is(t, "waits:9/SCTP", "skipped", ""))
	assert.True(t, e.status(t).Wanted)
}

// testServiceStopRaces stops while Services change: no port is open when stop
// returns, nor after.
func testServiceStopRaces(t *testing.T, e *servicesEnv) {
	const n, rounds = 8, 20
	p := e.ports(t, 2*n)
	for i := range n {
		e.serve(t, fmt.Sprint("race", i), p+2*i)
		e.serve(t, fmt.Sprint("race", i), p+2*i+1)
		e.create(t, fmt.Sprint("race", i), fmt.Sprintf("%d/TCP", p+2*i))
		e.balance(t, fmt.Sprint("race", i))
	}
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for edit := 0; ; edit++ {
			i := edit % n
			_, err := e.api(http.MethodPatch, fmt.Sprintf("/api/v1/namespaces/default/services/race%d", i), map[string]any{"spec": map[string]any{
				"ports": []any{map[string]any{"name": "p0", "port": p + 2*i + edit/n%2, "protocol": "TCP"}}}})
			select {
			case <-stop:
				done <- err
				return
			default:
			}
			if err != nil {
				<-stop
				done <- err
				return
			}
		}
	}()
	for range rounds {
		out, code := e.d.cli("kubernetes", "stop")
		require.Zero(t, code, out)
		for range 3 {
			require.NoError(t, portsFree(p, 2*n))
		}
		require.Empty(t, e.status(t).Ports)
		require.NoError(t, portsFree(p, 2*n))
		out, code = e.d.cli("kubernetes", "start")
		require.Zero(t, code, out)
		e.within(t, time.Now(), time.Second, "started", func() error {
			for _, p := range e.status(t).Ports {
				if strings.HasPrefix(p.Name, "race") && p.State == "forwarded" {
					return nil
				}
			}
			return errors.New("nothing is forwarded")
		})
	}
	close(stop)
	require.NoError(t, <-done)
}

// testServiceVMGone takes the VM's link away, and with it all ports of its
// Services, which return with it (C-26, C-27).
func testServiceVMGone(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	kept := e.forwarded(t, "home", p)
	e.serve(t, "home", p+1)
	e.edit(t, "home", fmt.Sprintf("%d/TCP", p), fmt.Sprintf("%d/UDP", p+1))
	e.within(t, time.Now(), time.Second, "UDP", reaches("udp", p+1, "home"))
	for range 3 {
		since := time.Now()
		e.unplug(t)
		e.within(t, since, time.Second, "gone", bindable(p, 2))
		kept.assertReset(t)
		s := e.status(t)
		assert.Empty(t, s.Ports, "rows go with what they came from")
		assert.False(t, s.API.Reachable)
		assert.NotEmpty(t, s.API.Detail)
		e.boot(t)
		since = time.Now()
		e.within(t, since, 10*time.Second, "back", reaches("tcp", p, "home"))
		e.within(t, since, 10*time.Second, "back", reaches("udp", p+1, "home"))
		kept = keep(t, p)
	}
	out, code := e.d.cli("kubernetes", "stop")
	require.Zero(t, code, out)
	e.unplug(t)
	e.boot(t)
	e.within(t, time.Now(), 10*time.Second, "well again", e.apiAnswers(t))
	e.within(t, time.Now(), 5*time.Second, "what was stopped stays so", bindable(p, 2))
	assert.Empty(t, e.status(t).Ports)
	out, code = e.d.cli("kubernetes", "start")
	require.Zero(t, code, out)
	e.within(t, time.Now(), time.Second, "started", reaches("tcp", p, "home"))
}

// testServiceMany is a cluster of 2 000 Services, made beforehand. Benchmarks
// measure it; this is its order of magnitude, with a real API server.
func testServiceMany(t *testing.T, e *servicesEnv) {
	p := e.ports(t, manyServices)
	_, err := e.api(http.MethodPost, "/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": "many"}})
	require.NoError(t, err)
	out, code := e.d.cli("kubernetes", "stop")
	require.Zero(t, code, out)
	before := e.d.usage(t)

	made := time.Now()
	path := "/api/v1/namespaces/many/services"
	ingress := map[string]any{"status": map[string]any{"loadBalancer": map[string]any{"ingress": []any{map[string]any{"ip": nodeAddr}}}}}
	no := false
	require.Empty(t, each(manyServices, 16, func(i int) error {
		s := loadBalancer(t, fmt.Sprintf("many%d", i), fmt.Sprintf("%d/TCP", p+i))
		s.Namespace, s.Spec.AllocateLoadBalancerNodePorts = "many", &no
		if _, err := e.api(http.MethodPost, path, s); err != nil {
			return err
		}
		_, err := e.api(http.MethodPatch, path+"/"+s.Name+"/status", ingress)
		return err
	}))
	t.Logf("made in %v", time.Since(made))

	since := time.Now()
	out, code = e.d.cli("kubernetes", "start")
	require.Zero(t, code, out)
	e.within(t, since, 3*time.Second, "2 000 Services forwarded", func() error {
		n := 0
		for _, s := range e.status(t).Ports {
			if s.Namespace == "many" && s.State == "forwarded" {
				n++
			}
		}
		if n != manyServices {
			return fmt.Errorf("%d are forwarded", n)
		}
		return nil
	})
	after := e.d.usage(t)
	t.Logf("before: %v; with %d Services: %v", before, manyServices, after)
	e.serve(t, "last", p+manyServices-1)
	e.serve(t, "edited", p+manyServices)
	require.NoError(t, reaches("tcp", p+manyServices-1, "last")())

	e.ports(t, 1)
	since = time.Now()
	_, err = e.api(http.MethodPatch, path+"/many7", map[string]any{"spec": map[string]any{
		"ports": []any{map[string]any{"name": "p0", "port": p + manyServices, "protocol": "TCP"}}}})
	require.NoError(t, err)
	e.within(t, since, 200*time.Millisecond, "an edit among 2 000", reaches("tcp", p+manyServices, "edited"))

	deleted := time.Now()
	_, err = e.api(http.MethodDelete, path, nil)
	require.NoError(t, err)
	t.Logf("deleted in %v", time.Since(deleted))
	since = time.Now()
	e.within(t, since, 5*time.Second, "all deleted", bindable(p, manyServices+1))
	e.within(t, time.Now(), 5*time.Second, "nothing is left", func() error {
		if now := e.d.usage(t); now.fds > before.fds+5 || now.flows > before.flows {
			return fmt.Errorf("%v, before: %v", now, before)
		}
		return nil
	})
}
