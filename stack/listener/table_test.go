package listener

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTableFirstOwnerWinsAndTheNextTakesOver(t *testing.T) {
	tab := NewTable(Policy{})
	a, b, c := Owner{Kind: KindDocker, ID: "a"}, Owner{Kind: KindKubernetes, ID: "ns/b:http/TCP"}, Owner{Kind: KindCLI, ID: "8080:82/tcp"}
	sa, sb, sc := mustSpec(t, "8080:80"), mustSpec(t, "127.0.0.1:8080:81"), mustSpec(t, "8080:82")

	assert.Empty(t, tab.Claim(a, []Spec{sa}))
	assert.NoError(t, tab.Conflict(a, sa))
	assert.Empty(t, tab.Claim(b, []Spec{sb}))
	err := tab.Conflict(b, sb)
	require.ErrorIs(t, err, ErrConflict)
	assert.EqualError(t, err, "host port 127.0.0.1:8080/tcp belongs to docker a (8080:80/tcp)")
	assert.Empty(t, tab.Claim(c, []Spec{sc}))

	// b asked before c.
	assert.Equal(t, []Claim{{b, sb}}, tab.Claim(a, nil))
	assert.NoError(t, tab.Conflict(b, sb))
	assert.EqualError(t, tab.Conflict(c, sc), "host port 127.0.0.1:8080/tcp belongs to kubernetes ns/b:http/TCP (127.0.0.1:8080:81/tcp)")

	// FB-101: a comes back and waits: no theft.
	assert.Empty(t, tab.Claim(a, []Spec{sa}))
	assert.ErrorIs(t, tab.Conflict(a, sa), ErrConflict)
	assert.Equal(t, []Claim{{c, sc}}, tab.Claim(b, nil))
	assert.EqualError(t, tab.Conflict(a, sa), "host port 127.0.0.1:8080/tcp belongs to cli 8080:82/tcp")

	// One that leaves the line is nobody's concern.
	assert.Empty(t, tab.Claim(a, nil))
	assert.Empty(t, tab.Claim(c, nil))
	assert.Empty(t, tab.held)
	assert.Empty(t, tab.owners)
}

// FB-073: an owner never conflicts with itself by saying the same again.
func TestFB073Restating(t *testing.T) {
	tab := NewTable(Policy{})
	o := Owner{Kind: KindKubernetes, ID: "ns/a:http/TCP"}
	specs := []Spec{mustSpec(t, "80:80"), mustSpec(t, "30080:80"), mustSpec(t, "6000-6009:1-10")}
	for range 20 {
		assert.Empty(t, tab.Claim(o, append(specs, specs...)))
		for _, s := range specs {
			assert.NoError(t, tab.Conflict(o, s))
		}
		slices.Reverse(specs)
	}
}

func TestTableOverlapWithinOneOwner(t *testing.T) {
	tab := NewTable(Policy{})
	o := Owner{Kind: KindConfig, ID: "x"}
	first, second := mustSpec(t, "80-90:80-90"), mustSpec(t, "85:8085")
	tab.Claim(o, []Spec{first, second})
	assert.NoError(t, tab.Conflict(o, first))
	assert.EqualError(t, tab.Conflict(o, second), "host port 127.0.0.1:85/tcp belongs to config x (80-90:80-90/tcp)")
	assert.Equal(t, []Claim{{o, second}}, tab.Claim(o, []Spec{second}))
}

// A claim that only leads elsewhere keeps its ports, or its place in line
// (C-33, C-45).
func TestTableNewTargetKeepsPorts(t *testing.T) {
	tab := NewTable(Policy{})
	a, b, c := Owner{Kind: KindDocker, ID: "a"}, Owner{Kind: KindDocker, ID: "b"}, Owner{Kind: KindDocker, ID: "c"}
	tab.Claim(a, []Spec{mustSpec(t, "80:1")})
	tab.Claim(b, []Spec{mustSpec(t, "80:2")})
	tab.Claim(c, []Spec{mustSpec(t, "80:3")})

	assert.Empty(t, tab.Claim(a, []Spec{mustSpec(t, "80:11")}))
	assert.NoError(t, tab.Conflict(a, mustSpec(t, "80:11")))
	assert.Empty(t, tab.Claim(b, []Spec{mustSpec(t, "80:22")}))
	assert.Equal(t, []Claim{{b, mustSpec(t, "80:22")}}, tab.Claim(a, []Spec{mustSpec(t, "81:1")}))
}

