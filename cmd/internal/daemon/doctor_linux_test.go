package daemon

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/guest/guesttest"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What is broken at real guests is the command's tests' to see. Here is what needs
// no real one.

// doctor asks and returns "step: state" of each step, and the details of those that
// are broken.
func (b *bed) doctor(t *testing.T, vm, of string) (states, broken []string) {
	t.Helper()
	steps, err := b.client.Doctor(t.Context(), vm, of)
	require.NoError(t, err)
	for _, s := range steps {
		states = append(states, s.Step+": "+s.State)
		if s.State == stepBroken {
			broken = append(broken, s.Step+": "+s.Detail)
		}
	}
	return states, broken
}

func hostPortOf(t *testing.T, r api.Listener) string {
	t.Helper()
	ap, err := netip.ParseAddrPort(r.Bound[0])
	require.NoError(t, err)
	return fmt.Sprint(ap.Port())
}

func (b *bed) rows(t *testing.T) []api.Listener {
	t.Helper()
	rows, err := b.client.Listeners(t.Context(), "")
	require.NoError(t, err)
	return rows
}

// TestDoctorOverview shows what is well only in few words, and one VM at a time if
// asked.
func TestDoctorOverview(t *testing.T) {
	// Of two VMs with a memory spec either might take the guest.
	b := start(t, fmt.Sprintf(`vms: [{name: a, attach: memory, publish: ["0:80", "0:81"]}, {name: b, attach: "unixgram:%s/b", node: 10.0.3.2, gateway: 10.0.3.1/24, publish: ["0:80"]}]`, t.TempDir()))
	b.attach(t, "a")
	states, broken := b.doctor(t, "a", "")
	assert.Equal(t, []string{"vm: ok", "link: ok", "node: ok", "guest port: ok", "guest port: broken"}, states)
	assert.Equal(t, []string{"guest port: 10.0.2.2:81 refuses: nobody listens there"}, broken)
	states, broken = b.doctor(t, "b", "")
	assert.Equal(t, []string{"vm: broken", "link: skipped", "node: skipped", "host socket: skipped", "listener: skipped", "guest port: skipped"}, states)
	assert.Equal(t, []string{"vm: waiting: nothing has attached yet"}, broken)
	states, _ = b.doctor(t, "", "")
	assert.Len(t, states, 5+6)
	for _, r := range b.rows(t) {
		if r.Guest == "10.0.2.2:80" {
			states, _ = b.doctor(t, "", hostPortOf(t, r))
			assert.Equal(t, []string{"host socket: ok", "listener: ok", "vm: ok", "link: ok", "node: ok", "guest port: ok"}, states)
			_, broken = b.doctor(t, "b", hostPortOf(t, r))
			assert.Len(t, broken, 2, "b has no such row, and is not there: %v", broken)
		}
	}
	_, err := b.client.Doctor(t.Context(), "c", "")
	assert.ErrorContains(t, err, `no VM named "c"`)
}

// TestDoctorBounded: whatever is published, few connections are made, and in time.
func TestDoctorBounded(t *testing.T) {
	b := start(t, `vms: [{name: a, attach: memory}]`)
	b.attach(t, "a")
	var publishes []string
	for i := range 2 * maxPortsTried { // addresses behind the node, which does not route
		publishes = append(publishes, fmt.Sprintf("0:10.0.2.%d:80", i+10))
	}
	_, err := b.client.Publish(t.Context(), api.PublishRequest{Publish: publishes})
	require.NoError(t, err)
	began := time.Now()
	steps, err := b.client.Doctor(t.Context(), "", "")
	require.NoError(t, err)
	assert.Less(t, time.Since(began), 5*doctorWithin)
	n := make(map[string]int)
	for _, s := range steps {
		if s.Step == atGuestPort {
			n[s.State]++
		}
	}
	assert.Equal(t, map[string]int{stepBroken: maxPortsTried, stepSkipped: maxPortsTried}, n)
	for _, v := range b.vms(t) {
		assert.Zero(t, v.Flows, "nothing of it is left")
	}
}

func (b *bed) vms(t *testing.T) []api.VM {
	t.Helper()
	vms, err := b.client.VMs(t.Context())
	require.NoError(t, err)
	return vms
}

