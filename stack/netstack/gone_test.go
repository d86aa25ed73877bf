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
	t.Run("soon", func(t *testing.T) { guestDiesHalfClosed(t, 0) })
	// Later than relay begins to watch.
	t.Run("later", func(t *testing.T) { guestDiesHalfClosed(t, 300*time.Millisecond) })
}

func guestDiesHalfClosed(t *testing.T, after time.Duration) {
	host, guest := twoStacks(t, offloads["none"])
	serve(t, guest, 7, func(c net.Conn) { _ = c.Close() })
	c := mustDial(t, host, 7)
	client, ours := clientPair(t)
	var a, b relay.Meter
	ended := make(chan relay.End, 1)
	go func() { ended <- relay.TCP(ours, c, relay.Options{ToGuest: &a, ToHost: &b}) }()
	_, err := io.ReadAll(client)
	require.NoError(t, err)
	time.Sleep(after)
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
