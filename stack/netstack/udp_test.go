package netstack

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

const everyUDPOffload = virtio.OffloadCSum | virtio.OffloadUSO4 | virtio.OffloadUSO6

// udpOffloads are the kinds of link that datagrams have to be right on.
var udpOffloads = map[string]memory.Options{
	"none": {},
	"csum": {ToGuest: virtio.OffloadCSum, FromGuest: virtio.OffloadCSum},
	"uso":  {ToGuest: everyUDPOffload, FromGuest: everyUDPOffload},
}

// A flow is a UDPConn to a guest that is frames, and what it delivered.
type flow struct {
	*UDPConn
	mu  sync.Mutex
	got []string
	end []error
}

var server = netip.AddrPortFrom(guestAddr.Addr(), 53)

func mustFlow(tb testing.TB, host *Stack, to netip.AddrPort) *flow {
	tb.Helper()
	conn, err := host.DialUDP(to)
	require.NoError(tb, err)
	f := &flow{UDPConn: conn.(*UDPConn)}
	f.Receive(func(datagrams []relay.Datagram, err error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if err != nil {
			f.end = append(f.end, err)
		}
		for _, d := range datagrams {
			f.got = append(f.got, string(d[0])+string(d[1]))
		}
	})
	tb.Cleanup(func() { _ = conn.Close() })
	return f
}

// local is the flow's address as the guest sees it.
func (f *flow) local() netip.AddrPort { return netip.MustParseAddrPort(f.LocalAddr()) }

// waits until n datagrams are there and returns them.
func (f *flow) await(tb testing.TB, n int) []string {
	tb.Helper()
	require.Eventually(tb, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.got) >= n
	}, 5*time.Second, time.Millisecond)
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.got)
}

// silentGuest is a host at whose link's other end nobody reads but the test.
func silentGuest(t *testing.T, o memory.Options) (host *Stack, guest datapath.QueuePair) {
	ours, theirs := memory.Pair(o)
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host"})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, host.Close()) })
	return host, theirs.QueuePairs()[0]
}

// readFrames returns the frames that are there, at least one.
func readFrames(tb testing.TB, qp datapath.QueuePair) []datapath.Frame {
	tb.Helper()
	frames := make([]datapath.Frame, 256)
	n, err := qp.ReadBatch(frames, func(n int) [][]byte { return [][]byte{make([]byte, n)} })
	require.NoError(tb, err)
	return frames[:n]
}

// datagramsOf takes frames apart as a guest would, and checks every header. A
// fragment is told by its offset.
func datagramsOf(tb testing.TB, f *flow, frames []datapath.Frame) (datagrams []string) {
	tb.Helper()
	for _, fr := range frames {
		ip := header.IPv4(fr.Segs[0][14:fr.N])
		require.True(tb, ip.IsValid(len(ip)))
		require.True(tb, ip.IsChecksumValid())
		require.Equal(tb, len(ip), int(ip.TotalLength()))
		if ip.More() || ip.FragmentOffset() != 0 {
			datagrams = append(datagrams, fmt.Sprint("fragment at ", ip.FragmentOffset()))
			continue
		}
		u := header.UDP(ip.Payload())
		require.Equal(tb, len(u), int(u.Length()))
		require.Equal(tb, f.port, u.SourcePort())
		require.Equal(tb, server.Port(), u.DestinationPort())
		pseudo := header.PseudoHeaderChecksum(header.UDPProtocolNumber, ip.SourceAddress(), ip.DestinationAddress(), u.Length())
		if fr.Hdr.Flags&virtio.FlagNeedsCSum != 0 {
			require.Equal(tb, pseudo, u.Checksum(), "partial")
			require.EqualValues(tb, 34, fr.Hdr.CSumStart)
			require.EqualValues(tb, 6, fr.Hdr.CSumOffset)
		} else {
			require.NotZero(tb, u.Checksum())
			require.True(tb, u.IsChecksumValid(ip.SourceAddress(), ip.DestinationAddress(), checksum.Checksum(u.Payload(), 0)))
		}
		payload, size := u.Payload(), max(len(u.Payload()), 1)
		if fr.Hdr.GSOType != virtio.GSONone {
			require.EqualValues(tb, virtio.GSOUDPL4, fr.Hdr.GSOType)
			require.EqualValues(tb, 42, fr.Hdr.HdrLen)
			size = int(fr.Hdr.GSOSize)
			require.Greater(tb, len(payload), size)
		}
		for {
			n := min(size, len(payload))
			datagrams = append(datagrams, string(payload[:n]))
			if payload = payload[n:]; len(payload) == 0 {
				break
			}
		}
	}
	return datagrams
}

