package daemon

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
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