// TestDoctorConflict is a row that another row of ours keeps out, and a range, of
// which the port that was asked for is tried.
func TestDoctorConflict(t *testing.T) {
	b := start(t, `vms: [{name: a, attach: memory, publish: ["0:80"]}]`)
	b.attach(t, "a")
	port := hostPortOf(t, b.rows(t)[0])
	_, err := b.client.Publish(t.Context(), api.PublishRequest{Publish: []string{port + ":81"}})
	require.NoError(t, err)
	_, broken := b.doctor(t, "", port+":81")
	require.Len(t, broken, 1)
	assert.True(t, strings.HasPrefix(broken[0], "listener: failed: "), broken[0])

	for first := 20000; ; first += 10 {
		rows, err := b.client.Publish(t.Context(), api.PublishRequest{Publish: []string{fmt.Sprintf("%d-%d:79-81", first, first+2)}})
		require.NoError(t, err)
		if rows[0].State != "forwarded" {
			require.Less(t, first, 30000)
			continue
		}
		_, broken = b.doctor(t, "", fmt.Sprint(first+1))
		assert.Empty(t, broken)
		_, broken = b.doctor(t, "", fmt.Sprint(first+2))
		assert.Equal(t, []string{"guest port: 10.0.2.2:81 refuses: nobody listens there"}, broken)
		return
	}
}

// TestDoctorFollowed is an engine and a cluster that stop answering.
func TestDoctorFollowed(t *testing.T) {
	b, engine, cluster := startFollowing(t)
	b.attach(t, "a")
	require.Eventually(t, func() bool { _, broken := b.doctor(t, "", ""); return broken == nil }, patience, 50*time.Millisecond)
	states, _ := b.doctor(t, "", "1") // nobody has it
	assert.Equal(t, []string{"host socket: skipped", "listener: broken", "vm: ok", "link: ok", "node: ok", "engine: ok", "cluster: ok"}, states)

	cluster.fail()
	engine.Close()
	require.Eventually(t, func() bool { _, broken := b.doctor(t, "", ""); return len(broken) == 2 }, patience, 50*time.Millisecond)
	_, broken := b.doctor(t, "", "")
	assert.True(t, strings.HasPrefix(broken[0], "engine: "), broken[0])
	assert.True(t, strings.HasPrefix(broken[1], "cluster: the API server does not answer: "), broken[1])
	steps, err := b.client.Doctor(t.Context(), "", "nobody")
	require.NoError(t, err)
	assert.Contains(t, steps[0].Advice, "what runs in a is not known now")

	require.NoError(t, b.wantKubernetes(t, "a", false))
	_, broken = b.doctor(t, "", "")
	assert.Equal(t, "cluster: its ports are not wanted since `culvert kubernetes stop`", broken[1])
	_, broken = b.doctor(t, "", hostPortOf(t, b.rows(t)[0]))
	assert.Empty(t, broken, "neither has to do with a port of the config's")
}

// TestDoctorPendingService: a Service that waits for its cluster's load balancer is
// named, with its cluster and in its own row.
func TestDoctorPendingService(t *testing.T) {
	cluster, kubeconfig := newCluster(t)
	cluster.items = `{"metadata":{"namespace":"shop","name":"web","uid":"u1","resourceVersion":"3"},
		"spec":{"type":"LoadBalancer","clusterIP":"10.43.0.9","clusterIPs":["10.43.0.9"],"ipFamilies":["IPv4"],
		"ports":[{"name":"http","port":18080,"targetPort":80,"nodePort":30080,"protocol":"TCP"}]},"status":{"loadBalancer":{}}}`
	b := start(t, fmt.Sprintf("vms: [{name: a, attach: memory, kubernetes: {kubeconfig: %s, via: host}}]", kubeconfig))
	b.attach(t, "a")
	const waits = "Service shop/web:18080/TCP is pending: waiting for the cluster's load balancer: no ingress address yet"
	for _, of := range []string{"", "shop/web", "18080"} {
		var broken []string
		asked := func() bool { // the cluster, which says so until then
			_, broken = b.doctor(t, "", of)
			return len(broken) > 0 && !strings.HasPrefix(broken[0], "cluster: ")
		}
		require.Eventually(t, asked, patience, 50*time.Millisecond, of)
		assert.Equal(t, []string{"service: " + waits}, broken, of)
	}
	steps, err := b.client.Doctor(t.Context(), "", "")
	require.NoError(t, err)
	i := slices.IndexFunc(steps, func(s api.Step) bool { return s.Step == atCluster })
	require.GreaterOrEqual(t, i, 0)
	assert.Equal(t, stepOK, steps[i].State, "it answers")
	assert.Contains(t, steps[i].Detail, "; pending: Service shop/web:18080/TCP")
}

