package listener

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestBound is what the kernel says of sockets that are there, and no longer.
func TestBound(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	tcp := netip.MustParseAddrPort(l.Addr().String())
	assert.True(t, Bound(TCP, tcp))
	assert.False(t, Bound(UDP, tcp), "another protocol")
	assert.False(t, Bound(TCP, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), tcp.Port())), "another address")
	assert.Contains(t, Holder(TCP, tcp), fmt.Sprintf("(pid %d)", os.Getpid()))
	require.NoError(t, l.Close())
	assert.False(t, Bound(TCP, tcp))
	assert.Empty(t, Holder(TCP, tcp))

	c, err := net.ListenPacket("udp", "[::1]:0")
	require.NoError(t, err)
	defer c.Close()
	assert.True(t, Bound(UDP, netip.MustParseAddrPort(c.LocalAddr().String())))
}
