package netstack

import (
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// A wildGuest is the guest's end of one flow, frame by frame: it says whatever a
// test has it say, and holds what the host says to what is known. Positions count
// from the first byte of a stream; a byte at a position is always the same, so that
// one that is elsewhere shows.
type wildGuest struct {
	t    testing.TB
	att  datapath.Attachment
	mss  int  // what it claims; 0 claims none, which means 536 (RFC 9293, 3.7.1)
	ws   int  // window scale; -1 has none
	sack bool // whether it permits selective acknowledgements
	ts   bool // whether it wants timestamps
	pong chan struct{}
	up   chan struct{} // closed when the host has completed the handshake

	mu        sync.Mutex
	hostMAC   []byte
	hostPort  uint16
	hostISS   uint32
	scaled    bool // both have said a window scale
	stamped   bool // both have said a timestamp
	hostStamp uint32
	stamp     uint32
	isUp      bool
	reset     bool // the host has reset the flow
	ended     bool // the host's stream has ended, as far as it was seen
	// toldWriter says that the client's socket has told of its reset, which it does
	// once, as it was written to: who reads then finds an end.
	toldWriter bool

	// What the host sends.
	offered   int // bytes of the client's that the host may have
	seen      int // up to where it has sent
	accept    int // up to where the guest takes bytes
	inOrder   int // up to where it has them
	acked     int // the most it has acknowledged, where the host may believe it
	maxWindow int // the most it has ever said

	// What the guest sends.
	covered  []span       // stretches of its stream that it has sent, in order and apart
	finAt    map[int]bool // ends of its stream that it has told
	hostAck  int          // up to where the host has acknowledged
	hostEdge int          // up to where the host has had room
}

// A span is bytes from one position up to another.
type span struct{ from, to int }

const (
	wildISS  = 0xffff_f000 // so that sequence numbers wrap early
	wildPort = 7
)

// guestByte and hostByte are the streams' bytes: of the guest's, and the client's.
func guestByte(pos int) byte { return byte(uint32(pos)*2654435761>>24) ^ byte(pos) }
func hostByte(pos int) byte  { return byte(uint32(pos)*2246822519>>24) ^ byte(pos>>3) }

func stretch(of func(int) byte, from, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = of(from + i)
	}
	return b
}

// newWild makes a bed with g as the guest, and one flow of it.
func newWild(t testing.TB, w way, g *wildGuest) (b *flowBed, client flowConn) {
	t.Helper()
	g.t, g.pong, g.up, g.finAt = t, make(chan struct{}, 1), make(chan struct{}), make(map[int]bool)
	g.accept, g.maxWindow = 1<<30, 0xffff
	b = newFlowBed(t, w, flowGuest{"wild", g.open}, 256)
	s, err := b.group.ListenTCP(netip.MustParseAddrPort("127.0.0.1:0"), uint16(wildPort))
	require.NoError(t, err)
	client = b.dial(s.Addr())
	select {
	case <-g.up:
	case <-time.After(flowPatience):
		t.Fatal("no handshake")
	}
	return b, client
}

func (g *wildGuest) open(t testing.TB, depth int) (datapath.Attachment, func(uint16) (flowListener, error)) {
	o := offloads["csum+tso"]
	o.Depth = depth
	ours, theirs := memory.Pair(o)
	g.att = theirs
	done := make(chan struct{})
	go func() {
		defer close(done)
		frames := make([]datapath.Frame, 8)
		for {
			n, err := theirs.QueuePairs()[0].ReadBatch(frames, func(n int) [][]byte { return [][]byte{make([]byte, n)} })
			if err != nil {
				return
			}
			for i := range frames[:n] {
				g.take(frames[i].Hdr, frames[i].Segs[0])
			}
		}
	}()
	t.Cleanup(func() { _ = theirs.Close(); <-done })
	return ours, nil
}

