package netstack

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// promotedStacks is twoStacks whose host promotes its flows.
func promotedStacks(t testing.TB, o memory.Options) (host, guest *Stack) {
	t.Helper()
	needsPeekOff(t, ways[1])
	ours, theirs := memory.Pair(o)
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host", Promoted: true})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, host.Close()) })
	require.NotNil(t, host.link.promoted)
	guest, err = New(theirs, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, Seed: "guest"})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, guest.Close()) })
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = host.Probe(ctx)
	require.NoError(t, err)
	return host, guest
}

// mustStart is StartTCP's outcome.
func mustStart(t testing.TB, s *Stack, port uint16) relay.GuestConn {
	t.Helper()
	answer := make(chan relay.GuestConn, 1)
	s.StartTCP(netip.AddrPortFrom(guestAddr.Addr(), port), func(c relay.GuestConn, err error) {
		assert.NoError(t, err)
		answer <- c
	})
	c := <-answer
	require.NotNil(t, c)
	t.Cleanup(c.Abort)
	return c
}

// TestPromotedFlow sends bytes there and back through a promoted flow, in sizes around
// what is read, held and peeked.
func TestPromotedFlow(t *testing.T) {
	for _, size := range []int{1, 1419, 1448, 1449, 16 << 10, 16<<10 + 1, 65160, 65536, 1 << 20, 8 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			datapathtest.Leaks(t)
			host, guest := promotedStacks(t, offloads["csum+tso"])
			want := make([]byte, size)
			_, _ = rand.Read(want)
			serve(t, guest, 7, func(c net.Conn) {
				got, _ := io.ReadAll(c)
				_, _ = c.Write(got)
				_ = c.Close()
			})
			conn := mustStart(t, host, 7)
			client, ours := clientPair(t)
			var toGuest, toHost relay.Meter
			end := make(chan relay.End, 1)
			relay.Start(ours, conn, relay.Options{ToGuest: &toGuest, ToHost: &toHost}, func(e relay.End) { end <- e })
			go func() {
				_, _ = client.Write(want)
				_ = client.CloseWrite()
			}()
			got, err := io.ReadAll(client)
			require.NoError(t, err)
			assert.Equal(t, sha256.Sum256(want), sha256.Sum256(got))
			assert.Equal(t, relay.EndClosed, <-end)
			assert.EqualValues(t, size, toGuest.Bytes())
			assert.EqualValues(t, size, toHost.Bytes())
			st := host.Stats()
			assert.Empty(t, st.Link.AllDrops())
			assert.Zero(t, st.Retransmits)
			assert.Zero(t, st.Flows)
		})
	}
}
