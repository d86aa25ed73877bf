package netstack

import (
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// copyPatience is for what happens at once on an idle machine.
const copyPatience = 20 * time.Second

// idleFor waits until a direction of c's copies is idle for o.
func idleFor(t *testing.T, d *direction, o outcome) {
	t.Helper()
	require.Eventually(t, func() bool {
		return d.state.Load() == dirIdle && outcome(d.waits.Load()) == o
	}, copyPatience, time.Millisecond)
}

// What the client sends while the guest has no room is told by events that the
// copy does not look at: they must not be missed once there is room.
func TestCopyAfterGuestHadNoRoom(t *testing.T) {
	ours, theirs := memory.Pair(offloads["csum+tso"])
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host", Budget: NewBudget(64<<10, 1<<20)})
	require.NoError(t, err)
	defer host.Close()
	guest, err := New(theirs, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, Seed: "guest", Budget: NewBudget(64<<10, 1<<20)})
	require.NoError(t, err)
	defer guest.Close()
	_, err = host.Probe(t.Context())
	require.NoError(t, err)
	release, got := make(chan struct{}), make(chan int, 1000)
	serve(t, guest, 7, func(c net.Conn) {
		<-release
		buf := make([]byte, 64<<10)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			got <- n
		}
	})
	conn := mustDial(t, host, 7)
	client, ours2 := clientPair(t)
	copies(conn, ours2)
	toGuest := &conn.copy.Load().toGuest
	// Pieces that a read finds whole, so that the one that has no room is held.
	sent, piece := 0, make([]byte, 5000)
	for full := false; !full; {
		n, err := client.Write(piece)
		require.NoError(t, err)
		sent += n
		require.Eventually(t, func() bool {
			full = outcome(toGuest.waits.Load()) == waitGuest
			return toGuest.state.Load() == dirIdle && (full || inQueue(t, ours2) == 0)
		}, copyPatience, time.Millisecond)
	}
	idleFor(t, toGuest, waitGuest)
	for range 2 { // not looked at
		n, err := client.Write(piece)
		require.NoError(t, err)
		sent += n
	}
	time.Sleep(10 * time.Millisecond) // for their events to have passed
	close(release)
	for sum := 0; sum < sent; {
		select {
		case n := <-got:
			sum += n
		case <-time.After(copyPatience):
			t.Fatalf("%d of %d bytes came", sum, sent)
		}
	}
}

// inQueue returns how many bytes c's socket holds.
func inQueue(t *testing.T, c relay.Pollable) (n int) {
	require.NoError(t, c.Control(func(fd uintptr) {
		var err error
		n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		require.NoError(t, err)
	}))
	return n
}

// A read stops short at urgent data; what lies behind it is not left there.
func TestCopyPassesUrgentData(t *testing.T) {
	host, guest := twoStacks(t, offloads["csum+tso"])
	got := make(chan string, 1)
	serve(t, guest, 7, func(c net.Conn) {
		buf := make([]byte, 6)
		_, _ = io.ReadFull(c, buf)
		got <- string(buf)
	})
	accepted := make(accepting, 2)
	g, err := listener.NewGroup(accepted)
	require.NoError(t, err)
	defer g.Close()
	l, err := g.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0"), nil)
	require.NoError(t, err)
	var clients [2]net.Conn
	var ours [2]hostClient
	for i := range clients {
		clients[i], err = net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		defer clients[i].Close()
		ours[i] = hostClient{<-accepted}
		defer ours[i].Abort()
	}
	conn := mustDial(t, host, 7)
	copies(conn, ours[0])
	idleFor(t, &conn.copy.Load().toGuest, waitClient)

	// The events of all three pieces are one: the other client holds them up.
	entered, blocked := make(chan struct{}), make(chan struct{})
	var once sync.Once
	require.NoError(t, ours[1].Watch(func(relay.Ready) { once.Do(func() { close(entered); <-blocked }) }))
	_, err = clients[1].Write([]byte("x"))
	require.NoError(t, err)
	<-entered
	raw, err := clients[0].(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		assert.NoError(t, unix.Sendto(int(fd), []byte("abc"), 0, nil))
		assert.NoError(t, unix.Sendto(int(fd), []byte("!"), unix.MSG_OOB, nil))
		assert.NoError(t, unix.Sendto(int(fd), []byte("def"), 0, nil))
	}))
	close(blocked)
	select {
	case s := <-got:
		assert.Equal(t, "abcdef", s)
	case <-time.After(copyPatience):
		t.Fatal("the guest did not get what lies behind urgent data")
	}
}

// A connection of the daemon's own leaves nothing behind.
func TestCopyDialContextLeavesNothing(t *testing.T) {
	host, guest := twoStacks(t, memory.Options{})
	serve(t, guest, 7, func(c net.Conn) { _, _ = io.Copy(c, c) })
	c, err := host.DialContext(t.Context(), "tcp", netip.AddrPortFrom(guestAddr.Addr(), 7).String())
	require.NoError(t, err)
	require.NoError(t, c.Close())
	assert.Empty(t, host.link.inlined.flows)
}
