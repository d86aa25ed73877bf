package netstack

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A guest that closed answers the client's next byte with a reset, which is
// noticed though the client says nothing more.
func TestC14_GuestDiesHalfClosed(t *testing.T) {
	host, guest := twoStacks(t, offloads["none"])
	serve(t, guest, 7, func(c net.Conn) { _ = c.Close() })
	c := mustDial(t, host, 7)
	client, ours := socketPair(t)
	var a, b relay.Meter
	ended := make(chan relay.End, 1)
	go func() { ended <- relay.TCP(tcpConn{ours}, c, relay.Options{ToGuest: &a, ToHost: &b}) }()
	_, err := io.ReadAll(client)
	require.NoError(t, err)
	_, err = client.Write([]byte("x"))
	require.NoError(t, err)
	select {
	case e := <-ended:
		assert.Equal(t, relay.EndGuestReset, e)
	case <-time.After(5 * time.Second):
		t.Error("not noticed")
		c.Abort()
		_ = ours.Close()
		<-ended
	}
}

type tcpConn struct{ *net.TCPConn }

func (c tcpConn) KeepAlive() error { return nil }
func (c tcpConn) Abort()           { _ = c.SetLinger(0); _ = c.Close() }
