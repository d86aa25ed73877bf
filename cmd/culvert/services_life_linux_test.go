package main_test

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

// testServiceLife is a Service from its making to its end, each step within a
// second (C-41, C-42).
func testServiceLife(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	web, moved := fmt.Sprintf("web:%d/TCP", p), fmt.Sprintf("web:%d/TCP", p+1)
	e.serve(t, "web", p)
	e.serve(t, "moved", p+1)

	since := time.Now()
	e.create(t, "web", fmt.Sprintf("%d/TCP", p))
	e.within(t, since, time.Second, "pending", e.is(t, web, "pending", "no ingress address yet"))
	require.NoError(t, portsFree(p, 1), "a pending port is open")

	since = time.Now()
	e.balance(t, "web")
	e.within(t, since, time.Second, "forwarded, with traffic", reaches("tcp", p, "web"))
	require.NoError(t, e.is(t, web, "forwarded", "")())
	out, code := e.d.cli("k8s", "status")
	require.Zero(t, code, out)
	assert.Contains(t, out, fmt.Sprintf("VM default: API reachable at https://127.0.0.1:%d\n", apiPort))
	assert.Contains(t, out, fmt.Sprintf("default/web %d/TCP: forwarded on 127.0.0.1:%d\n", p, p))
	kept := keep(t, p)

	since = time.Now()
	e.edit(t, "web", fmt.Sprintf("%d/TCP", p+1))
	e.within(t, since, time.Second, "the new port is open", reaches("tcp", p+1, "moved"))
	e.within(t, since, time.Second, "the old port is closed", bindable(p, 1))
	kept.assertReset(t)
	require.NoError(t, errors.Join(e.is(t, moved, "forwarded", "")(), e.is(t, web, "", "")()))

	kept = keep(t, p+1)
	since = time.Now()
	e.kube.Delete("default", "web")
	e.within(t, since, time.Second, "closed", bindable(p+1, 1))
	kept.assertReset(t)
	require.NoError(t, e.is(t, moved, "", "")())
	for _, transition := range []string{"pending", "forwarded"} {
		assert.Equal(t, 1, e.said(web, transition), "%s is said once", transition)
	}
}

// said returns how often the daemon has said that a port came to a state.
func (e *servicesEnv) said(port, state string) (n int) {
	for line := range strings.Lines(e.d.logs.String()) {
		if strings.Contains(line, "default/"+port) && (strings.Contains(line, `msg="publish `+state) || strings.Contains(line, "state="+state)) {
			n++
		}
	}
	return n
}

// older returns the name of a Service and of one made a second later at least:
// the age that the API server tells is in whole seconds. Each has an address and
// a server of its own, and both want the port.
func (e *servicesEnv) older(t *testing.T, port int) (older, newer string) {
	t.Helper()
	older, newer = "zeta", "alpha" // by name the newer would be first
	e.serve(t, older, port)
	serve(t, e.ns, newer, cardAddr, port)
	made := e.create(t, older, fmt.Sprintf("%d/TCP", port))
	e.balance(t, older)
	e.within(t, time.Now(), time.Second, "the older one is forwarded", reaches("tcp", port, older))
	for time.Now().Unix() <= made.CreationTimestamp.Unix() {
		time.Sleep(10 * time.Millisecond)
	}
	e.create(t, newer, fmt.Sprintf("%d/TCP", port))
	e.kube.SetIngress("default", newer, corev1.LoadBalancerIngress{IP: cardAddr})
	return older, newer
}

// Of two Services that want one port the older has it, the row of the other says
// so, and ten daemons in a row decide the same.
func testServiceFB100(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	older, newer := e.older(t, p)
	for i := range 10 {
		if i%2 == 0 {
			e.d.kill()
		} else {
			e.d.stop(t)
		}
		e.d.start(t)
		e.boot(t)
		started := time.Now()
		e.within(t, started, 5*time.Second, "the older one is forwarded again", reaches("tcp", p, older))
		e.within(t, started, 5*time.Second, "the newer one waits",
			e.is(t, fmt.Sprintf("%s:%d/TCP", newer, p), "failed", fmt.Sprintf("default/%s:%d/TCP", older, p)))
		require.NoError(t, e.is(t, fmt.Sprintf("%s:%d/TCP", older, p), "forwarded", "")())
	}
}

// The one that waited takes over with real traffic, and keeps the port when the
// other comes back.
func testServiceFB101(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	older, newer := e.older(t, p)
	waits := func(one, other string) func() error {
		return e.is(t, fmt.Sprintf("%s:%d/TCP", one, p), "failed", fmt.Sprintf("default/%s:%d/TCP", other, p))
	}
	e.within(t, time.Now(), time.Second, "the newer one says who has the port", waits(newer, older))
	kept := keep(t, p)

	since := time.Now()
	e.kube.Delete("default", older)
	e.within(t, since, 2*time.Second, "the newer one takes over", reaches("tcp", p, newer))
	kept.assertReset(t)
	require.NoError(t, e.is(t, fmt.Sprintf("%s:%d/TCP", newer, p), "forwarded", "")())

	kept = keep(t, p)
	e.create(t, older, fmt.Sprintf("%d/TCP", p))
	e.balance(t, older)
	e.within(t, time.Now(), time.Second, "what comes back waits", waits(older, newer))
	require.NoError(t, reaches("tcp", p, newer)())
	kept.assertKept(t)
}