func TestTableOverlaps(t *testing.T) {
	for _, tt := range []struct {
		id, a, b string
		at       string // where they meet; "" when they do not
	}{
		{"same", "127.0.0.1:80:1", "127.0.0.1:80:2", "127.0.0.1:80"},
		{"FB-061 family", "127.0.0.1:80:1", "[::1]:80:2", ""},
		{"FB-105 protocol", "80:1/tcp", "80:1/udp", ""},
		{"address", "127.0.0.1:80:1", "127.0.0.2:80:2", ""},
		{"policy and its address", "80:1", "[::1]:80:2", "[::1]:80"},
		{"policy and another", "80:1", "127.0.0.2:80:2", ""},
		{"FB-076 ranges", "80-90:1-11", "90-99:1-10", "127.0.0.1:90"},
		{"ranges side by side", "80-89:1-10", "90-99:1-10", ""},
		{"range around one", "85:1", "80-90:1-11", "127.0.0.1:85"},
		{"kernel picks", "0:1", "0:2", ""},
	} {
		t.Run(tt.id, func(t *testing.T) { checkMeet(t, Policy{}, tt.a, tt.b, tt.at) })
	}
	// FB-064: a wildcard and an address of its family are one port.
	for _, tt := range []struct{ id, a, b, at string }{
		{"wildcard after specific", "127.0.0.1:80:1/udp", "80:2/udp", "127.0.0.1:80"},
		{"specific after wildcard", "80:2/udp", "127.0.0.1:80:1/udp", "0.0.0.0:80"},
		{"v6 specific", "80:2", "[fd00::1]:80:1", "[::]:80"},
		{"v6 specific first", "[fd00::1]:80:1", "80:2", "[fd00::1]:80"},
	} {
		t.Run("FB-064 "+tt.id, func(t *testing.T) { checkMeet(t, Policy{ExposeToLAN: true}, tt.a, tt.b, tt.at) })
	}
}

func checkMeet(t *testing.T, p Policy, a, b, at string) {
	t.Helper()
	tab := NewTable(p)
	one, two := Owner{Kind: KindCLI, ID: "one"}, Owner{Kind: KindCLI, ID: "two"}
	tab.Claim(one, []Spec{mustSpec(t, a)})
	tab.Claim(two, []Spec{mustSpec(t, b)})
	require.NoError(t, tab.Conflict(one, mustSpec(t, a)))
	var got *ConflictError
	if errors.As(tab.Conflict(two, mustSpec(t, b)), &got) {
		assert.Equal(t, at, got.At.String())
		assert.Equal(t, Claim{one, mustSpec(t, a)}, got.Holder)
	} else {
		assert.Empty(t, at)
	}
}

// FB-172: what the daemon listens on is not for publishing.
func TestFB172Reserved(t *testing.T) {
	tab := NewTable(Policy{})
	require.NoError(t, tab.Reserve(TCP, netip.MustParseAddrPort("127.0.0.1:9464"), "metrics"))
	require.NoError(t, tab.Reserve(UDP, netip.MustParseAddrPort("0.0.0.0:5553"), "DNS"))
	require.NoError(t, tab.Reserve(UDP, netip.MustParseAddrPort("127.0.0.1:0"), "nothing"))
	o := Owner{Kind: KindDocker, ID: "a"}
	metrics, other, dns, rng := mustSpec(t, "9464:80"), mustSpec(t, "[::1]:9464:80"), mustSpec(t, "127.0.0.5:5553:53/udp"), mustSpec(t, "9000-9999:1-1000")
	tab.Claim(o, []Spec{metrics, other, dns, rng})
	assert.EqualError(t, tab.Conflict(o, metrics), "host port 127.0.0.1:9464/tcp is reserved by culvert's metrics")
	assert.NoError(t, tab.Conflict(o, other))
	assert.EqualError(t, tab.Conflict(o, dns), "host port 0.0.0.0:5553/udp is reserved by culvert's DNS")
	assert.ErrorIs(t, tab.Conflict(o, rng), ErrConflict)

	assert.ErrorIs(t, tab.Reserve(TCP, netip.MustParseAddrPort("[::]:9464"), "late"), ErrConflict)
}

