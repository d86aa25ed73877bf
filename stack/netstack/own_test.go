package netstack

import (
	"context"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A connection of the daemon's own is no flow, has deadlines, and ends with the
// stack.
func TestDialContext(t *testing.T) {
	datapathtest.Leaks(t)
	host, guest := twoStacks(t, memory.Options{})
	serve(t, guest, 7, func(c net.Conn) { _, _ = io.Copy(c, c) })
	at := netip.AddrPortFrom(guestAddr.Addr(), 7).String()
	c, err := host.DialContext(t.Context(), "tcp", at)
	require.NoError(t, err)
	assert.Zero(t, host.Stats().Flows)

	_, err = c.Write([]byte("ping"))
	require.NoError(t, err)
	b := make([]byte, 8)
	n, err := c.Read(b)
	require.NoError(t, err)
	assert.Equal(t, "ping", string(b[:n]))
	require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err = c.Read(b)
	var late net.Error
	require.ErrorAs(t, err, &late)
	assert.True(t, late.Timeout())
	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	assert.Zero(t, host.Stats().Flows)

	c, err = host.DialContext(t.Context(), "tcp", at)
	require.NoError(t, err)
	ended := make(chan error)
	go func() {
		_, err := c.Read(b)
		ended <- err
	}()
	require.NoError(t, host.Close())
	assert.Error(t, <-ended)
	require.NoError(t, c.Close())
}

func TestDialContextErrors(t *testing.T) {
	datapathtest.Leaks(t)
	host, _ := twoStacks(t, memory.Options{})
	_, err := host.DialContext(t.Context(), "tcp", netip.AddrPortFrom(guestAddr.Addr(), 9).String())
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = host.DialContext(ctx, "tcp", "198.51.100.1:9")
	assert.ErrorIs(t, err, context.Canceled)
	for _, bad := range [][2]string{{"udp", "10.0.2.2:9"}, {"tcp", "engine.example:2375"}} {
		_, err = host.DialContext(t.Context(), bad[0], bad[1])
		assert.ErrorContains(t, err, bad[1])
	}
	assert.Zero(t, host.Stats().Flows)
}
