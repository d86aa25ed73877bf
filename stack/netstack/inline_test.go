package netstack

import (
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Without what inline_unsafe.go takes from gVisor, each segment costs a wake-up
// again, and nothing else would tell.
func TestInlineDelivery(t *testing.T) {
	require.True(t, ownedKnown, "gVisor's endpoint has another ownedByUser: see inline_unsafe.go")
	host, guest := twoStacks(t, offloads["csum+tso"])
	serve(t, guest, 7, func(c net.Conn) { _, _ = io.Copy(c, c); _ = c.Close() })
	c := mustDial(t, host, 7)
	host.link.inlined.mu.RLock()
	assert.Len(t, host.link.inlined.flows, 1)
	host.link.inlined.mu.RUnlock()

	// While somebody holds the endpoint its segments wait, and nobody waits for it.
	conn := c
	ep := conn.ep.(interface {
		LockUser()
		UnlockUser()
	})
	b := make([]byte, 1)
	_, err := c.Write([]byte("a"))
	require.NoError(t, err)
	_, err = io.ReadFull(c, b)
	require.NoError(t, err)
	_, err = c.Write([]byte("b"))
	require.NoError(t, err)
	ep.LockUser()
	other := mustDial(t, host, 7) // its segments pass by those that wait
	_, err = other.Write([]byte("c"))
	require.NoError(t, err)
	_, err = io.ReadFull(other, b)
	require.NoError(t, err)
	assert.Equal(t, "c", string(b))
	ep.UnlockUser()
	_, err = io.ReadFull(c, b)
	require.NoError(t, err)
	assert.Equal(t, "b", string(b))

	c.Abort()
	other.Abort()
	assert.Empty(t, host.link.inlined.flows)
}