func asBytes(texts []string) (datagrams [][]byte) {
	for _, t := range texts {
		datagrams = append(datagrams, []byte(t))
	}
	return datagrams
}

// Runs of datagrams reach the guest in order and with their boundaries, in as
// few frames as it takes.
func TestUDPRunsToGuest(t *testing.T) {
	long, full := strings.Repeat("l", 1400), strings.Repeat("f", 1472)
	many := make([]string, 150)
	for i := range many {
		many[i] = fmt.Sprintf("%03d", i)
	}
	for _, test := range []struct {
		name   string
		texts  []string
		plain  int // frames without super-frames
		merged int // and with
	}{
		{"one", []string{"x"}, 1, 1},
		{"empty", []string{"", "", ""}, 3, 3},
		{"equal", []string{long, long, long}, 3, 1},
		{"last shorter", []string{full, full, "end"}, 3, 1},
		{"growing", []string{"a", "bb", "ccc"}, 3, 3},
		{"empty between", []string{"aa", "aa", "", "aa"}, 4, 3},
		{"46 of 1400 make 64400", slices.Repeat([]string{long}, 50), 50, 2},
		{"64 at most", many, 150, 3},
	} {
		for name, o := range udpOffloads {
			t.Run(test.name+"/"+name, func(t *testing.T) {
				host, guest := silentGuest(t, o)
				f := mustFlow(t, host, server)
				n, err := f.Write(asBytes(test.texts))
				require.NoError(t, err)
				assert.Equal(t, len(test.texts), n)
				frames := readFrames(t, guest)
				assert.Equal(t, test.texts, datagramsOf(t, f, frames))
				want := test.plain
				if name == "uso" {
					want = test.merged
				}
				assert.Len(t, frames, want)
				// A guest that cuts a super-frame counts on from its identification.
				at := 0
				for _, fr := range frames {
					ip := header.IPv4(fr.Segs[0][14:])
					assert.EqualValues(t, at, ip.ID())
					assert.Zero(t, ip.Flags()&header.IPv4FlagDontFragment)
					at += len(datagramsOf(t, f, []datapath.Frame{fr}))
				}
			})
		}
	}
}

// What exceeds the MTU goes in fragments, in its place among the others.
func TestUDPLongAmongShort(t *testing.T) {
	host, guest := silentGuest(t, udpOffloads["uso"])
	f := mustFlow(t, host, server)
	n, err := f.Write(asBytes([]string{"a", "a", strings.Repeat("x", 1473), "b"}))
	require.NoError(t, err)
	assert.Equal(t, 4, n)
	assert.Equal(t, []string{"a", "a", "fragment at 0", "fragment at 1480", "b"}, datagramsOf(t, f, readFrames(t, guest)))

	n, err = f.Write([][]byte{[]byte("c"), make([]byte, maxDatagram+1), []byte("d")})
	assert.Error(t, err)
	assert.Equal(t, 1, n)
}

// Datagrams for which there is no room wait, and leave in order.
func TestUDPWithoutRoom(t *testing.T) {
	host, guest := silentGuest(t, memory.Options{ToGuest: everyUDPOffload, FromGuest: everyUDPOffload, Depth: 2})
	f := mustFlow(t, host, server)
	var want []string
	for i := range 40 {
		want = append(want, strings.Repeat("x", i)) // growing: a frame each
	}
	for run := range slices.Chunk(want, 8) {
		n, err := f.Write(asBytes(run))
		require.NoError(t, err)
		require.Len(t, run, n)
	}
	var got []string
	for len(got) < len(want) {
		got = append(got, datagramsOf(t, f, readFrames(t, guest))...)
	}
	assert.Equal(t, want, got)
}

// sendAll hands the host frames in one batch.
func (g *rawGuest) sendAll(frames ...datapath.Frame) {
	n, err := g.att.QueuePairs()[0].WriteBatch(frames)
	require.NoError(g.t, err)
	require.Len(g.t, frames, n)
}

