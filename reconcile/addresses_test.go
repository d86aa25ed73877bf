package reconcile

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAddresses(t *testing.T) {
	a := NewAddresses()
	seen := make(map[netip.Addr]listener.Owner)
	owners := make([]listener.Owner, 1000)
	for i := range owners {
		owners[i] = listener.Owner{Kind: listener.KindDocker, ID: fmt.Sprint(i / 2), VM: fmt.Sprint(i % 2)}
		addr, ok := a.Acquire(owners[i])
		require.True(t, ok)
		assert.True(t, ownNetwork.Contains(addr))
		assert.Zero(t, seen[addr])
		seen[addr] = owners[i]
	}
	again, _ := a.Acquire(owners[0])
	assert.Equal(t, owners[0], seen[again], "an owner's address is its own")

	// Held twice, it is the owner's until it was released twice.
	a.Release(owners[0])
	stays, _ := a.Acquire(owners[0])
	assert.Equal(t, again, stays)
	a.Release(owners[0])
	a.Release(owners[0])
	a.Release(owners[0]) // once too often is no error

	// Another daemon finds the same, or nearly: what met on one hash may swap.
	same := 0
	b := NewAddresses()
	for i := len(owners) - 1; i >= 0; i-- {
		if addr, _ := b.Acquire(owners[i]); seen[addr] == owners[i] {
			same++
		}
	}
	assert.Greater(t, same, 950)
}

// TestAddressesExhausted: that nothing is left is an answer, and what is given
// back can be had again.
func TestAddressesExhausted(t *testing.T) {
	a := NewAddresses()
	for i := range ownAddresses {
		_, ok := a.Acquire(dockerOwner(fmt.Sprint(i)))
		require.True(t, ok)
	}
	_, ok := a.Acquire(dockerOwner("one too many"))
	assert.False(t, ok)
	first, ok := a.Acquire(dockerOwner("0"))
	assert.True(t, ok, "who has one has it")
	assert.Zero(t, a.taken[0], "no network address")
	assert.Zero(t, a.taken[1<<16-1], "no broadcast address")
	a.Release(dockerOwner("0"))
	a.Release(dockerOwner("0"))
	last, ok := a.Acquire(dockerOwner("one too many"))
	assert.True(t, ok)
	assert.Equal(t, first, last)
}
