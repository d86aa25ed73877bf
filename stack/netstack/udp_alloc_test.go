package netstack

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A datagram costs no allocation, either way.
func TestAllocsUDP(t *testing.T) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, whose sync.Pool drops at random")
	}
	for name, o := range udpOffloads {
		t.Run(name, func(t *testing.T) {
			g := newRawGuest(t, o)
			conn, err := g.host.DialUDP(server)
			require.NoError(t, err)
			c := conn.(*UDPConn)
			defer c.Close()
			delivered := 0
			c.Receive(func(d []relay.Datagram, _ error) { delivered += len(d) })
			theirs := g.host.link.out[0]
			g.host.link.out[0] = newOutbound(&countingPair{}, &datapath.Stats{})
			run := slices.Repeat([][]byte{make([]byte, 1400)}, 50)
			assert.Zero(t, testing.AllocsPerRun(100, func() {
				if n, err := c.Write(run); n != len(run) || err != nil {
					panic(err)
				}
			}))
			g.host.link.out[0] = theirs

			in := newInbound(g.host.link, nil, &sink{})
			defer in.release()
			frame := g.udpFrame(server, netip.MustParseAddrPort(c.LocalAddr()), make([]byte, 1400))
			assert.Zero(t, testing.AllocsPerRun(100, func() {
				in.lent = 0
				for i := range readBatch {
					f := &in.frames[i]
					f.Segs, f.N = in.lend(0), len(frame)
					n := copy(f.Segs[0], frame)
					copy(f.Segs[1], frame[n:])
					in.take(f, &in.loans[i])
				}
				in.udp.end()
			}))
			assert.Equal(t, 101*readBatch, delivered)
		})
	}
}

// BenchmarkUDP is what a datagram costs between the client's memory and a link
// that costs nothing, in runs as a busy client makes them.
func BenchmarkUDP(b *testing.B) {
	for _, size := range []int{64, 1400} {
		for name, o := range udpOffloads {
			b.Run(fmt.Sprintf("dir=host-to-guest/size=%d/offload=%s", size, name), func(b *testing.B) {
				g := newRawGuest(b, o)
				f := mustFlow(b, g.host, server)
				theirs := g.host.link.out[0]
				g.host.link.out[0] = newOutbound(&countingPair{}, &datapath.Stats{})
				defer func() { g.host.link.out[0] = theirs }()
				run := slices.Repeat([][]byte{make([]byte, size)}, udpBatch)
				for i := 0; b.Loop(); i++ {
					if i%udpBatch == 0 {
						if _, err := f.Write(run); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}