func (g *rawGuest) reply(f *flow, text string) datapath.Frame {
	b := g.udpFrame(server, f.local(), []byte(text))
	return datapath.Frame{Segs: [][]byte{b}, N: len(b)}
}

// super makes a frame one of many datagrams of size bytes.
func super(f datapath.Frame, size int) datapath.Frame {
	f.Hdr = virtio.NetHdr{
		Flags: virtio.FlagNeedsCSum, CSumStart: 34, CSumOffset: 6, GSOType: virtio.GSOUDPL4, GSOSize: uint16(size), HdrLen: 42,
	}
	return f
}

// What the guest sends comes to its flow, in order and with its boundaries.
func TestUDPRunsFromGuest(t *testing.T) {
	for name, o := range udpOffloads {
		t.Run(name, func(t *testing.T) {
			g := newRawGuest(t, o)
			a, b := mustFlow(t, g.host, server), mustFlow(t, g.host, server)
			padded := g.reply(a, "x")
			padded.Segs[0] = append(padded.Segs[0], make([]byte, 17)...) // Ethernet's least, 60
			padded.N = 60
			unsummed := g.reply(a, "no sum")
			header.UDP(unsummed.Segs[0][34:]).SetChecksum(0)
			long := strings.Repeat("long", 350)
			g.sendAll(g.reply(a, "1"), g.reply(a, ""), g.reply(b, "other"), g.reply(a, long), padded, unsummed, g.reply(b, long))
			assert.Equal(t, []string{"1", "", long, "x", "no sum"}, a.await(t, 5))
			assert.Equal(t, []string{"other", long}, b.await(t, 2))
			assert.Empty(t, g.host.Stats().Link.AllDrops())
		})
	}
}

// A super-frame of the guest's is as many datagrams as the guest sent, wherever
// they lie across our memory; one that is not a flow's is none at all.
func TestUDPSuperFrameFromGuest(t *testing.T) {
	g := newRawGuest(t, udpOffloads["uso"])
	f := mustFlow(t, g.host, server)
	for _, sizes := range [][]int{{1, 1, 1}, {50, 50, 50, 7}, {500, 500, 200}, {86, 86}, {1472, 1472, 1472, 1472}} {
		var want []string
		for i, n := range sizes {
			want = append(want, strings.Repeat(string(rune('a'+i)), n))
		}
		f.mu.Lock()
		f.got = nil
		f.mu.Unlock()
		g.sendAll(super(g.reply(f, strings.Join(want, "")), sizes[0]), g.reply(f, "behind"))
		assert.Equal(t, append(want, "behind"), f.await(t, len(want)+1))
	}
	assert.Empty(t, g.host.Stats().Link.AllDrops())
	f.got = nil
	toNobody := g.reply(f, "aabb")
	header.UDP(toNobody.Segs[0][34:]).SetDestinationPort(f.port ^ 1)
	g.sendAll(super(toNobody, 2), super(g.reply(f, strings.Repeat("x", maxSegmentsIn+1)), 1))
	g.settle()
	assert.EqualValues(t, 2, g.host.Stats().Link.Drops(datapath.DropUnwanted))
	assert.Empty(t, f.got)
}

// A long datagram, which gVisor puts together, keeps its place among short ones.
func TestUDPFragmentsAmongShort(t *testing.T) {
	g := newRawGuest(t, udpOffloads["csum"])
	f := mustFlow(t, g.host, server)
	text := strings.Repeat("0123456789abcdef", 125) // 2000
	whole := g.reply(f, text).Segs[0]
	fragment := func(from, to int) datapath.Frame {
		b := slices.Concat(whole[:34], whole[34+from:34+to])
		ip := header.IPv4(b[14:])
		ip.SetTotalLength(uint16(len(b) - 14))
		ip.SetID(7)
		flags := uint8(0)
		if to < len(whole)-34 {
			flags = header.IPv4FlagMoreFragments
		}
		ip.SetFlagsFragmentOffset(flags, uint16(from))
		ip.SetChecksum(0)
		ip.SetChecksum(^ip.CalculateChecksum())
		return datapath.Frame{Segs: [][]byte{b}, N: len(b)}
	}
	g.sendAll(g.reply(f, "before"), fragment(0, 1480), g.reply(f, "between"), fragment(1480, 2008), g.reply(f, "after"))
	assert.Equal(t, []string{"before", "between", text, "after"}, f.await(t, 4))
}