// take is told of a frame from the host.
func (g *wildGuest) take(hdr virtio.NetHdr, b []byte) {
	assert.NoError(g.t, hdr.Check(len(b), everyOffload))
	switch etherType(b) {
	case header.ARPProtocolNumber:
		a := header.ARP(b[14:])
		g.mu.Lock()
		g.hostMAC = append([]byte(nil), a.HardwareAddressSender()...)
		g.mu.Unlock()
		if a.Op() == header.ARPRequest {
			g.write(virtio.NetHdr{}, arpFrame(header.ARPReply, "\x02\x00\x00\x00\x00\x02", guestAddr.Addr(), "\xff\xff\xff\xff\xff\xff", hostAddr.Addr()))
			return
		}
		select {
		case g.pong <- struct{}{}:
		default:
		}
	case header.IPv4ProtocolNumber:
		ip := header.IPv4(b[14:])
		if !assert.Equal(g.t, len(ip), int(ip.TotalLength())) || !assert.True(g.t, ip.IsChecksumValid()) || ip.TransportProtocol() != header.TCPProtocolNumber {
			return
		}
		tcp := header.TCP(ip[ip.HeaderLength():])
		if answer := g.segment(hdr, tcp, tcp[tcp.DataOffset():]); answer != nil {
			g.write(answer.frame(g))
		}
	}
}

// segment holds a segment of the host's to what is known, and returns what the
// handshake asks for.
func (g *wildGuest) segment(hdr virtio.NetHdr, tcp header.TCP, data []byte) (answer *wildSegment) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if tcp.Flags()&header.TCPFlagRst != 0 {
		g.reset = true
		return nil
	}
	if tcp.Flags()&header.TCPFlagSyn != 0 {
		assert.False(g.t, g.isUp, "another SYN")
		g.hostPort, g.hostISS = tcp.SourcePort(), tcp.SequenceNumber()
		o := header.ParseSynOptions(tcp.Options(), false)
		g.scaled, g.stamped, g.hostStamp = o.WS >= 0 && g.ws >= 0, o.TS && g.ts, o.TSVal
		return &wildSegment{at: -1, flags: header.TCPFlagSyn | header.TCPFlagAck, window: 0xffff, options: g.synOptions()}
	}
	pos, ack := int(int32(tcp.SequenceNumber()-g.hostISS-1)), int(int32(tcp.AckNumber()-wildISS-1))
	if !g.isUp {
		g.isUp = true
		close(g.up)
	}
	if g.stamped {
		if o := header.ParseTCPOptions(tcp.Options()); assert.True(g.t, o.TS, "a segment without a timestamp (RFC 7323, 3.2)") {
			g.hostStamp = o.TSVal
		}
	}
	end := pos + len(data)
	assert.GreaterOrEqual(g.t, pos, -1)
	if len(data) > 0 && pos >= 0 { // what a probe of a silent peer brings does not count
		assert.LessOrEqual(g.t, end, g.offered, "bytes that the client has not sent")
		if !assert.Equal(g.t, stretch(hostByte, pos, len(data)), data, "other bytes than the client's, at %d", pos) {
			return nil
		}
		assert.LessOrEqual(g.t, end, g.acked+g.maxWindow+1, "beyond every window there was, and not only to probe it")
		limit := g.mss
		if limit == 0 {
			limit = 536
		}
		limit = max(limit, 88) // less is not believed, as by Linux (TCP_MIN_MSS)
		if hdr.GSOType == virtio.GSONone {
			assert.LessOrEqual(g.t, len(data), limit, "more than the guest's segments hold")
		} else {
			assert.LessOrEqual(g.t, int(hdr.GSOSize), limit, "more than the guest's segments hold")
		}
		g.seen = max(g.seen, end)
		if pos <= g.inOrder {
			g.inOrder = max(g.inOrder, min(end, g.accept))
		}
	}
	if tcp.Flags()&header.TCPFlagFin != 0 {
		g.ended = true
	}
	// What has come in order can be acknowledged, and nothing else.
	if assert.True(g.t, ack <= g.contiguous() || g.finAt[ack-1] && ack-1 <= g.contiguous(), "bytes up to %d acknowledged, of %d", ack, g.contiguous()) {
		g.hostAck = max(g.hostAck, ack)
	}
	window := int(tcp.WindowSize())
	if g.scaled {
		window <<= 14 // at the most
	}
	g.hostEdge = max(g.hostEdge, ack+window)
	return nil
}