// A Service that is deleted and made again at once is another one: its port is
// opened anew, by one listener.
func testServiceFB102(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	kept := e.forwarded(t, "again", p)
	serve(t, e.ns, "elsewhere", cardAddr, p)
	for i := range 10 {
		name, at := "elsewhere", cardAddr
		if i%2 == 1 {
			name, at = "again", nodeAddr
		}
		since := time.Now()
		e.kube.Delete("default", "again")
		e.kube.Create(loadBalancer(t, "again", fmt.Sprintf("%d/TCP", p)))
		e.kube.SetIngress("default", "again", corev1.LoadBalancerIngress{IP: at})
		e.within(t, since, 2*time.Second, "forwarded to the new one", reaches("tcp", p, name))
		kept.assertReset(t)
		assert.Equal(t, 1, listeners(t, p))
		kept = keep(t, p)
	}
}

// listeners counts the sockets that listen at a port of 127.0.0.1 (proc_pid_net(5)).
func listeners(t *testing.T, port int) (n int) {
	t.Helper()
	f, err := os.Open("/proc/thread-self/net/tcp") // /proc/net is the first thread's, which may be elsewhere
	require.NoError(t, err)
	defer f.Close()
	local := fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32([]byte{127, 0, 0, 1}), port)
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) > 3 && fields[1] == local && fields[3] == "0A" {
			n++
		}
	}
	return n
}

// A Service of another type has no port, and has it again when it is back.
func testServiceFB103(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	kept := e.forwarded(t, "flip", p)
	for i := range 20 {
		typ := []string{"NodePort", "ClusterIP"}[i%2]
		since := time.Now()
		e.kube.Patch("default", "flip", `{"spec":{"type":"`+typ+`"}}`)
		e.within(t, since, time.Second, typ, bindable(p, 1))
		kept.assertReset(t)
		require.NoError(t, e.is(t, fmt.Sprintf("flip:%d/TCP", p), "", "")())
		since = time.Now()
		e.kube.Patch("default", "flip", `{"spec":{"type":"LoadBalancer"}}`)
		e.balance(t, "flip")
		e.within(t, since, time.Second, "LoadBalancer", reaches("tcp", p, "flip"))
		kept = keep(t, p)
	}
}

// A status that is left over from another type opens nothing, if the API server
// keeps it at all.
func testServiceFB104(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	e.create(t, "left", fmt.Sprintf("%d/TCP", p))
	e.balance(t, "left")
	e.within(t, time.Now(), time.Second, "forwarded", e.is(t, fmt.Sprintf("left:%d/TCP", p), "forwarded", ""))
	patch := `{"spec":{"type":"ClusterIP"},"status":{"loadBalancer":{"ingress":[{"ip":"` + nodeAddr + `"}]}}}`
	e.kube.Patch("default", "left", patch)
	_, err := e.api("PATCH", "/api/v1/namespaces/default/services/left/status", map[string]any{
		"status": map[string]any{"loadBalancer": map[string]any{"ingress": []any{map[string]any{"ip": nodeAddr}}}}})
	t.Logf("an ingress address for a ClusterIP: %v", err)
	e.within(t, time.Now(), time.Second, "closed", bindable(p, 1))
	e.passes(t)
	require.NoError(t, errors.Join(e.is(t, fmt.Sprintf("left:%d/TCP", p), "", "")(), portsFree(p, 1)))
}

// passes waits until the daemon has taken note of all that has happened before: a
// Service made last is there.
func (e *servicesEnv) passes(t *testing.T) {
	t.Helper()
	const last = "last-of-all"
	e.create(t, last, "9/SCTP")
	e.within(t, time.Now(), 2*time.Second, "the daemon is up to date", e.is(t, last+":9/SCTP", "skipped", "SCTP"))
	e.kube.Delete("default", last)
}

