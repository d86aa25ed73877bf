package trace

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// memoryPeer is the guest's end of a memory pair.
type memoryPeer struct {
	att  datapath.Attachment
	recv chan []byte
	once sync.Once
}

func newMemoryPeer(att datapath.Attachment) *memoryPeer { return &memoryPeer{att: att} }

func (p *memoryPeer) MaxFrame() int { return datapath.MaxFrame }

func (p *memoryPeer) Send(frame []byte) error {
	if len(frame) < 14 || len(frame) > datapath.MaxFrame {
		return errors.New("the guest's end takes no such frame")
	}
	qp := p.att.QueuePairs()[0]
	for {
		n, err := qp.WriteBatch([]datapath.Frame{{Segs: [][]byte{frame}, N: len(frame)}})
		if err != nil || n == 1 {
			return err
		}
		<-qp.Room()
	}
}

func (p *memoryPeer) Recv(timeout time.Duration) ([]byte, error) {
	p.once.Do(func() {
		p.recv = make(chan []byte)
		go func() {
			defer close(p.recv)
			for {
				f := make([]datapath.Frame, 1)
				buf := make([]byte, datapath.MaxFrame)
				if _, err := p.att.QueuePairs()[0].ReadBatch(f, func(int) [][]byte { return [][]byte{buf} }); err != nil {
					return
				}
				p.recv <- buf[:f[0].N]
			}
		}()
	})
	select {
	case b, ok := <-p.recv:
		if !ok {
			return nil, io.EOF
		}
		return b, nil
	case <-time.After(timeout):
		return nil, context.DeadlineExceeded
	}
}

func (p *memoryPeer) Leave() error {
	err := p.att.Close()
	if p.recv != nil {
		for range p.recv { // what its goroutine still holds
		}
	}
	return err
}

// TestConformance: a traced attachment is the attachment it was, while nobody
// reads, while someone does, and while someone ought to.
func TestConformance(t *testing.T) {
	for name, open := range map[string]func(t *testing.T, tr *Tracer){
		"off": func(*testing.T, *Tracer) {},
		"read": func(t *testing.T, tr *Tracer) {
			r, err := tr.Open(ReaderOptions{})
			require.NoError(t, err)
			var reading sync.WaitGroup
			reading.Go(func() { _ = r.Stream(context.Background(), io.Discard, nil) })
			t.Cleanup(func() { r.Close(); reading.Wait() })
		},
		"stuck": func(t *testing.T, tr *Tracer) {
			r, err := tr.open(ReaderOptions{}, 8, 1<<20)
			require.NoError(t, err)
			t.Cleanup(r.Close)
		},
	} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Conformance(t, func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
				tr := New(Options{})
				open(t, tr)
				ours, guest := memory.Pair(memory.Options{})
				att, err := tr.Wrap("vm", ours)
				require.NoError(t, err)
				return att, newMemoryPeer(guest)
			})
		})
	}
}

// A bed is a traced pair and what its one reader has written.
type bed struct {
	tracer *Tracer
	att    datapath.Attachment
	guest  datapath.Attachment
	reader *Reader
	out    bytes.Buffer
	done   chan error
}

func newBed(t *testing.T, o Options, ro ReaderOptions) *bed {
	t.Helper()
	datapathtest.Leaks(t)
	b := &bed{tracer: New(o), done: make(chan error, 1)}
	offloads := virtio.OffloadCSum | virtio.OffloadTSO4 | virtio.OffloadTSO6 | virtio.OffloadUSO4 | virtio.OffloadUSO6
	ours, guest := memory.Pair(memory.Options{ToGuest: offloads, FromGuest: offloads, QueuePairs: 2})
	b.guest = guest
	var err error
	b.att, err = b.tracer.Wrap("vm1", ours)
	require.NoError(t, err)
	assert.Equal(t, ours.Info(), b.att.Info())
	b.reader, err = b.tracer.Open(ro)
	require.NoError(t, err)
	go func() { b.done <- b.reader.Stream(context.Background(), &b.out, nil) }()
	t.Cleanup(func() {
		_ = b.att.Close()
		_ = guest.Close()
	})
	return b
}