// TestDoctorDeparted: who had a host port is known for a while, until another has it.
func TestDoctorDeparted(t *testing.T) {
	b, engine, _ := startFollowing(t)
	b.attach(t, "a")
	port := freePort(t)
	c := guesttest.Published(1, port, 80)
	c.Name = "web"
	engine.Start(c)
	of := fmt.Sprint(port)
	require.Eventually(t, func() bool { states, _ := b.doctor(t, "", of); return states[1] == "listener: ok" }, patience, 50*time.Millisecond)
	engine.Stop(c.ID)
	var broken []string
	require.Eventually(t, func() bool {
		_, broken = b.doctor(t, "", of)
		return len(broken) == 1 && strings.HasPrefix(broken[0], "listener: ")
	},
		patience, 50*time.Millisecond)
	assert.Regexp(t, fmt.Sprintf(`^listener: nobody asks for host port %s; container web did in VM a, until [0-9.]+m?s ago$`, of), broken[0])
	steps, err := b.client.Doctor(t.Context(), "", of)
	require.NoError(t, err)
	assert.Contains(t, steps[1].Advice, "docker start web, or `culvert publish")
	_, broken = b.doctor(t, "", of+"/udp")
	assert.Equal(t, []string{"listener: nobody asks for host port " + of + "/udp"}, broken, "it was TCP's")

	_, err = b.client.Publish(t.Context(), api.PublishRequest{Publish: []string{of + ":80"}})
	require.NoError(t, err)
	_, broken = b.doctor(t, "", of)
	assert.Empty(t, broken)
}

// TestDepartures are few, the last of a port counts, and what stays has not left.
func TestDepartures(t *testing.T) {
	want := func(id, spec string) reconcile.Want {
		s, err := parsePublish(spec, "a")
		require.NoError(t, err)
		return reconcile.Want{
			Owner: listener.Owner{Kind: listener.KindDocker, ID: id}, Specs: []listener.Spec{s},
			Names: []reconcile.Name{{Name: id + ".shop"}, {Name: id}},
		}
	}
	var d departures
	who := func(text string) string {
		p, ok := parseHostPort(text)
		require.True(t, ok, text)
		one, _ := d.who(p)
		return one.name
	}
	web, db := want("web", "8080:80"), want("db", "127.0.0.2:6000-6009:6000-6009/udp")
	d.compare(nil, []reconcile.Want{web, db})
	d.compare([]reconcile.Want{web, db}, []reconcile.Want{db})
	assert.Equal(t, "web", who("8080"))
	assert.Equal(t, "web", who("[::1]:8080/tcp"))
	assert.Empty(t, who("8080/udp"))
	assert.Empty(t, who("6003"), "it is there")
	d.compare([]reconcile.Want{db}, []reconcile.Want{want("db", "127.0.0.2:6000:6000/udp")})
	assert.Equal(t, "db", who("6003"), "it publishes another port now")
	assert.Empty(t, who("127.0.0.1:6003"))
	assert.Empty(t, who("6010"))
	assert.Empty(t, who("5999"))
	d.compare([]reconcile.Want{want("other", "8080:80")}, nil)
	assert.Equal(t, "other", who("8080"), "the last one")

	d.last[2].at = d.last[2].at.Add(-departedFor)
	assert.Equal(t, "web", who("8080"), "that was long ago")
	var many []reconcile.Want
	for i := range maxDeparted {
		many = append(many, want(fmt.Sprint("c", i), fmt.Sprintf("%d:80", 10_000+i)))
	}
	d.compare(many, nil)
	assert.Len(t, d.last, maxDeparted)
	assert.Empty(t, who("8080"))
	assert.Equal(t, "c7", who("10007"))
}

func TestParseHostPort(t *testing.T) {
	for text, want := range map[string]hostPort{
		"8080": {port: 8080}, ":8080": {port: 8080}, "8080/udp": {port: 8080, proto: "udp"},
		"127.0.0.1:80/tcp": {addr: netip.MustParseAddr("127.0.0.1"), port: 80, proto: "tcp"},
		"[::1]:80":         {addr: netip.IPv6Loopback(), port: 80},
	} {
		p, ok := parseHostPort(text)
		assert.True(t, ok, text)
		assert.Equal(t, want, p, text)
	}
	for _, text := range []string{"", "0", "65536", "-1", "web", "8080:80", "8080/sctp", "127.0.0.1:0", "::1", "/tcp", "80/"} {
		_, ok := parseHostPort(text)
		assert.False(t, ok, text)
	}
}

// FuzzDoctorTexts: what a row says and what a person asks for are read or refused.
func FuzzDoctorTexts(f *testing.F) {
	f.Add("127.0.0.1:6000-6009", "127.0.0.1:6003/tcp")
	f.Add("[::1]:80", ":80")
	f.Add("fe80::1%a-b:1-2", "[::ffff:1.2.3.4]:5/udp")
	f.Fuzz(func(t *testing.T, row, asked string) {
		_, first, last, ok := parsePorts(row)
		if ok && last < first {
			t.Fatalf("%q: %d-%d", row, first, last)
		}
		p, ok := parseHostPort(asked)
		if ok && p.port == 0 {
			t.Fatalf("%q is read as no port", asked)
		}
		if !ok {
			return
		}
		if has, offset := p.of(api.Listener{Host: row, Protocol: "tcp"}); has && first+offset != p.port {
			t.Fatalf("%q in %q is %d", asked, row, offset)
		}
	})
}
