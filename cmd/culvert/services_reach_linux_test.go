package main_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
)

// What the cluster's load balancer reports decides where a Service is reached, and
// no name is resolved (C-42).
func testServiceFB109(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	e.serve(t, "node", p)
	serve(t, e.ns, "card", cardAddr, p)
	serve(t, e.behind, "foreign", foreignAddr, p)
	e.create(t, "in", fmt.Sprintf("%d/TCP", p))
	port := fmt.Sprintf("in:%d/TCP", p)

	proxy := corev1.LoadBalancerIPModeProxy
	ip := func(addr string) corev1.LoadBalancerIngress { return corev1.LoadBalancerIngress{IP: addr} }
	name := corev1.LoadBalancerIngress{Hostname: "no-such-host.invalid"}
	for _, c := range []struct {
		what    string
		ingress []corev1.LoadBalancerIngress
		leads   string // to that server
		state   string // or why it does not
		detail  string
	}{
		{"the node's address", []corev1.LoadBalancerIngress{ip(nodeAddr)}, "node", "forwarded", ""},
		{"none", nil, "", "pending", "no ingress address yet"},
		{"a host name", []corev1.LoadBalancerIngress{name}, "node", "forwarded", ""},
		{"address and name", []corev1.LoadBalancerIngress{{IP: cardAddr, Hostname: name.Hostname}}, "card", "forwarded", ""},
		{"another address", []corev1.LoadBalancerIngress{ip(foreignAddr)}, "foreign", "forwarded", ""},
		{"two, the node's last", []corev1.LoadBalancerIngress{ip(foreignAddr), ip(nodeAddr)}, "node", "forwarded", ""},
		{"two others", []corev1.LoadBalancerIngress{ip(foreignAddr), ip(cardAddr)}, "card", "forwarded", ""},
		{"another's, Proxy", []corev1.LoadBalancerIngress{{IP: foreignAddr, IPMode: &proxy}}, "", "skipped", "ipMode Proxy"},
		{"the node's, Proxy", []corev1.LoadBalancerIngress{{IP: nodeAddr, IPMode: &proxy}}, "node", "forwarded", ""},
		{"IPv6", []corev1.LoadBalancerIngress{ip("fd00::1")}, "", "skipped", "fd00::1"},
		{"IPv6 beside the node's", []corev1.LoadBalancerIngress{ip("fd00::1"), ip(nodeAddr)}, "node", "forwarded", ""},
		{"the guest's loopback", []corev1.LoadBalancerIngress{ip("127.0.0.1")}, "", "skipped", "loopback"},
		{"culvert's own", []corev1.LoadBalancerIngress{ip(gateway)}, "", "skipped", "culvert's own"},
		{"a thousand", slices.Repeat([]corev1.LoadBalancerIngress{ip(nodeAddr)}, 1000), "node", "forwarded", ""},
	} {
		since := time.Now()
		e.kube.SetIngress("default", "in", c.ingress...)
		e.within(t, since, time.Second, c.what, e.is(t, port, c.state, c.detail))
		if c.leads != "" {
			e.within(t, since, time.Second, c.what, reaches("tcp", p, c.leads))
		} else {
			require.NoError(t, portsFree(p, 1), c.what)
		}
	}
}

// testServiceReach is the way to another address that the load balancer reports,
// through the node as router, over TCP and UDP.
func testServiceReach(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	serve(t, e.behind, "behind", foreignAddr, p)
	e.create(t, "metal", fmt.Sprintf("%d/TCP", p), fmt.Sprintf("%d/UDP", p))
	since := time.Now()
	e.kube.SetIngress("default", "metal", corev1.LoadBalancerIngress{IP: foreignAddr})
	e.within(t, since, time.Second, "TCP", reaches("tcp", p, "behind"))
	e.within(t, since, time.Second, "UDP", reaches("udp", p, "behind"))
	for _, r := range e.d.ls(t) {
		if r.Owner.ID == fmt.Sprintf("default/metal:%d/TCP", p) {
			assert.Equal(t, fmt.Sprintf("%s:%d", foreignAddr, p), r.Guest)
		}
	}
}