// send sends a frame to the guest.
func (b *bed) send(t *testing.T, queue int, hdr virtio.NetHdr, frame []byte) {
	t.Helper()
	n, err := b.att.QueuePairs()[queue].WriteBatch([]datapath.Frame{{Hdr: hdr, Segs: [][]byte{frame[:10], frame[10:]}, N: len(frame)}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// receive has the guest send a frame, and returns it as our end reads it.
func (b *bed) receive(t *testing.T, queue int, hdr virtio.NetHdr, frame []byte) *datapath.Frame {
	t.Helper()
	n, err := b.guest.QueuePairs()[queue].WriteBatch([]datapath.Frame{{Hdr: hdr, Segs: [][]byte{frame}, N: len(frame)}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	frames := make([]datapath.Frame, 1)
	n, err = b.att.QueuePairs()[queue].ReadBatch(frames, func(int) [][]byte {
		return [][]byte{make([]byte, 128), make([]byte, datapath.MaxFrame)}
	})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	return &frames[0]
}

// end ends the link and the reader, and returns what was written.
func (b *bed) end(t *testing.T) []byte {
	t.Helper()
	require.NoError(t, b.att.Close())
	for _, qp := range b.att.QueuePairs() { // the reader of each learns of the end
		_, err := qp.ReadBatch(make([]datapath.Frame, 1), nil)
		require.ErrorIs(t, err, datapath.ErrClosed)
	}
	b.reader.Close()
	require.NoError(t, <-b.done)
	return b.out.Bytes()
}

// parsed is a stream, read back.
type parsed struct {
	interfaces []Interface
	packets    []Packet
	received   map[string]uint64
	lost       map[string]uint64
}

func mustParse(t testing.TB, stream []byte) *parsed {
	t.Helper()
	p := &parsed{received: make(map[string]uint64), lost: make(map[string]uint64)}
	r := NewBlockReader(bytes.NewReader(stream))
	for {
		b, err := r.Next()
		if err == io.EOF {
			return p
		}
		require.NoError(t, err)
		switch b.Kind {
		case BlockInterface:
			i, err := b.Interface()
			require.NoError(t, err)
			p.interfaces = append(p.interfaces, i)
		case BlockPacket:
			pkt, err := b.Packet()
			require.NoError(t, err)
			pkt.Data = bytes.Clone(pkt.Data)
			p.packets = append(p.packets, pkt)
		case BlockStatistics:
			id, received, lost, err := b.Statistics()
			require.NoError(t, err)
			p.received[p.interfaces[id].Name], p.lost[p.interfaces[id].Name] = received, lost
		}
	}
}

// lines returns the stream's packets as people see them, without their times.
func (p *parsed) lines() []string {
	var lines []string
	for _, pkt := range p.packets {
		_, line, _ := strings.Cut(pkt.Line(p.interfaces[pkt.Interface]), " ")
		lines = append(lines, line)
	}
	return lines
}

var (
	hostMAC, guestMAC = []byte{2, 0, 0, 0, 0, 1}, []byte{2, 0, 0, 0, 0, 2}
	hostAddr          = netip.MustParseAddrPort("10.0.2.1:40000")
	guestAddr         = netip.MustParseAddrPort("10.0.2.2:80")
)

// frame4 makes an IPv4 frame with a transport header and n bytes behind it; its
// checksum is partial, as hdr says, or whole.
func frame4(proto uint8, src, dst netip.AddrPort, n int, partial bool) ([]byte, virtio.NetHdr) {
	l4, at := 20, 16
	if proto == protoUDP {
		l4, at = 8, 6
	}
	b := append(append(bytes.Clone(guestMAC), hostMAC...), 8, 0)
	b = append(b, make([]byte, 20+l4+n)...)
	ip := b[14:]
	ip[0], ip[8], ip[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
	copy(ip[12:], src.Addr().AsSlice())
	copy(ip[16:], dst.Addr().AsSlice())
	binary.BigEndian.PutUint16(ip[10:], ^fold(add(0, ip[:20])))
	t := ip[20:]
	binary.BigEndian.PutUint16(t, src.Port())
	binary.BigEndian.PutUint16(t[2:], dst.Port())
	if proto == protoTCP {
		binary.BigEndian.PutUint32(t[4:], 1000)
		binary.BigEndian.PutUint32(t[8:], 2000)
		t[12], t[13] = 5<<4, 0x18
		binary.BigEndian.PutUint16(t[14:], 64240)
	} else {
		binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
	}
	for i := range n {
		t[l4+i] = byte(i * 7)
	}
	pseudo := fold(add(uint64(proto)+uint64(len(t)), ip[12:20]))
	binary.BigEndian.PutUint16(t[at:], pseudo)
	if partial {
		return b, virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 34, CSumOffset: uint16(at)}
	}
	binary.BigEndian.PutUint16(t[at:], ^fold(add(0, t)))
	return b, virtio.NetHdr{}
}

// TestStream: what passes is written as it passed: direction, queue, order, flow.
func TestStream(t *testing.T) {
	asked := make(map[FlowKey]int)
	b := newBed(t, Options{Flow: func(k FlowKey) (Flow, bool) {
		asked[k]++
		return Flow{Owner: "docker web", ID: 12}, k.Protocol == protoTCP
	}}, ReaderOptions{})
	syn, hdr := frame4(protoTCP, hostAddr, guestAddr, 0, true)
	b.send(t, 0, hdr, syn)
	answer, _ := frame4(protoTCP, guestAddr, hostAddr, 3, false)
	b.receive(t, 1, virtio.NetHdr{}, answer)
	datagram, hdr := frame4(protoUDP, hostAddr, guestAddr, 5, true)
	b.send(t, 1, hdr, datagram)
	super, hdr := frame4(protoTCP, hostAddr, guestAddr, 60000, true)
	hdr.GSOType, hdr.GSOSize, hdr.HdrLen = virtio.GSOTCPv4, 1448, 54
	b.send(t, 0, hdr, super)

	p := mustParse(t, b.end(t))
	assert.Equal(t, []Interface{{Name: "vm1/q0"}, {Name: "vm1/q1"}}, p.interfaces)
	assert.Equal(t, []string{
		"vm1/q0 Out IP 10.0.2.1.40000 > 10.0.2.2.80: Flags [P.], seq 1000, ack 2000, win 64240, length 0, owner docker web, flow 12",
		"vm1/q1 In  IP 10.0.2.2.80 > 10.0.2.1.40000: Flags [P.], seq 1000:1003, ack 2000, win 64240, length 3, owner docker web, flow 12",
		"vm1/q1 Out IP 10.0.2.1.40000 > 10.0.2.2.80: UDP, length 5",
		"vm1/q0 Out IP 10.0.2.1.40000 > 10.0.2.2.80: Flags [P.], seq 1000:61000, ack 2000, win 64240, length 60000, " +
			"owner docker web, flow 12, super-frame of segments of 1448 bytes",
	}, p.lines())
	assert.Equal(t, map[FlowKey]int{
		{VM: "vm1", Protocol: protoTCP, Gateway: hostAddr, Guest: guestAddr}: 3,
		{VM: "vm1", Protocol: protoUDP, Gateway: hostAddr, Guest: guestAddr}: 1,
	}, asked, "by the guest's end, whichever way the frame went")
	assert.Equal(t, map[string]uint64{"vm1/q0": 2, "vm1/q1": 2}, p.received)
	assert.Equal(t, map[string]uint64{"vm1/q0": 0, "vm1/q1": 0}, p.lost)
	whole, _ := frame4(protoTCP, hostAddr, guestAddr, 60000, false)
	assert.True(t, bytes.Equal(whole, p.packets[3].Data), "whole, its checksum completed")
	assert.Equal(t, answer, p.packets[1].Data)
	for i := range p.packets[1:] {
		assert.LessOrEqual(t, p.packets[i].At, p.packets[i+1].At)
	}
	assert.WithinDuration(t, time.Now(), time.Unix(0, p.packets[0].At), time.Minute)
}

// TestSnap: a frame cut short says how long it was, and that its checksum is
// partial.
func TestSnap(t *testing.T) {
	b := newBed(t, Options{}, ReaderOptions{Snap: 60})
	frame, hdr := frame4(protoTCP, hostAddr, guestAddr, 500, true)
	b.send(t, 0, hdr, frame)
	p := mustParse(t, b.end(t))
	require.Len(t, p.packets, 1)
	assert.Equal(t, frame[:60], p.packets[0].Data)
	assert.Equal(t, len(frame), p.packets[0].Length)
	assert.Equal(t, []string{"checksum partial"}, p.packets[0].Comments)
}

// TestHostileHeader: a partial checksum that is not the frame's own is left as
// it came (FB-148).
func TestHostileHeader(t *testing.T) {
	b := newBed(t, Options{}, ReaderOptions{})
	frame, _ := frame4(protoTCP, guestAddr, hostAddr, 500, true)
	runt := append(append(bytes.Clone(hostMAC), guestMAC...), 8, 0, 0x45)
	for _, hdr := range []virtio.NetHdr{
		{Flags: 1, CSumStart: 0, CSumOffset: 0}, {Flags: 1, CSumStart: 65535, CSumOffset: 65535},
		{Flags: 1, CSumStart: 34, CSumOffset: 6}, {Flags: 255, GSOType: 255, HdrLen: 65535, CSumStart: 553, CSumOffset: 0},
	} {
		b.receive(t, 0, hdr, frame)
		b.receive(t, 0, hdr, runt)
	}
	p := mustParse(t, b.end(t))
	require.Len(t, p.packets, 8)
	for i, pkt := range p.packets {
		want := frame
		if i%2 == 1 {
			want = runt
		}
		assert.Equal(t, want, pkt.Data)
		assert.Contains(t, pkt.Comments, "checksum partial")
	}
}

// TestDrops: a frame that is dropped is written once, with the reason, whoever
// drops it.
func TestDrops(t *testing.T) {
	for _, dropsOnly := range []bool{false, true} {
		b := newBed(t, Options{}, ReaderOptions{Drops: dropsOnly})
		in, hdr := frame4(protoTCP, guestAddr, hostAddr, 3, true)
		b.receive(t, 0, virtio.NetHdr{}, in)
		f := b.receive(t, 0, hdr, in)
		observer := b.att.QueuePairs()[0].(datapath.DropObserver)
		observer.DroppedFromGuest(f, datapath.DropForeign)
		out, _ := frame4(protoUDP, hostAddr, guestAddr, 1, false)
		observer.DroppedToGuest(&datapath.Frame{Segs: [][]byte{out}, N: len(out)}, datapath.DropQueueFull)
		b.att.Stats().Drop(datapath.DropLinkDown)
		b.att.Stats().DropShown(datapath.DropForeign)
		b.send(t, 0, virtio.NetHdr{}, out)

		want := []string{
			"vm1/q0 In  IP 10.0.2.2.80 > 10.0.2.1.40000: Flags [P.], seq 1000:1003, ack 2000, win 64240, length 3",
			"vm1/q0 In  IP 10.0.2.2.80 > 10.0.2.1.40000: Flags [P.], seq 1000:1003, ack 2000, win 64240, length 3, " +
				"checksum partial, drop foreign-source",
			"vm1/q0 Out IP 10.0.2.1.40000 > 10.0.2.2.80: UDP, length 1, drop queue-full",
			"vm1/drops ?   the transport dropped a frame: link-down",
			"vm1/q0 Out IP 10.0.2.1.40000 > 10.0.2.2.80: UDP, length 1",
		}
		if dropsOnly {
			want = want[1:4]
		}
		assert.Equal(t, want, mustParse(t, b.end(t)).lines())
	}
}

// TestShortWrite: a frame for which there was no room is not written, until it
// passes.
func TestShortWrite(t *testing.T) {
	datapathtest.Leaks(t)
	tr := New(Options{})
	ours, guest := memory.Pair(memory.Options{Depth: 1})
	defer guest.Close()
	att, err := tr.Wrap("vm1", ours)
	require.NoError(t, err)
	defer att.Close()
	r, err := tr.Open(ReaderOptions{})
	require.NoError(t, err)
	one, _ := frame4(protoUDP, hostAddr, guestAddr, 1, false)
	two, _ := frame4(protoUDP, hostAddr, guestAddr, 2, false)
	frames := []datapath.Frame{{Segs: [][]byte{one}, N: len(one)}, {Segs: [][]byte{two}, N: len(two)}}
	n, err := att.QueuePairs()[0].WriteBatch(frames)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	n, err = att.QueuePairs()[0].WriteBatch(frames[1:])
	require.NoError(t, err)
	require.Zero(t, n)
	_, err = guest.QueuePairs()[0].ReadBatch(make([]datapath.Frame, 1), func(n int) [][]byte { return [][]byte{make([]byte, n)} })
	require.NoError(t, err)
	n, err = att.QueuePairs()[0].WriteBatch(frames[1:])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	r.Close()
	var out bytes.Buffer
	require.NoError(t, r.Stream(t.Context(), &out, nil))
	p := mustParse(t, out.Bytes())
	require.Len(t, p.packets, 2)
	assert.Equal(t, one, p.packets[0].Data)
	assert.Equal(t, two, p.packets[1].Data)
}

// TestLoss: a reader that does not read loses records; they are counted, in the
// next packet and in the statistics.
func TestLoss(t *testing.T) {
	datapathtest.Leaks(t)
	tr := New(Options{})
	ours, guest := memory.Pair(memory.Options{Depth: 1000})
	defer guest.Close()
	att, err := tr.Wrap("vm1", ours)
	require.NoError(t, err)
	defer att.Close()
	r, err := tr.open(ReaderOptions{}, 8, 1<<20)
	require.NoError(t, err)
	frame, _ := frame4(protoUDP, hostAddr, guestAddr, 1, false)
	send := func(n int) {
		for range n {
			sent, err := att.QueuePairs()[0].WriteBatch([]datapath.Frame{{Segs: [][]byte{frame}, N: len(frame)}})
			require.NoError(t, err)
			require.Equal(t, 1, sent, "traffic is not stopped")
		}
	}
	send(100)
	assert.EqualValues(t, 92, r.Lost())
	assert.Equal(t, Stats{Readers: 1, Lost: 92, Flown: map[string]uint64{}}, tr.Stats())
	r.begin()
	for range 8 {
		s := r.ring.oldest()
		r.packet(s)
		r.ring.free(s)
	}
	send(10)
	r.Close()
	stream := bytes.NewBuffer(bytes.Clone(r.out))
	r.out = nil
	require.NoError(t, r.finish(stream, nil))
	p := mustParse(t, stream.Bytes())
	require.Len(t, p.packets, 16)
	for i, pkt := range p.packets {
		if i == 8 {
			assert.EqualValues(t, 92, pkt.Lost)
			assert.Contains(t, p.lines()[i], "92 lost before it")
		} else {
			assert.Zero(t, pkt.Lost)
		}
	}
	assert.EqualValues(t, 94, p.lost["vm1/q0"])
	assert.EqualValues(t, 110, p.received["vm1/q0"])

	// What a reader lost that has left stays counted, beside another's.
	other, err := tr.open(ReaderOptions{}, 8, 1<<20)
	require.NoError(t, err)
	send(10)
	assert.Equal(t, Stats{Readers: 1, Lost: 94 + 2, Flown: map[string]uint64{}}, tr.Stats())
	other.Close()
	assert.Equal(t, Stats{Lost: 94 + 2, Flown: map[string]uint64{}}, tr.Stats())
}

// TestMillion: a million frames, of several writers and both ways, each written
// once and each writer's in order (C-50).
func TestMillion(t *testing.T) {
	datapathtest.Leaks(t)
	frames := 1_000_000
	if testing.Short() || raceEnabled {
		frames = 50_000
	}
	const writers = 4
	tr := New(Options{})
	ours, guest := memory.Pair(memory.Options{QueuePairs: writers})
	att, err := tr.Wrap("vm1", ours)
	require.NoError(t, err)
	r, err := tr.Open(ReaderOptions{})
	require.NoError(t, err)
	out, in := io.Pipe()
	var all sync.WaitGroup
	all.Go(func() {
		assert.NoError(t, r.Stream(context.Background(), in, nil))
		_ = in.Close()
	})
	// A writer that would overrun the reader waits for it.
	var room sync.Cond
	room.L = new(sync.Mutex)
	behind := 0
	each := frames / writers / 2
	copyFrames := func(w int, from, to datapath.QueuePair) {
		frame, _ := frame4(protoUDP, hostAddr, guestAddr, 64, false)
		buf := make([]byte, datapath.MaxFrame)
		read := make([]datapath.Frame, 1)
		for i := range each {
			room.L.Lock()
			for behind > ringSlots/2 {
				room.Wait()
			}
			behind++
			room.L.Unlock()
			binary.BigEndian.PutUint32(frame[42:], uint32(w))
			binary.BigEndian.PutUint32(frame[46:], uint32(i))
			n, err := from.WriteBatch([]datapath.Frame{{Segs: [][]byte{frame}, N: len(frame)}})
			if !assert.NoError(t, err) || !assert.Equal(t, 1, n) {
				return
			}
			if _, err := to.ReadBatch(read, func(int) [][]byte { return [][]byte{buf} }); !assert.NoError(t, err) {
				return
			}
			if q, ok := to.(*queuePair); ok {
				q.settle() // as the next ReadBatch does: this reader waits for the trace
			}
		}
	}
	for w := range writers {
		all.Go(func() { copyFrames(w, att.QueuePairs()[w], guest.QueuePairs()[w]) })
		all.Go(func() { copyFrames(writers+w, guest.QueuePairs()[w], att.QueuePairs()[w]) })
	}
	next := make([]uint32, 2*writers)
	blocks := NewBlockReader(out)
	at := int64(0)
	for seen := 0; seen < frames; {
		b, err := blocks.Next()
		require.NoError(t, err)
		if b.Kind != BlockPacket {
			continue
		}
		p, err := b.Packet()
		require.NoError(t, err)
		w, i := binary.BigEndian.Uint32(p.Data[42:]), binary.BigEndian.Uint32(p.Data[46:])
		require.Equal(t, next[w], i, "writer %d", w)
		next[w]++
		require.Equal(t, w >= writers, p.Dir == Inbound)
		require.GreaterOrEqual(t, p.At, at)
		at = p.At
		seen++
		room.L.Lock()
		behind--
		room.L.Unlock()
		room.Broadcast()
	}
	r.Close()
	rest, err := io.ReadAll(blocks.in)
	require.NoError(t, err)
	assert.Len(t, rest, writers*(12+12+2*12+4), "statistics, and no frame more")
	all.Wait()
	assert.Zero(t, r.Lost())
	require.NoError(t, att.Close())
	require.NoError(t, guest.Close())
}

// TestReaders: there is a bound, each sees its own VM, and a reader that comes
// late sees what is there.
func TestReaders(t *testing.T) {
	datapathtest.Leaks(t)
	tr := New(Options{})
	var open []*Reader
	for range MaxReaders {
		r, err := tr.open(ReaderOptions{VM: "vm2"}, 8, 1<<20)
		require.NoError(t, err)
		open = append(open, r)
	}
	_, err := tr.Open(ReaderOptions{})
	require.ErrorIs(t, err, ErrTooMany)
	_, err = tr.open(ReaderOptions{}, 8, 1<<60) // a ring that cannot be made is not made
	require.ErrorIs(t, err, ErrTooMany)
	open[3].Close()
	open[3].Close()
	again, err := tr.open(ReaderOptions{VM: "vm1"}, 8, 1<<20)
	require.NoError(t, err)
	assert.Equal(t, 3, again.number)
	for _, vm := range []string{"vm1", "vm2"} {
		ours, guest := memory.Pair(memory.Options{})
		defer guest.Close()
		att, err := tr.Wrap(vm, ours)
		require.NoError(t, err)
		defer att.Close()
		frame, _ := frame4(protoUDP, hostAddr, guestAddr, 64, false)
		_, err = att.QueuePairs()[0].WriteBatch([]datapath.Frame{{Segs: [][]byte{frame}, N: len(frame)}})
		require.NoError(t, err)
	}
	require.NoError(t, tr.Close())
	assert.Nil(t, tr.readers.Load())
	var out bytes.Buffer
	require.NoError(t, again.Stream(t.Context(), &out, nil))
	p := mustParse(t, out.Bytes())
	assert.Equal(t, []Interface{{Name: "vm1/q0"}}, p.interfaces)
	assert.Len(t, p.packets, 1)
}

// TestAllocs: tracing allocates nothing on the datapath, read or not, filtered
// or not, recorded in flight or not.
func TestAllocs(t *testing.T) {
	if raceEnabled {
		t.Skip("needs a build without the race detector, whose sync.Pool drops at random")
	}
	filter, err := ParseFilter("tcp port 80 and host 10.0.2.2 or udp")
	require.NoError(t, err)
	for name, o := range map[string]ReaderOptions{"plain": {}, "filter": {Filter: filter}} {
		t.Run(name, func(t *testing.T) {
			path := t.TempDir() + "/flight"
			tr := New(Options{FlightPath: func(string) string { return path }, FlightFrames: 100})
			defer func() { assert.NoError(t, tr.Close()) }()
			r, err := tr.Open(o)
			require.NoError(t, err)
			att, err := tr.Wrap("vm1", &echo{frames: 4})
			require.NoError(t, err)
			q := att.QueuePairs()[0].(*queuePair)
			frames := make([]datapath.Frame, 32)
			frame, _ := frame4(protoTCP, hostAddr, guestAddr, 1400, false)
			for i := range frames {
				frames[i] = datapath.Frame{Segs: [][]byte{frame[:54], frame[54:]}, N: len(frame)}
			}
			assert.Zero(t, testing.AllocsPerRun(100, func() {
				_, _ = q.WriteBatch(frames)
				_, _ = q.ReadBatch(frames, nil)
				q.settle()
				for s := r.ring.oldest(); s != nil; s = r.ring.oldest() {
					r.ring.free(s)
				}
			}))
			assert.Zero(t, r.Lost())
			r.Close()
		})
	}
}

// echo is an attachment that takes everything, and gives what is there.
type echo struct {
	stats  datapath.Stats
	frames int
}

func (e *echo) Stats() *datapath.Stats { return &e.stats }

func (e *echo) Info() datapath.Info              { return datapath.Info{} }
func (e *echo) QueuePairs() []datapath.QueuePair { return []datapath.QueuePair{e} }
func (e *echo) Close() error                     { return nil }
func (e *echo) Room() <-chan struct{}            { return nil }

func (e *echo) WriteBatch(f []datapath.Frame) (int, error) { return len(f), nil }
func (e *echo) ReadBatch(f []datapath.Frame, _ func(int) [][]byte) (int, error) {
	return min(e.frames, len(f)), nil
}
