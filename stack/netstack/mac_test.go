package netstack

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// A card is a guest's end of a link with an Ethernet address of its own, which
// can change, as when a VM is restored on another: what is for the address of
// before is not for it.
type card struct {
	datapath.Attachment
	stack tcpip.LinkAddress                 // the guest's stack's
	mac   atomic.Pointer[tcpip.LinkAddress] // on the link
}

func (c *card) QueuePairs() []datapath.QueuePair {
	var pairs []datapath.QueuePair
	for _, qp := range c.Attachment.QueuePairs() {
		pairs = append(pairs, cardPair{qp, c})
	}
	return pairs
}

type cardPair struct {
	datapath.QueuePair
	card *card
}

func (p cardPair) WriteBatch(frames []datapath.Frame) (int, error) {
	frames = slices.Clone(frames)
	for i := range frames {
		b := slices.Concat(frames[i].Segs...)
		frames[i].Segs = [][]byte{b}
		copy(b[6:12], *p.card.mac.Load())
		if etherType(b) == header.ARPProtocolNumber {
			copy(header.ARP(b[header.EthernetMinimumSize:]).HardwareAddressSender(), *p.card.mac.Load())
		}
	}
	return p.QueuePair.WriteBatch(frames)
}

func (p cardPair) ReadBatch(frames []datapath.Frame, get func(int) [][]byte) (int, error) {
	n, err := p.QueuePair.ReadBatch(frames, get)
	for i := range n {
		switch to := frames[i].Segs[0][:6]; tcpip.LinkAddress(to) {
		case *p.card.mac.Load():
			copy(to, p.card.stack)
		case p.card.stack:
			copy(to, "\x02other") // the stack drops it, as the card would
		}
	}
	return n, err
}

// TestFB124_NewMAC changes the guest's Ethernet address under a flow: the next
// probe finds it, or what the guest announces, and everything goes on.
func TestFB124_NewMAC(t *testing.T) {
	for name, learn := range map[string]func(t *testing.T, host, guest *Stack){
		"probed": func(t *testing.T, host, _ *Stack) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := host.Probe(ctx)
			require.NoError(t, err)
		},
		"announced": func(_ *testing.T, _, guest *Stack) { // RFC 5227, 2.3
			guest.link.sendARP(header.ARPRequest, header.EthernetBroadcastAddress, guestAddr.Addr())
		},
	} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			ours, theirs := memory.Pair(offloads["csum+tso"])
			c := &card{Attachment: theirs, stack: "\x02guest"}
			c.mac.Store(&c.stack)
			host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"})
			require.NoError(t, err)
			defer host.Close()
			guest, err := New(c, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, MAC: [6]byte([]byte(c.stack))})
			require.NoError(t, err)
			defer guest.Close()
			_, err = host.Probe(t.Context())
			require.NoError(t, err)
			serve(t, guest, 7, func(c net.Conn) { _, _ = io.Copy(c, c); _ = c.Close() })
			flow := mustDial(t, host, 7)
			echo := func(r io.ReadWriter, s string) {
				_, err := io.WriteString(r, s)
				require.NoError(t, err)
				b := make([]byte, len(s))
				_, err = io.ReadFull(r, b)
				require.NoError(t, err)
				assert.Equal(t, s, string(b))
			}
			echo(flow, "before")

			other := tcpip.LinkAddress("\x02newer")
			c.mac.Store(&other)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_, err = host.DialTCP(ctx, netip.AddrPortFrom(guestAddr.Addr(), 7))
			require.ErrorIs(t, err, context.DeadlineExceeded, "the card takes what is not for it")
			learn(t, host, guest)
			echo(flow, "after")
			echo(mustDial(t, host, 7), "another")
			assert.Equal(t, other, host.link.neigh.mac())
			flow.Abort()
		})
	}
}