// Not for a flow: another's port or address, a sum that is wrong, a length that
// lies. Nothing of it is delivered, and what is whole is refused by ICMP.
func TestUDPNotOfTheFlow(t *testing.T) {
	for name, o := range udpOffloads {
		t.Run(name, func(t *testing.T) {
			g := newRawGuest(t, o)
			f := mustFlow(t, g.host, server)
			otherPort := g.udpFrame(netip.AddrPortFrom(server.Addr(), 54), f.local(), []byte("x"))
			badSum := g.reply(f, "x").Segs[0]
			header.UDP(badSum[34:]).SetChecksum(1)
			badIP := g.reply(f, "x").Segs[0]
			header.IPv4(badIP[14:]).SetChecksum(1)
			tooLong := g.reply(f, "x").Segs[0]
			header.UDP(tooLong[34:]).SetLength(100)
			for _, b := range [][]byte{otherPort, badSum, badIP, tooLong} {
				g.send(b, virtio.NetHdr{})
			}
			assert.Len(t, g.settle(), 1, "port-unreachable for the first")
			g.sendAll(g.reply(f, "fine"))
			assert.Equal(t, []string{"fine"}, f.await(t, 1))
		})
	}
}

// Frames of noise at a live flow break nothing, and bring nothing that is longer
// than they are.
func TestUDPNoise(t *testing.T) {
	g := newRawGuest(t, udpOffloads["uso"])
	f := mustFlow(t, g.host, server)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		b := g.reply(f, strings.Repeat("x", rng.IntN(300))).Segs[0]
		for range rng.IntN(3) {
			b[14+rng.IntN(28)] = byte(rng.Uint32())
		}
		if ip := header.IPv4(b[14:]); int(ip.HeaderLength()) <= len(ip) {
			ip.SetChecksum(0)
			ip.SetChecksum(^ip.CalculateChecksum())
		}
		h := virtio.NetHdr{Flags: virtio.FlagDataValid}
		if rng.IntN(2) == 0 {
			h = super(datapath.Frame{}, rng.IntN(400)).Hdr
		}
		g.send(b[:rng.IntN(len(b)+1)], h)
	}
	g.settle()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.got {
		require.LessOrEqual(t, len(d), 300)
	}
	assert.NotEmpty(t, f.got)
}

// The end of a flow is told once, and gives back its port; also where it comes
// before anybody listens.
func TestUDPEnds(t *testing.T) {
	host, _ := silentGuest(t, memory.Options{})
	f := mustFlow(t, host, server)
	require.NoError(t, f.Close())
	require.NoError(t, f.Close())
	assert.Equal(t, []error{net.ErrClosed}, f.end)
	_, err := f.Write([][]byte{nil})
	assert.ErrorIs(t, err, net.ErrClosed)
	assert.Zero(t, host.Stats().Endpoints)
	assert.Nil(t, host.link.udp.lookUp(f.port))

	conn, err := host.DialUDP(server)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	var told error
	conn.Receive(func(_ []relay.Datagram, err error) { told = err })
	assert.ErrorIs(t, told, net.ErrClosed)
}

// Flows that come and go under datagrams both ways, for the race detector.
func TestUDPFlowsUnderTraffic(t *testing.T) {
	host, guest := twoStacks(t, offloads["csum+tso"])
	l, err := guest.ListenUDP(server.Port())
	require.NoError(t, err)
	defer l.Close()
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := l.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = l.WriteTo(buf[:n], from)
		}
	}()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 100 {
				conn, err := host.DialUDP(server)
				if !assert.NoError(t, err) {
					return
				}
				conn.Receive(func(_ []relay.Datagram, err error) {
					if err != nil && !errors.Is(err, net.ErrClosed) {
						t.Error(err)
					}
				})
				_, _ = conn.Write([][]byte{bytes.Repeat([]byte("x"), i*20), []byte("y")})
				_ = conn.Close()
			}
		})
	}
	wg.Wait()
	assert.Zero(t, host.Stats().Flows)
}