// contiguous returns up to where the guest has sent its stream without a gap. g.mu
// is held.
func (g *wildGuest) contiguous() int {
	if len(g.covered) == 0 || g.covered[0].from > 0 {
		return 0
	}
	return g.covered[0].to
}

// cover notes that the guest sends a stretch of its stream. g.mu is held.
func (g *wildGuest) cover(s span) {
	s.from = max(s.from, 0)
	if s.from >= s.to {
		return
	}
	var all []span
	for _, c := range g.covered {
		switch {
		case c.to < s.from || c.from > s.to:
			all = append(all, c)
		default:
			s = span{min(s.from, c.from), max(s.to, c.to)}
		}
	}
	at := 0
	for at < len(all) && all[at].from < s.from {
		at++
	}
	g.covered = append(all[:at:at], append([]span{s}, all[at:]...)...)
}

func (g *wildGuest) synOptions() (o []byte) {
	if g.mss > 0 {
		o = append(o, header.TCPOptionMSS, 4, byte(g.mss>>8), byte(g.mss))
	}
	if g.ws >= 0 {
		o = append(o, header.TCPOptionNOP, header.TCPOptionWS, 3, byte(g.ws))
	}
	if g.sack {
		o = append(o, header.TCPOptionNOP, header.TCPOptionNOP, header.TCPOptionSACKPermitted, 2)
	}
	if g.ts {
		o = append(o, g.stampOption()...)
	}
	return o
}

// stampOption is the next timestamp, from which time goes on. g.mu is held.
func (g *wildGuest) stampOption() []byte {
	g.stamp++
	o := []byte{header.TCPOptionNOP, header.TCPOptionNOP, header.TCPOptionTS, 10}
	o = binary.BigEndian.AppendUint32(o, g.stamp)
	return binary.BigEndian.AppendUint32(o, g.hostStamp)
}

// A wildSegment is what the guest sends: of its stream from position at on, and an
// acknowledgement up to position ack.
type wildSegment struct {
	at, ack int
	flags   header.TCPFlags
	window  uint16
	options []byte
	n       int // bytes of payload
	// spoil is told the whole frame and its header before they go; what it makes of them
	// is nothing that a host may take.
	spoil func(hdr *virtio.NetHdr, b []byte)
}

// frame builds s, and notes what it says. g.mu is held.
func (s *wildSegment) frame(g *wildGuest) (virtio.NetHdr, []byte) {
	options := s.options
	for len(options)%4 != 0 {
		options = append(options, header.TCPOptionEOL)
	}
	const eth, ip = 14, 20
	tcp := 20 + len(options)
	b := make([]byte, eth+ip+tcp+s.n)
	copy(b, g.hostMAC)
	copy(b[6:], "\x02\x00\x00\x00\x00\x02\x08\x00")
	h := header.IPv4(b[eth:])
	h.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(b) - eth), TTL: 64, Protocol: uint8(header.TCPProtocolNumber),
		SrcAddr: address(guestAddr.Addr()), DstAddr: address(hostAddr.Addr()),
	})
	h.SetChecksum(^h.CalculateChecksum())
	header.TCP(b[eth+ip:]).Encode(&header.TCPFields{
		SrcPort: wildPort, DstPort: g.hostPort, SeqNum: wildISS + 1 + uint32(s.at), AckNum: g.hostISS + 1 + uint32(s.ack),
		DataOffset: uint8(tcp), Flags: s.flags, WindowSize: s.window,
	})
	copy(b[eth+ip+20:], options)
	hdr := virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: eth + ip, CSumOffset: header.TCPChecksumOffset}
	mss := 1448
	if s.n > mss {
		hdr.GSOType, hdr.GSOSize, hdr.HdrLen = virtio.GSOTCPv4, uint16(mss), uint16(eth+ip+tcp)
	}
	data := b[eth+ip+tcp:]
	// Payload counts in a segment with an acknowledgement that opens and ends nothing.
	if s.flags&(header.TCPFlagSyn|header.TCPFlagRst|header.TCPFlagAck) == header.TCPFlagAck && s.spoil == nil {
		copy(data, stretch(guestByte, s.at, s.n))
		g.cover(span{s.at, s.at + s.n})
		if s.flags&header.TCPFlagFin != 0 {
			g.finAt[s.at+s.n] = true
		}
		if s.ack <= g.offered+1 {
			g.acked = max(g.acked, s.ack)
		}
		window := int(s.window)
		if g.scaled {
			window <<= min(g.ws, 14) // RFC 7323, 2.3
		}
		g.maxWindow = max(g.maxWindow, window)
	} else {
		for i := range data {
			data[i] = ^guestByte(s.at + i)
		}
	}
	for i := range data[:max(0, min(len(data), -s.at))] {
		data[i] = 0xee // before the stream's first byte
	}
	if s.spoil != nil {
		s.spoil(&hdr, b)
	}
	return hdr, b
}

