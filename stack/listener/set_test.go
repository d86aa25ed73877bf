package listener

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// aStated is something that a Set holds.
type aStated struct{ spec Spec }

func (a *aStated) Stated() *Spec { return &a.spec }

// someSpec returns one of a few hundred specs that differ in every field.
func someSpec() Spec {
	pick := func(n int) uint16 { return uint16(1 + rand.IntN(n)) }
	addrs := []netip.Addr{{}, loopback4, loopback6, netip.MustParseAddr("::ffff:127.0.0.1"), netip.MustParseAddr("fe80::1%a"), netip.MustParseAddr("fe80::1%b")}
	addr := func() netip.Addr { return addrs[rand.IntN(len(addrs))] }
	s := Spec{
		Proto: Proto(pick(2)), Source: Source(pick(2)), Ports: pick(2), Host: netip.AddrPortFrom(addr(), pick(2)),
		Target: Target{VM: fmt.Sprint(pick(2)), Addr: netip.AddrPortFrom(addr(), pick(2))}, Allow: Prefixes(fmt.Sprint(pick(2))),
	}
	return s
}

func TestCompareTellsSpecsApart(t *testing.T) {
	for range 20_000 {
		a, b, c := someSpec(), someSpec(), someSpec()
		require.Equal(t, a == b, compare(&a, &b) == 0, "%+v %+v", a, b)
		require.Equal(t, compare(&a, &b), -compare(&b, &a), "%+v %+v", a, b)
		if compare(&a, &b) <= 0 && compare(&b, &c) <= 0 {
			require.LessOrEqual(t, compare(&a, &c), 0, "%+v %+v %+v", a, b, c)
		}
	}
}

// A Set is what a map of specs would be.
func TestSet(t *testing.T) {
	var set Set[*aStated]
	model := make(map[Spec]*aStated)
	pool := make([]Spec, 40)
	for i := range pool {
		pool[i] = someSpec()
	}
	for range 500 {
		specs := make([]Spec, rand.IntN(30))
		for i := range specs {
			specs[i] = pool[rand.IntN(len(pool))]
		}
		var asked []Spec
		now, came, gone := set.State(specs, func(s Spec) *aStated { return &aStated{s} })
		for i, s := range specs {
			if model[s] == nil && !slices.Contains(specs[:i], s) {
				asked = append(asked, s)
			}
		}
		require.Len(t, came, len(asked))
		for i, c := range came {
			require.Equal(t, asked[i], c.spec, "in the order of asking")
			model[c.spec] = c
		}
		for _, g := range gone {
			require.NotContains(t, specs, g.spec)
			require.Same(t, model[g.spec], g)
			delete(model, g.spec)
		}
		require.Len(t, now, len(model))
		for _, s := range pool {
			found, ok := now.Find(&s)
			require.Equal(t, slices.Contains(specs, s), ok)
			require.Same(t, model[s], found)
		}
		set = now
	}
	now, came, gone := set.State(nil, nil)
	assert.Empty(t, now)
	assert.Empty(t, came)
	assert.Len(t, gone, len(set))
}