// The number the kernel picked is the claim's.
func TestTablePicked(t *testing.T) {
	tab := NewTable(Policy{})
	a, b := Owner{Kind: KindCLI, ID: "a"}, Owner{Kind: KindCLI, ID: "b"}
	auto, fixed, fixed2 := mustSpec(t, "0:80"), mustSpec(t, "4000:80"), mustSpec(t, "4001:80")
	tab.Claim(a, []Spec{auto})
	promoted, err := tab.Picked(a, auto, 4000)
	require.NoError(t, err)
	assert.Empty(t, promoted)
	tab.Claim(b, []Spec{fixed, fixed2})
	assert.EqualError(t, tab.Conflict(b, fixed), "host port 127.0.0.1:4000/tcp belongs to cli a (0:80/tcp)")

	// Another number lets the first go.
	promoted, err = tab.Picked(a, auto, 4002)
	require.NoError(t, err)
	assert.Equal(t, []Claim{{b, fixed}}, promoted)

	// A number of somebody whose sockets are not open just now.
	_, err = tab.Picked(a, auto, 4001)
	require.ErrorIs(t, err, ErrConflict)
	assert.NoError(t, tab.Conflict(a, auto), "without a number it waits for nobody")
	promoted, err = tab.Picked(a, auto, 0)
	require.NoError(t, err)
	assert.Empty(t, promoted)

	_, err = tab.Picked(a, auto, 4003)
	require.NoError(t, err)
	tab.Claim(a, nil)
	tab.Claim(b, nil)
	assert.Empty(t, tab.held)
}

// FB-070: after any walk of asking and leaving, what is held is what a model
// with one map entry for each port says.
func TestFB070TableAgainstModel(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 70))
			p := Policy{ExposeToLAN: seed%2 == 0}
			tab, m := NewTable(p), &model{policy: p}
			if seed%3 == 0 {
				ap := netip.MustParseAddrPort("127.0.0.1:12")
				require.NoError(t, tab.Reserve(TCP, ap, "metrics"))
				m.reserved = append(m.reserved, key{TCP, ap.Addr(), 12})
			}
			for step := range 500 {
				o := Owner{Kind: KindDocker, ID: fmt.Sprint(rnd.IntN(6))}
				specs := randomSpecs(rnd)
				got, want := tab.Claim(o, specs), m.claim(o, specs)
				require.Equal(t, want, got, "step %d: promoted", step)
				m.check(t, tab, step)
			}
			for i := range 6 {
				tab.Claim(Owner{Kind: KindDocker, ID: fmt.Sprint(i)}, nil)
			}
			assert.Len(t, tab.held, len(m.reserved))
			assert.Empty(t, tab.owners)
		})
	}
}

func randomSpecs(rnd *rand.Rand) []Spec {
	hosts := []string{"", "", "127.0.0.1", "::1", "127.0.0.2", "0.0.0.0", "fd00::1"}
	var specs []Spec
	for range rnd.IntN(5) {
		s := Spec{
			Proto:  TCP + Proto(rnd.IntN(4)/3),
			Host:   netip.AddrPortFrom(addr(hosts[rnd.IntN(len(hosts))]), uint16(10+rnd.IntN(12))),
			Ports:  1,
			Target: Target{VM: "vm", Addr: netip.AddrPortFrom(netip.Addr{}, uint16(1+rnd.IntN(2)))},
		}
		if rnd.IntN(3) == 0 {
			s.Ports = uint16(1 + rnd.IntN(6))
		}
		specs = append(specs, s)
	}
	return specs
}

// A model is the Table done naively: every row in one list in the order of
// asking, every port on its own.
type model struct {
	policy   Policy
	rows     []*modelRow
	reserved []key
	asked    int
}

type modelRow struct {
	Claim
	seq   int
	holds bool
}

type key struct {
	proto Proto
	addr  netip.Addr
	port  uint16
}

func (m *model) keys(s Spec) (keys []key) {
	for _, a := range m.policy.Addrs(s.Host.Addr()) {
		for i := range s.Ports {
			keys = append(keys, key{s.Proto, a, s.Host.Port() + i})
		}
	}
	return keys
}