// say sends s.
func (g *wildGuest) say(s *wildSegment) {
	g.mu.Lock()
	hdr, b := s.frame(g)
	g.mu.Unlock()
	g.write(hdr, b)
}

// polite is a segment as a guest would send it now.
func (g *wildGuest) polite(at, n int) *wildSegment {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &wildSegment{at: at, n: n, ack: g.inOrder, flags: header.TCPFlagAck, window: 0xffff}
	if g.ended && g.inOrder == g.offered {
		s.ack++
	}
	if g.stamped {
		s.options = g.stampOption()
	}
	return s
}

func (g *wildGuest) write(hdr virtio.NetHdr, b []byte) {
	f := [1]datapath.Frame{{Hdr: hdr, Segs: [][]byte{b}, N: len(b)}}
	qp := g.att.QueuePairs()[0]
	for {
		n, err := qp.WriteBatch(f[:])
		if n == 1 || err != nil {
			return
		}
		<-qp.Room()
	}
}

// settle waits until the host has taken what was said so far.
func (g *wildGuest) settle() {
	g.write(virtio.NetHdr{}, arpFrame(header.ARPRequest, "\x02\x00\x00\x00\x00\x02", guestAddr.Addr(), "\xff\xff\xff\xff\xff\xff", hostAddr.Addr()))
	select {
	case <-g.pong:
	case <-time.After(flowPatience):
		g.t.Fatal("the gateway no longer answers")
	}
}

// read returns a number under g.mu.
func (g *wildGuest) read(n *int) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return *n
}

// A wildReader is the client's reading end.
type wildReader struct {
	g    *wildGuest
	gate *gate
	got  atomic.Int64
	err  error // io.EOF for the end
	done chan struct{}
}

// startReader reads the client's end, open or shut, and holds it to the guest's
// stream.
func startReader(g *wildGuest, client flowConn) *wildReader {
	r := &wildReader{g: g, gate: newGate(client), done: make(chan struct{})}
	go r.run()
	return r
}

func (r *wildReader) run() {
	defer close(r.done)
	buf := make([]byte, 64<<10)
	for {
		n, err := r.gate.Read(buf)
		at := int(r.got.Load())
		if n > 0 {
			assert.Equal(r.g.t, stretch(guestByte, at, n), buf[:n], "the client got other bytes than the guest's, at %d", at)
			assert.LessOrEqual(r.g.t, at+n, r.g.sent(), "the client got what the guest has not sent")
			r.got.Add(int64(n))
		}
		if err == io.EOF {
			r.g.mu.Lock()
			assert.True(r.g.t, r.g.finAt[at+n] || r.g.toldWriter, "the client's stream has ended at %d, where the guest's has not (C-13)", at+n)
			r.g.mu.Unlock()
		}
		if err != nil {
			r.err = err
			return
		}
	}
}

// sent is contiguous.
func (g *wildGuest) sent() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.contiguous()
}

// clientWrites has the client write n more bytes, or fewer if they do not fit.
func (g *wildGuest) clientWrites(client flowConn, pos, n int) (end int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.offered = max(g.offered, pos+n)
	_ = client.SetWriteDeadline(time.Now().Add(time.Millisecond))
	k, err := client.Write(stretch(hostByte, pos, n))
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		g.toldWriter = true
	}
	return pos + k
}

// A script is bytes that say what happens; all are 0 behind its end.
type script struct{ b []byte }

func (s *script) byte() (v byte) {
	if len(s.b) > 0 {
		v, s.b = s.b[0], s.b[1:]
	}
	return v
}

func (s *script) uint16() int { return int(s.byte())<<8 | int(s.byte()) }

