package reconcile

import (
	"testing"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
)

func TestDesiredJoinsInTheOrderOfAsking(t *testing.T) {
	a, b, c := want(t, "a", "80:80"), want(t, "b", "81:80"), want(t, "c", "82:80", "83:80/udp")
	wants, clashes := desired([]Snapshot{
		{Source: "one", Wants: []Want{c, a}},
		{Source: "two", Wants: []Want{b, {Owner: dockerOwner("empty")}}},
	})
	assert.Equal(t, []Want{c, a, b}, wants)
	assert.Empty(t, clashes)

	wants, clashes = desired(nil)
	assert.Empty(t, wants)
	assert.Empty(t, clashes)
}

func TestDesiredFirstWantOfAnOwnerHolds(t *testing.T) {
	first, second := want(t, "a", "80:80"), want(t, "a", "81:80")
	one, two := Snapshot{Source: "one", Wants: []Want{first}}, Snapshot{Source: "two", Wants: []Want{second}}

	wants, clashes := desired([]Snapshot{one, two})
	assert.Equal(t, []Want{first}, wants)
	assert.Equal(t, []clash{{dockerOwner("a"), "one", "two"}}, clashes)

	// The second comes into force when the first is gone or asks for nothing.
	one.Wants = []Want{{Owner: dockerOwner("a")}}
	wants, clashes = desired([]Snapshot{one, two})
	assert.Equal(t, []Want{second}, wants)
	assert.Empty(t, clashes)

	// Within one snapshot too.
	wants, clashes = desired([]Snapshot{{Source: "one", Wants: []Want{second, first}}})
	assert.Equal(t, []Want{second}, wants)
	assert.Equal(t, []clash{{dockerOwner("a"), "one", "one"}}, clashes)
}

func TestDiff(t *testing.T) {
	same, moved, new := want(t, "same", "80:80"), want(t, "moved", "82:80"), want(t, "new", "83:80")
	have := map[listener.Owner]told{
		dockerOwner("same"):                  {specs: same.Specs},
		dockerOwner("moved"):                 {specs: want(t, "moved", "81:80").Specs},
		dockerOwner("z"):                     {specs: want(t, "z", "84:80").Specs},
		dockerOwner("b"):                     {},
		{Kind: listener.KindConfig, ID: "c"}: {},
	}
	gone, publish := diff(have, []Want{same, moved, new}, nil)
	assert.Equal(t, []listener.Owner{{Kind: listener.KindConfig, ID: "c"}, dockerOwner("b"), dockerOwner("z")}, gone)
	assert.Equal(t, []Want{moved, new}, publish)

	_, publish = diff(have, []Want{same, moved}, []listener.Owner{dockerOwner("same"), dockerOwner("unknown")})
	assert.Equal(t, []Want{same, moved}, publish, "what is asked for is published though it did not change")
}
