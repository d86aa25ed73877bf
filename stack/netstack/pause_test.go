package netstack

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// A pausable is a guest's end of a link whose guest takes no frames while it is
// paused: they stay where a VMM's ring or socket has them.
type pausable struct {
	datapath.Attachment
	running sync.RWMutex // held for writing while it is paused
}

func (p *pausable) QueuePairs() []datapath.QueuePair {
	var pairs []datapath.QueuePair
	for _, qp := range p.Attachment.QueuePairs() {
		pairs = append(pairs, pausablePair{qp, p})
	}
	return pairs
}

type pausablePair struct {
	datapath.QueuePair
	of *pausable
}

func (p pausablePair) ReadBatch(frames []datapath.Frame, get func(int) [][]byte) (int, error) {
	n, err := p.QueuePair.ReadBatch(frames, get)
	p.of.running.RLock()
	defer p.of.running.RUnlock()
	return n, err
}

// impatience is TCP that gives up within half a second, as it would have after
// many minutes: keepalive after 20 + 5 × 20 ms, retransmission after
// 10 + 3 × 20 ms.
type impatience struct {
	rto, maxRTO, keepAlive time.Duration
	retries                uint64
}

var impatient = impatience{10 * time.Millisecond, 20 * time.Millisecond, 20 * time.Millisecond, 3}

func (i impatience) tune(t *testing.T, s *Stack) {
	t.Helper()
	least, most := tcpip.TCPMinRTOOption(i.rto), tcpip.TCPMaxRTOOption(i.maxRTO)
	retries := tcpip.TCPMaxRetriesOption(i.retries)
	for _, o := range []tcpip.SettableTransportProtocolOption{&least, &most, &retries} {
		require.Nil(t, s.net.SetTransportProtocolOption(tcp.ProtocolNumber, o))
	}
}

// probeSoon is KeepAlive with less patience.
func (i impatience) probeSoon(t *testing.T, c *Conn) {
	t.Helper()
	require.NoError(t, c.KeepAlive())
	idle, interval := tcpip.KeepaliveIdleOption(i.keepAlive), tcpip.KeepaliveIntervalOption(i.keepAlive)
	require.Nil(t, c.ep.SetSockOpt(&idle))
	require.Nil(t, c.ep.SetSockOpt(&interval))
}

// TestC28_FlowsOutliveAPause pauses a guest for much longer than any of TCP's
// patience, with flows in every state, and without saying so to see them end.
func TestC28_FlowsOutliveAPause(t *testing.T) {
	for _, said := range []bool{true, false} {
		for name, o := range map[string]memory.Options{"deep": offloads["csum+tso"], "shallow": offloads["shallow"]} {
			t.Run(fmt.Sprintf("%s/said=%t", name, said), func(t *testing.T) { testFlowsOverAPause(t, o, said) })
		}
	}
}

func testFlowsOverAPause(t *testing.T, o memory.Options, said bool) {
	datapathtest.Leaks(t)
	host, guest, link := pausableStacks(t, o)
	impatient.tune(t, host)
	resumed := make(chan struct{})
	answer := sync.OnceFunc(func() { close(resumed) })
	defer answer()
	server, asked := make(chan net.Conn, 1), make(chan struct{}, 2)
	serve(t, guest, 7, func(c net.Conn) { // answers when it has everything, and not before
		got, _ := io.ReadAll(c)
		asked <- struct{}{}
		<-resumed
		_, _ = c.Write(got)
		_ = c.Close()
	})
	serve(t, guest, 8, func(c net.Conn) { server <- c })

	halfClosed := mustDial(t, host, 7)
	impatient.probeSoon(t, halfClosed)
	_, err := halfClosed.Write([]byte("question"))
	require.NoError(t, err)
	require.NoError(t, halfClosed.CloseWrite())
	toGuest := mustDial(t, host, 7)
	toHost := mustDial(t, host, 8)
	theirs := <-server
	defer theirs.Close()
	<-asked // silent from now on

	link.running.Lock()
	guest.SetPaused(true)
	if said {
		host.SetPaused(true)
	}
	before := host.Stats().Retransmits
	_, err = toGuest.Write([]byte("unacknowledged"))
	require.NoError(t, err)
	_, err = theirs.Write([]byte("left as it was paused"))
	require.NoError(t, err)
	if !said {
		for _, c := range []*Conn{halfClosed, toGuest} {
			require.Eventually(t, c.Gone, 20*time.Second, time.Millisecond, "what this test is about does not happen")
		}
		guest.SetPaused(false)
		link.running.Unlock()
		return
	}
	time.Sleep(time.Second) // four times what ends them
	assert.Equal(t, before, host.Stats().Retransmits, "nothing is sent in vain")
	host.SetPaused(false)
	guest.SetPaused(false)
	link.running.Unlock()

	answer()
	got, err := io.ReadAll(halfClosed)
	require.NoError(t, err)
	assert.Equal(t, "question", string(got))
	require.NoError(t, toGuest.CloseWrite())
	got, err = io.ReadAll(toGuest)
	require.NoError(t, err)
	assert.Equal(t, "unacknowledged", string(got))
	require.NoError(t, theirs.Close())
	got, err = io.ReadAll(toHost)
	require.NoError(t, err)
	assert.Equal(t, "left as it was paused", string(got))
	for _, c := range []*Conn{halfClosed, toGuest, toHost} {
		require.NoError(t, c.Close())
	}
}

// pausableStacks is twoStacks with a guest that can be paused.
func pausableStacks(t *testing.T, o memory.Options) (host, guest *Stack, link *pausable) {
	t.Helper()
	ours, theirs := memory.Pair(o)
	link = &pausable{Attachment: theirs}
	host, guest = joined(t, ours, link)
	return host, guest, link
}

// A stack that is closed while its guest is paused leaves nothing.
func TestCloseWhilePaused(t *testing.T) {
	datapathtest.Leaks(t)
	host, guest := twoStacks(t, offloads["csum+tso"])
	serve(t, guest, 7, func(c net.Conn) { _ = c.Close() })
	c := mustDial(t, host, 7)
	_, err := io.ReadAll(c)
	require.NoError(t, err)
	host.SetPaused(true)
	require.NoError(t, c.Close())
	require.NoError(t, host.Close())
}