// around returns a number near 0, mostly, or a far one.
func (s *script) around() int {
	switch b := s.byte(); {
	case b < 100:
		return 0
	case b < 200:
		return int(int8(s.byte()))
	case b < 240:
		return int(int16(s.uint16())) * 4
	default:
		return int(int32(uint32(s.uint16())<<16 | uint32(s.uint16())))
	}
}

// play runs a script against one flow and asserts all that holds whatever a guest
// does.
func play(t testing.TB, w way, in []byte) {
	s := &script{in}
	kind := s.byte()
	g := &wildGuest{
		mss: []int{1460, 0, 536, 88, 8960, 1}[kind%6], ws: []int{7, -1, 0, 14, 15}[s.byte()%5],
		sack: kind&64 != 0, ts: kind&128 != 0,
	}
	b, client := newWild(t, w, g)
	u := b.ours(client)
	r := startReader(g, client)
	r.gate.open(-1)
	harmless := kind&32 != 0 // without what may end the flow, which leaves little to be seen
	shut := false
	wrote, mayDie, stamps, closed := 0, false, false, false
	for step := 0; len(s.b) > 0 && step < 200; step++ {
		g.mu.Lock()
		next, edge, low := g.contiguous(), g.hostEdge, g.hostAck
		g.mu.Unlock()
		op := s.byte() % 16
		seg := g.polite(next, 0)
		seg.window = uint16(s.uint16())
		if harmless && (op == 10 || op == 15) {
			op = 0
		}
		switch op {
		case 0, 1, 2: // as it should be
			seg.n = s.uint16() % 4000
		case 3, 4: // overlaps, gaps, what is old
			seg.at, seg.n = next+s.around(), s.uint16()%3000
		case 5: // super-frames
			seg.at, seg.n = next+s.around(), s.uint16()%60000
		case 6, 7: // acknowledgements of anything
			seg.ack += s.around()
		case 8: // any flags
			seg.flags, seg.at, seg.n, seg.ack = header.TCPFlags(s.byte()), next+s.around(), s.uint16()%100, seg.ack+s.around()
		case 9: // a reset that is far outside
			seg.flags = header.TCPFlags(s.byte())&^header.TCPFlagSyn | header.TCPFlagRst
			seg.at = []int{low - 1 - s.uint16(), edge + 1<<26 + s.uint16(), low + 1<<31, low - 1<<30}[s.byte()%4]
		case 10: // a reset nearby
			seg.flags, seg.at = header.TCPFlagRst, next+s.around()
		case 11: // options of any kind, in their place or not
			stamps = true
			seg.options = nil
			for range s.byte() % 11 * 4 {
				seg.options = append(seg.options, s.byte())
			}
			seg.at, seg.n = next+s.around(), s.uint16()%200
		case 12: // lies
			seg.n = s.uint16() % 200
			at, v := int(s.byte()), s.byte()
			how := s.byte() % 4
			seg.spoil = func(hdr *virtio.NetHdr, frame []byte) {
				switch how {
				case 0: // a header beyond the segment
					frame[46] = 0xf0
					clear(frame[54:])
					frame[16], frame[17] = 0, 40
					h := header.IPv4(frame[14:])
					h.SetChecksum(0)
					h.SetChecksum(^h.CalculateChecksum())
				case 1: // a header too short
					frame[46] = v % 5 << 4
				case 2: // no checksum where one is due
					*hdr = virtio.NetHdr{}
					frame[50], frame[51] = 0xba, 0xd0
				case 3: // an address that is not the guest's
					frame[26+at%4] ^= v | 1
				}
			}
		case 13:
			wrote = g.clientWrites(client, wrote, s.uint16()%20000)
			continue
		case 14: // the client stops reading, or goes on
			if shut = !shut; shut {
				r.gate.stop()
			} else {
				r.gate.open(-1)
			}
			continue
		case 15: // the ends
			switch s.byte() % 4 {
			case 0:
				seg.flags |= header.TCPFlagFin
				seg.at, seg.n = next+s.around(), s.uint16()%100
			case 1:
				_ = client.CloseWrite()
				closed = true
				continue
			case 2:
				g.settle()
				continue
			}
		}
		// A reset in the window may end the flow, and so may the guest's answer to the
		// client's end.
		if seg.flags&header.TCPFlagRst != 0 && seg.at >= low && seg.at <= edge+1<<26 && seg.spoil == nil {
			mayDie = true
		}
		g.say(seg)
		g.settle()
	}
	if shut {
		r.gate.open(-1)
	}
	g.mu.Lock()
	fins := len(g.finAt)
	g.mu.Unlock()
	if !mayDie && fins == 0 && !(g.ts && stamps) && !closed {
		// Nothing of it has ended the flow, nor keeps what is right from the client.
		want := g.sent() + 1000
		for deadline := time.Now().Add(flowPatience); r.got.Load() < int64(want); time.Sleep(time.Millisecond) {
			from := min(max(g.read(&g.hostAck), want-20_000), want)
			for at := min(from, g.read(&g.hostAck)); at < want; at += 1400 {
				g.say(g.polite(at, min(1400, want-at)))
			}
			g.settle()
			if time.Now().After(deadline) {
				assert.Fail(t, "the flow has come to a stop", "%d of %d bytes, %d acknowledged", r.got.Load(), want, g.read(&g.hostAck))
				break
			}
			select {
			case <-r.done:
				assert.Fail(t, "the flow has ended", "%v", r.err)
				deadline = time.Time{}
			default:
			}
		}
	}
	u.guest.Abort()
	select {
	case <-b.ended:
	case <-time.After(flowPatience):
		assert.Fail(t, "the flow has not ended")
	}
	<-r.done
	assert.False(t, errors.Is(r.err, os.ErrDeadlineExceeded), "the client was told nothing")
	assert.Zero(t, b.host.Stats().Flows)
}