// One number for TCP and UDP is two ports.
func testServiceFB105(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	kept := e.forwarded(t, "dns", p)
	tcp, udp := fmt.Sprintf("%d/TCP", p), fmt.Sprintf("%d/UDP", p)
	closed := func(network string) func() error {
		return func() error {
			if err := reaches(network, p, "dns")(); err == nil {
				return fmt.Errorf("%s is open", network)
			}
			return nil
		}
	}
	step := func(ports []string, want ...func() error) {
		t.Helper()
		since := time.Now()
		e.edit(t, "dns", ports...)
		for _, f := range want {
			e.within(t, since, time.Second, fmt.Sprint(ports), f)
		}
	}
	step([]string{tcp, udp}, reaches("tcp", p, "dns"), reaches("udp", p, "dns"))
	kept.assertKept(t)
	step([]string{udp, tcp}, reaches("tcp", p, "dns"), reaches("udp", p, "dns")) // the names swapped
	kept.assertKept(t)
	step([]string{udp}, reaches("udp", p, "dns"), closed("tcp"))
	kept.assertReset(t)
	step([]string{tcp}, reaches("tcp", p, "dns"), closed("udp"))
	step([]string{tcp, udp}, reaches("tcp", p, "dns"), reaches("udp", p, "dns"))
}

// Another name of a port interrupts nothing.
func testServiceFB106(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	kept := e.forwarded(t, "rename", p)
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for err := error(nil); ; {
			select {
			case <-tick.C:
				if err == nil {
					err = echoes("tcp", onLoopback(p))
				}
			case <-stop:
				done <- err
				return
			}
		}
	}()
	for _, name := range []string{"web", "http", "web", "h2"} {
		e.kube.Patch("default", "rename", fmt.Sprintf(`{"spec":{"ports":[{"name":%q,"port":%d,"protocol":"TCP"}]}}`, name, p))
		e.passes(t)
	}
	close(stop)
	require.NoError(t, <-done)
	kept.assertKept(t)
}

// SCTP is skipped and not tried again; the ports beside it are forwarded.
func testServiceFB107(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	e.serve(t, "sig", p)
	e.create(t, "sig", fmt.Sprintf("%d/TCP", p), fmt.Sprintf("%d/SCTP", p), fmt.Sprintf("%d/SCTP", p+1))
	e.balance(t, "sig")
	e.within(t, time.Now(), time.Second, "TCP", reaches("tcp", p, "sig"))
	for _, port := range []string{fmt.Sprintf("sig:%d/SCTP", p), fmt.Sprintf("sig:%d/SCTP", p+1)} {
		require.NoError(t, e.is(t, port, "skipped", "protocol SCTP not supported")())
		assert.LessOrEqual(t, e.said(port, "skipped"), 1)
		assert.Zero(t, e.said(port, "failed"))
	}
	for _, s := range e.status(t).Ports {
		if s.Protocol == "SCTP" {
			assert.Empty(t, s.RetryAt, "a skipped port is not tried again")
		}
	}
	require.NoError(t, portsFree(p+1, 1))
}

// A Service nobody serves is told to the client at once.
func testServiceFB112(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	e.create(t, "empty", fmt.Sprintf("%d/TCP", p))
	e.balance(t, "empty")
	e.within(t, time.Now(), time.Second, "forwarded", e.is(t, fmt.Sprintf("empty:%d/TCP", p), "forwarded", ""))
	since := time.Now()
	c, err := net.Dial("tcp", onLoopback(p))
	if err == nil { // else the reset came before Dial had looked
		defer c.Close()
		require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
		_, err = io.Copy(io.Discard, c)
	}
	assert.True(t, isReset(err), "%v", err)
	t.Logf("reset after %v", time.Since(since))
	assert.Less(t, time.Since(since), margin*300*time.Millisecond)
	e.serve(t, "empty", p)
	require.NoError(t, reaches("tcp", p, "empty")())
}

// testServiceBurst makes, changes and deletes without a pause: the last word holds.
func testServiceBurst(t *testing.T, e *servicesEnv) {
	const n = 20
	p := e.ports(t, n)
	path := "/api/v1/namespaces/default/services"
	ingress := map[string]any{"status": map[string]any{"loadBalancer": map[string]any{"ingress": []any{map[string]any{"ip": nodeAddr}}}}}
	// Each ends with a port if its number is even.
	errs := each(n, 8, func(i int) error {
		name := fmt.Sprintf("burst%d", i)
		s := loadBalancer(t, name, fmt.Sprintf("%d/TCP", p+i))
		for round := range 6 {
			if _, err := e.api(http.MethodPost, path, s); err != nil {
				return err
			}
			if _, err := e.api(http.MethodPatch, path+"/"+name+"/status", ingress); err != nil {
				return err
			}
			if round == 5 && i%2 == 0 {
				return nil
			}
			if _, err := e.api(http.MethodDelete, path+"/"+name, nil); err != nil {
				return err
			}
		}
		return nil
	})
	since := time.Now()
	require.Empty(t, errs)
	for i := range n {
		name := fmt.Sprintf("burst%d", i)
		if i%2 == 0 {
			t.Cleanup(func() { e.kube.Delete("default", name) })
			e.serve(t, name, p+i)
			e.within(t, since, 2*time.Second, name, reaches("tcp", p+i, name))
			assert.Equal(t, 1, listeners(t, p+i))
		} else {
			e.within(t, since, 2*time.Second, name, bindable(p+i, 1))
		}
	}
}