// With reach: nodeport a Service without a load balancer is reached at its
// NodePort, and new flows follow when that changes.
func testServiceFB110(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	s := e.create(t, "np", fmt.Sprintf("%d/TCP", p), fmt.Sprintf("%d/UDP", p))
	port := fmt.Sprintf("np:%d/TCP", p)
	e.within(t, time.Now(), time.Second, "auto", e.is(t, port, "pending", "no ingress address yet"))

	// The API server's choice, one for both protocols, and two others.
	numbers := []int32{s.Spec.Ports[0].NodePort}
	require.Equal(t, numbers[0], s.Spec.Ports[1].NodePort)
	for n := int32(30000); len(numbers) < 3; n++ {
		if n != numbers[0] {
			numbers = append(numbers, n)
		}
	}
	for i, n := range numbers {
		e.serve(t, fmt.Sprint("at", i), int(n))
	}
	since := time.Now()
	e.reconfigure(t, "nodeport")
	defer func() {
		e.reconfigure(t, "auto")
		e.within(t, time.Now(), 5*time.Second, "auto again", e.is(t, port, "pending", "no ingress address yet"))
	}()
	e.within(t, since, 5*time.Second, "nodeport", reaches("tcp", p, "at0"))
	e.within(t, since, 5*time.Second, "nodeport", reaches("udp", p, "at0"))

	for i, n := range numbers[1:] {
		name := fmt.Sprint("at", i+1)
		patch, err := json.Marshal(map[string]any{"spec": map[string]any{"ports": []any{
			map[string]any{"name": "p0", "port": p, "protocol": "TCP", "nodePort": n},
			map[string]any{"name": "p1", "port": p, "protocol": "UDP", "nodePort": n},
		}}})
		require.NoError(t, err)
		since := time.Now()
		e.kube.Patch("default", "np", string(patch))
		e.within(t, since, time.Second, "TCP re-pointed", reaches("tcp", p, name))
		e.within(t, since, time.Second, "UDP re-pointed", reaches("udp", p, name))
		for range 20 { // and not sometimes to the old one
			require.NoError(t, errors.Join(reaches("tcp", p, name)(), reaches("udp", p, name)()))
		}
	}
}

// Who is outside loadBalancerSourceRanges is reset.
func testServiceFB113(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	e.forwarded(t, "ranged", p)
	from := func(client string) error {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(client)}, Timeout: 5 * time.Second}
		c, err := d.Dial("tcp", onLoopback(p))
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		if _, err := io.WriteString(c, "who\n"); err != nil {
			return err
		}
		_, err = io.ReadFull(c, make([]byte, len("ranged\n")))
		return err
	}
	for _, want := range []struct {
		ranges   string
		one, two bool // who passes, of 127.0.0.1 and 127.0.0.2
	}{
		{`["10.9.0.0/16"]`, false, false},
		{`["10.9.0.0/16","127.0.0.2/32"]`, false, true},
		{`["127.0.0.1/32"]`, true, false},
		{`["127.0.0.0/8"]`, true, true},
		{`["10.9.0.0/16"]`, false, false},
		{`["0.0.0.0/0"]`, true, true},
		{`["127.0.0.2/32"]`, false, true},
		{`null`, true, true},
	} {
		ranges := want.ranges
		since := time.Now()
		e.kube.Patch("default", "ranged", `{"spec":{"loadBalancerSourceRanges":`+ranges+`}}`)
		e.within(t, since, time.Second, ranges, func() error {
			for client, passes := range map[string]bool{"127.0.0.1": want.one, "127.0.0.2": want.two} {
				err := from(client)
				if passes != (err == nil) || err != nil && !isReset(err) { // refused: between two sockets
					return fmt.Errorf("from %s: %w", client, err)
				}
			}
			return nil
		})
		for client, passes := range map[string]bool{"127.0.0.1": want.one, "127.0.0.2": want.two} {
			if err := from(client); !passes {
				assert.True(t, isReset(err), "%s from %s: %v", ranges, client, err)
			} else {
				assert.NoError(t, err)
			}
		}
	}
}