// stop shuts the gate.
func (g *gate) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left = 0
}

// wildSeeds are scripts that each do something of their own.
func wildSeeds() (all [][]byte) {
	r := rand.New(rand.NewPCG(4, 6))
	for op := range byte(16) {
		for kind := range byte(6) {
			b := []byte{kind*7 | op<<6, op}
			for range 12 {
				b = append(b, op, 0xff, 0xff)
				for range 8 {
					b = append(b, byte(r.Uint32()))
				}
				b = append(b, 0, 0xff, 0xff, 1, 0) // and some that is as it should be
			}
			all = append(all, b)
		}
	}
	return all
}

// FuzzFlow: whatever frames a guest sends into a flow, its client gets the guest's
// bytes in order or a reset, the guest the client's, and the flow ends when it is
// told to. The input is what the guest's SYN says, in two bytes, and then steps.
func FuzzFlow(f *testing.F) {
	for i, b := range wildSeeds() {
		if i%8 == 0 {
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, w := range ways {
			play(t, w, in)
		}
	})
}

// TestC47_WildFlows is FuzzFlow without the luck.
func TestC47_WildFlows(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			for i, b := range wildSeeds() {
				if testing.Short() && i%4 != 0 {
					continue
				}
				play(t, w, b)
				if t.Failed() {
					t.Fatalf("script %d: %x", i, b)
				}
			}
			r := rand.New(rand.NewPCG(1, 9))
			for range less(400, 40) {
				b := make([]byte, 2+r.IntN(400))
				for i := range b {
					b[i] = byte(r.Uint32())
				}
				play(t, w, b)
				if t.Failed() {
					t.Fatalf("script %x", b)
				}
			}
		})
	}
}

// A reset outside the window ends nothing, whatever else it says (RFC 5961, 3.2);
// nor does one inside it that is not the next byte's. The next byte's does.
func TestC47_ResetOutsideTheWindow(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			g := &wildGuest{mss: 1460, ws: 7, sack: true}
			b, client := newWild(t, w, g)
			r := startReader(g, client)
			r.gate.open(-1)
			g.say(g.polite(0, 5000))
			b.eventually("the first bytes", func() bool { return r.got.Load() == 5000 })
			for _, at := range []int{-1, 0, 1, 4999, 5001, 5002, 6000, 1 << 27, 1<<31 - 1, 5000 - 1<<31, 5000 - 1<<30, -100_000} {
				for _, flags := range []header.TCPFlags{header.TCPFlagRst, header.TCPFlagRst | header.TCPFlagAck, header.TCPFlagRst | header.TCPFlagFin} {
					seg := g.polite(at, 0)
					seg.flags = flags
					g.say(seg)
				}
			}
			for _, at := range []int{-1, 5000, 5001, 1 << 20} { // RFC 5961, 4.2
				seg := g.polite(at, 0)
				seg.flags = header.TCPFlagSyn
				g.say(seg)
			}
			g.settle()
			g.say(g.polite(5000, 1000))
			b.eventually("bytes behind it", func() bool { return r.got.Load() == 6000 })
			seg := g.polite(6000, 0)
			seg.flags = header.TCPFlagRst
			g.say(seg)
			b.mustEnd(relay.EndGuestReset)
			<-r.done
			assert.NotErrorIs(t, r.err, io.EOF)
		})
	}
}

