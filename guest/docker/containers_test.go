package docker_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/guest/guesttest"
)

func TestContainersSayWhatTheEngineDoes(t *testing.T) {
	e := guesttest.NewUnixEngine(t)
	started := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	e.Set(guesttest.FakeContainer{
		ID: guesttest.FakeID(7), Name: "web", Links: []string{"front/web"}, Started: started.Add(time.Second),
		Labels: map[string]string{"com.docker.compose.project": "shop", "com.docker.compose.service": "web", "other": "x"},
		Networks: []guesttest.FakeNetwork{
			{Name: "zeta", EndpointID: "e1", IPv4: "172.18.0.2"},
			{Name: "alpha", EndpointID: "e2", IPv4: "10.1.1.2", IPv6: "fd00::2"},
		},
		Ports: map[string][]guesttest.FakeBinding{
			"80/tcp":  {{HostIP: "::", HostPort: "8080"}, {HostIP: "0.0.0.0", HostPort: "8080"}, {HostIP: "0.0.0.0", HostPort: "8080"}},
			"53/UDP":  {{HostIP: "127.0.0.1", HostPort: "5353"}},
			"9":       {{HostPort: "9000"}},
			"443/tcp": nil,
		},
	}, guesttest.FakeContainer{ID: guesttest.FakeID(3), Name: "older", Started: started, State: "paused", Ports: map[string][]guesttest.FakeBinding{}})
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	assert.Equal(t, []docker.Container{
		{ID: guesttest.FakeID(3), Name: "older", Started: started},
		{
			ID: guesttest.FakeID(7), Name: "web", Started: started.Add(time.Second), Project: "shop", Service: "web",
			Addrs: []netip.Addr{netip.MustParseAddr("10.1.1.2"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("172.18.0.2")},
			Bindings: []docker.Binding{
				{Proto: "tcp", Port: 9, HostPort: 9000},
				{Proto: "tcp", Port: 80, HostIP: netip.MustParseAddr("0.0.0.0"), HostPort: 8080},
				{Proto: "tcp", Port: 80, HostIP: netip.MustParseAddr("::"), HostPort: 8080},
				{Proto: "udp", Port: 53, HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 5353},
			},
			Unusable: []docker.Unusable{{Proto: "tcp", Port: 443, Reason: "no host port"}},
		},
	}, mustList(t, c))
}

// C-34: the host configuration counts when the network settings say nothing, not
// when they say that there is none (FB-085).
func TestHostConfigurationIsSecondChoice(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	one := guesttest.Published(0, 8080, 80)
	for _, tt := range []struct {
		mode  string
		ports map[string][]guesttest.FakeBinding
		want  int
	}{
		{"bridge", nil, 1},
		{"bridge", map[string][]guesttest.FakeBinding{}, 0},
		{"host", nil, 0},
		{"none", nil, 0},
		{"container:" + guesttest.FakeID(1), nil, 0},
	} {
		one.NetworkMode, one.Ports = tt.mode, tt.ports
		one.Networks[0].EndpointID += "f" // a new look
		e.Set(one)
		assert.Len(t, mustList(t, c)[0].Bindings, tt.want, "%s %v", tt.mode, tt.ports)
	}
}

// FB-092: an exited container holds its old mapping beside the one that runs.
func TestOnlyRunningContainersCount(t *testing.T) {
	e := guesttest.NewEngine(t)
	e.ListAll(true)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	runs, was := guesttest.Published(1, 8080, 80), guesttest.Published(2, 8080, 80)
	for _, state := range []string{"exited", "created", "dead", "restarting", "removing", "nonsense"} {
		was.State = state
		for _, order := range [][]guesttest.FakeContainer{{runs, was}, {was, runs}} {
			e.Set(order...)
			all := mustList(t, c)
			require.Len(t, all, 1, state)
			assert.Equal(t, runs.ID, all[0].ID)
		}
	}
}

// FB-088, FB-089: the same ID, another port, and no event that tells.
func TestEachListingSaysThePortsOfNow(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for i := range uint16(20) {
		e.Set(guesttest.Published(0, 32768+i, 80))
		all := mustList(t, c)
		require.Len(t, all, 1)
		require.Len(t, all[0].Bindings, 2)
		assert.Equal(t, 32768+i, all[0].Bindings[0].HostPort)
	}
}

// A container that was started again has new endpoints, and a later start.
func TestOnlyWhatLooksDifferentIsInspected(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	var all []guesttest.FakeContainer
	for n := range 200 {
		all = append(all, guesttest.Published(n, uint16(10000+n), 80))
	}
	e.Set(all...)
	first := mustList(t, c)
	require.Len(t, first, 200)
	assert.Equal(t, 200, e.Asked("inspect"))
	assert.Equal(t, first, mustList(t, c))
	assert.Equal(t, 200, e.Asked("inspect"), "nothing has changed")

	all[17].Started = all[17].Started.Add(time.Hour)
	all[17].Networks[0].EndpointID = guesttest.FakeID(1 << 30)
	e.Set(all...)
	second := mustList(t, c)
	assert.Equal(t, 201, e.Asked("inspect"))
	assert.Equal(t, all[17].ID, second[199].ID, "it is the newest now")

	w := watch(t, c)
	receive(t, w.subscribed, "the stream")
	e.Emit("container", "restart", all[3].ID)
	assert.Equal(t, docker.Event{ID: all[3].ID, Action: "restart"}, receive(t, w.events, "the event"))
	mustList(t, c)
	assert.Equal(t, 202, e.Asked("inspect"), "an event is reason enough")

	require.NoError(t, c.Close())
	mustList(t, c)
	assert.Equal(t, 402, e.Asked("inspect"), "another VM may be there")
}

// A container whose name cannot be keeps its ports.
func TestNamesThatAreNone(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for i, name := range []string{"", "a\nb", "\x1b[2J", "-a", ".", "a b", "a/b", "ä", "a\u202eb", "a*", strings.Repeat("a", 129)} {
		one := guesttest.Published(i, 8080, 80)
		one.Name = name
		one.Labels = map[string]string{"com.docker.compose.project": name + "\x00", "com.docker.compose.service": name + "\n"}
		e.Set(one)
		all := mustList(t, c)
		require.Len(t, all, 1)
		assert.Empty(t, all[0].Name+all[0].Project+all[0].Service, "%q", name)
		assert.Len(t, all[0].Bindings, 2, "%q", name)
	}
	one := guesttest.Published(0, 8080, 80)
	one.Name = strings.Repeat("a", 128)
	e.Set(one)
	assert.Equal(t, one.Name, mustList(t, c)[0].Name)
}

// Entries that net/netip or the API's types do not take are the entry's fault
// only (FB-094).
func TestEntriesThatLeadNowhere(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	one := guesttest.Published(0, 8080, 80)
	one.Ports = map[string][]guesttest.FakeBinding{
		"1/tcp": nil, "2/tcp": {}, "3/tcp": {{HostPort: ""}}, "4/tcp": {{HostPort: "0"}}, "5/tcp": {{HostPort: "abc\x1b"}},
		"6/tcp": {{HostPort: "70000"}}, "7/tcp": {{HostIP: "", HostPort: "7007"}}, "8/tcp": {{HostIP: "fe80::1%eth0", HostPort: "8008"}},
		"9/tcp": {{HostIP: "here", HostPort: "9009"}, {HostIP: "::ffff:127.0.0.1", HostPort: "9009"}},
		"0/tcp": {{HostPort: "1"}}, "x/udp": {{HostPort: "1"}}, "70000/udp": {{HostPort: "1"}}, "10/dccp": {{HostPort: "1"}},
		"11/tcp": {{HostPort: "8000-8010"}}, "12-14/udp": {{HostPort: "12000-12002"}}, "15-16/udp": {{HostPort: "1-3"}}, "18-17/udp": {{HostPort: "1-2"}},
		"20/SCTP": {{HostPort: "20"}}, "": {{HostPort: "1"}}, "/": {{HostPort: "1"}}, "+1/tcp": {{HostPort: "1"}}, "21/tcp": {{HostPort: "-1"}},
	}
	e.Set(one)
	all := mustList(t, c)
	require.Len(t, all, 1)
	assert.Equal(t, []docker.Binding{
		{Proto: "sctp", Port: 20, HostPort: 20},
		{Proto: "tcp", Port: 7, HostPort: 7007},
		{Proto: "tcp", Port: 9, HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 9009},
		{Proto: "udp", Port: 12, HostPort: 12000},
		{Proto: "udp", Port: 13, HostPort: 12001},
		{Proto: "udp", Port: 14, HostPort: 12002},
	}, all[0].Bindings)
	assert.Equal(t, []docker.Unusable{
		{Reason: `"" is no port`}, {Reason: `"+1/tcp" is no port`}, {Reason: `"/" is no port`}, {Reason: `"0/tcp" is no port`},
		{Reason: `"18-17/udp" is no port`}, {Reason: `"70000/udp" is no port`}, {Reason: `"x/udp" is no port`},
		{Port: 10, Reason: `"dccp" is no protocol`},
		{Proto: "tcp", Port: 1, Reason: "no host port"}, {Proto: "tcp", Port: 2, Reason: "no host port"},
		{Proto: "tcp", Port: 3, Reason: "no host port"}, {Proto: "tcp", Port: 4, Reason: "no host port"},
		{Proto: "tcp", Port: 5, Reason: `host port "abc\x1b" is none`}, {Proto: "tcp", Port: 6, Reason: `host port "70000" is none`},
		{Proto: "tcp", Port: 8, Reason: "host address fe80::1%eth0 belongs to one of the guest's links"},
		{Proto: "tcp", Port: 9, Reason: `host address "here" is none`},
		{Proto: "tcp", Port: 11, Reason: "host port 8000-8010 is for the engine to choose from"},
		{Proto: "tcp", Port: 21, Reason: `host port "-1" is none`},
		{Proto: "udp", Port: 15, Reason: "host ports 1-3 are not as many as 15-16"},
	}, all[0].Unusable)
}

// First: each container is inspected. Quiet: nothing has changed.
func BenchmarkContainers(b *testing.B) {
	e := guesttest.NewEngine(b)
	for n := range 1000 {
		e.Put(guesttest.Published(n, uint16(10000+n), 80))
	}
	c := mustClient(b, e.Endpoint(), docker.TLSFiles{})
	b.Run("first", func(b *testing.B) {
		for b.Loop() {
			require.NoError(b, c.Close())
			require.Len(b, mustList(b, c), 1000)
		}
	})
	b.Run("quiet", func(b *testing.B) {
		for b.Loop() {
			require.Len(b, mustList(b, c), 1000)
		}
	})
}

// A range whose inspection is too long is taken from the listing.
func TestLongRange(t *testing.T) {
	e := guesttest.NewEngine(t)
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	one := guesttest.Published(0, 8080, 80)
	for port := range 10_000 {
		n := fmt.Sprint(20_000 + port)
		one.Ports[n+"/udp"] = []guesttest.FakeBinding{{HostIP: "0.0.0.0", HostPort: n}, {HostIP: "::", HostPort: n}}
	}
	e.Set(one)
	all := mustList(t, c)
	require.Len(t, all, 1)
	assert.Len(t, all[0].Bindings, 20_002)
}