func (m *model) free(s Spec) bool {
	held := slices.Clone(m.reserved)
	for _, r := range m.rows {
		if r.holds {
			held = append(held, m.keys(r.Spec)...)
		}
	}
	for _, w := range m.keys(s) {
		for _, h := range held {
			if w.proto == h.proto && w.port == h.port && w.addr.Is4() == h.addr.Is4() &&
				(w.addr == h.addr || w.addr.IsUnspecified() || h.addr.IsUnspecified()) {
				return false
			}
		}
	}
	return true
}

func (m *model) claim(o Owner, specs []Spec) (promoted []Claim) {
	var fresh, kept, gone []*modelRow
	for _, r := range m.rows {
		if r.Owner == o && !slices.Contains(specs, r.Spec) {
			gone = append(gone, r)
		} else {
			kept = append(kept, r)
		}
	}
	for i, s := range specs {
		if slices.Contains(specs[:i], s) || slices.ContainsFunc(kept, func(r *modelRow) bool { return r.Claim == Claim{o, s} }) {
			continue
		}
		r := &modelRow{Claim: Claim{o, s}}
		// The same host ports, another target: the place of the one that goes.
		for _, g := range gone {
			if hostPart(g.Spec) == hostPart(s) && (r.seq == 0 || g.seq < r.seq) {
				r.seq = g.seq
			}
		}
		for _, f := range fresh {
			if f.seq == r.seq {
				r.seq = 0
			}
		}
		fresh = append(fresh, r)
	}
	for _, r := range fresh {
		if r.seq == 0 {
			m.asked++
			r.seq = m.asked
		}
	}
	order := func(a, b *modelRow) int { return a.seq - b.seq }
	slices.SortFunc(fresh, order)
	slices.SortFunc(kept, order)
	m.rows = kept
	for _, r := range fresh {
		r.holds = m.free(r.Spec)
		m.rows = append(m.rows, r)
	}
	for _, r := range kept {
		if !r.holds && m.free(r.Spec) {
			r.holds = true
			promoted = append(promoted, r.Claim)
		}
	}
	return promoted
}

func (m *model) check(t *testing.T, tab *Table, step int) {
	t.Helper()
	for _, r := range m.rows {
		err := tab.Conflict(r.Owner, r.Spec)
		require.Equal(t, r.holds, err == nil, "step %d: %v: %v", step, r.Claim, err)
		var c *ConflictError
		if errors.As(err, &c) && c.Reserved == "" {
			require.True(t, slices.ContainsFunc(m.rows, func(h *modelRow) bool { return h.holds && h.Claim == c.Holder }), "step %d: named holder holds", step)
		}
	}
	for p, held := range tab.held {
		for i := range held[1:] {
			require.Less(t, held[i].last, held[i+1].first, "step %d: %v", step, p)
		}
	}
}

// Ten thousand rows and a range of 65 000 are cheap to hold (C-9).
func BenchmarkTable(b *testing.B) {
	owners := make([]Owner, 10000)
	for i := range owners {
		owners[i] = Owner{Kind: KindDocker, ID: fmt.Sprint(i)}
	}
	b.Run("10000 ports in and out", func(b *testing.B) {
		for b.Loop() {
			tab := NewTable(Policy{})
			for i, o := range owners {
				tab.Claim(o, []Spec{{Proto: TCP, Host: netip.AddrPortFrom(netip.Addr{}, uint16(i+1)), Ports: 1}})
			}
			for _, o := range owners {
				tab.Claim(o, nil)
			}
		}
	})
	b.Run("10000 waiting at one range", func(b *testing.B) {
		for b.Loop() {
			tab := NewTable(Policy{})
			tab.Claim(Owner{Kind: KindCLI, ID: "range"}, []Spec{{Proto: TCP, Host: netip.MustParseAddrPort("127.0.0.1:1"), Ports: 65000}})
			for i, o := range owners {
				tab.Claim(o, []Spec{{Proto: TCP, Host: netip.AddrPortFrom(netip.Addr{}, uint16(i+1)), Ports: 1}})
			}
			if len(tab.Claim(Owner{Kind: KindCLI, ID: "range"}, nil)) != len(owners) {
				b.Fatal("not all took over")
			}
		}
	})
}