// A guest that takes back room that it has promised, to nothing, and drops what came
// into it, gets everything in the end, and no byte beyond what it has ever promised.
func TestFlowWindowTakenBack(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			g := &wildGuest{mss: 1460, ws: -1, sack: true}
			b, client := newWild(t, w, g)
			const size = 300_000
			g.mu.Lock()
			g.offered, g.accept = size, 10_000
			g.mu.Unlock()
			var wg sync.WaitGroup
			wg.Go(func() {
				_, err := client.Write(stretch(hostByte, 0, size))
				assert.NoError(t, err)
			})
			b.eventually("more than it will take", func() bool { return g.read(&g.seen) > 10_000 })
			for _, window := range []uint16{5000, 1000, 1, 0, 0} {
				seg := g.polite(0, 0)
				seg.window = window
				g.say(seg)
			}
			g.settle()
			g.mu.Lock()
			g.accept = 1 << 30
			g.mu.Unlock()
			for deadline := time.Now().Add(flowPatience); g.read(&g.inOrder) < size && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
				seg := g.polite(0, 0)
				seg.window = 20_000
				g.say(seg)
			}
			assert.Equal(t, size, g.read(&g.inOrder))
			wg.Wait()
			client.reset()
			b.mustEnd(relay.EndClientReset)
			b.eventually("the guest is reset", func() bool {
				g.mu.Lock()
				defer g.mu.Unlock()
				return g.reset
			})
		})
	}
}

// A guest that sends crumbs, in order to a client that does not read or with a gap
// before each, holds no more memory than a window's worth of bytes may (C-17, C-47).
func TestC47_CrumbsAreBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("takes as many crumbs as would be too much: run without -short")
	}
	// A share of 8 MiB, twice over for what a byte may hold, and as much again for the
	// heap of everything else. All crumbs would take 100 MB, at some 500 bytes each.
	const crumbs, most = 200_000, 32 << 20
	for _, w := range ways {
		for name, step := range map[string]int{"in order": 1, "with gaps": 2} {
			t.Run(w.name+"/"+name, func(t *testing.T) {
				g := &wildGuest{mss: 1460, ws: 7, sack: true}
				b, client := newWild(t, w, g)
				// The sockets of the client take next to nothing.
				require.NoError(t, client.SetReadBuffer(1))
				require.NoError(t, b.ours(client).client.Control(func(fd uintptr) {
					assert.NoError(t, syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, 1))
				}))
				g.mu.Lock()
				g.covered = []span{{0, 1 << 30}} // which bytes pass is of no interest here
				g.mu.Unlock()
				held := func() int64 {
					var m runtime.MemStats
					runtime.GC()
					runtime.GC() // what pools hold goes with the second
					runtime.ReadMemStats(&m)
					return int64(m.HeapAlloc)
				}
				before := held()
				for i := range crumbs {
					at := i
					if step > 1 {
						at = 1 + step*i
					}
					g.say(&wildSegment{at: at, n: 1, flags: header.TCPFlagAck, window: 0xffff})
				}
				g.settle()
				after := held()
				t.Logf("%d kB held of %d crumbs; %d bytes acknowledged", (after-before)>>10, crumbs, g.read(&g.hostAck))
				assert.Less(t, after-before, int64(most))
				client.reset()
				b.mustEnd(relay.EndClientReset)
			})
		}
	}
}

var _ net.Conn = (*gate)(nil)
