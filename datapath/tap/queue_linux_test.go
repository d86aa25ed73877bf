package tap

import (
	"encoding/binary"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// TestSuperFrames: a super-frame or a frame with a partial checksum crosses
// whole, in both directions, with what its header says intact. The peer is a
// packet socket with virtio-net headers of its own.
func TestSuperFrames(t *testing.T) {
	datapathtest.Leaks(t)
	ns := newGuestNS(t)
	a := mustOpen(t, ns, Config{})
	p := newPeer(t, ns, true)
	info := a.Info()
	for _, test := range []struct {
		name    string
		needs   virtio.Offloads
		v6, tcp bool
		payload int
		hdr     virtio.NetHdr // without offsets
	}{
		{"CSumTCP4", virtio.OffloadCSum, false, true, 1000, virtio.NetHdr{}},
		{"CSumUDP4", virtio.OffloadCSum, false, false, 1000, virtio.NetHdr{}},
		{"CSumTCP6", virtio.OffloadCSum, true, true, 1000, virtio.NetHdr{}},
		{"CSumUDP6", virtio.OffloadCSum, true, false, 1000, virtio.NetHdr{}},
		{"TSO4", virtio.OffloadTSO4, false, true, 3 * 1448, virtio.NetHdr{GSOType: virtio.GSOTCPv4, GSOSize: 1448}},
		// A frame of 65536 bytes the kernel cuts up itself (gso_max_size).
		{"TSO4Longest", virtio.OffloadTSO4, false, true, 65535 - 54, virtio.NetHdr{GSOType: virtio.GSOTCPv4, GSOSize: 1448}},
		{"TSO6", virtio.OffloadTSO6, true, true, 45 * 1428, virtio.NetHdr{GSOType: virtio.GSOTCPv6, GSOSize: 1428}},
		{"ECN4", virtio.OffloadTSO4 | virtio.OffloadECN, false, true, 2 * 1448, virtio.NetHdr{GSOType: virtio.GSOTCPv4 | virtio.GSOECN, GSOSize: 1448}},
		{"USO4", virtio.OffloadUSO4, false, false, 4 * 1400, virtio.NetHdr{GSOType: virtio.GSOUDPL4, GSOSize: 1400}},
		{"USO6", virtio.OffloadUSO6, true, false, 4 * 1400, virtio.NetHdr{GSOType: virtio.GSOUDPL4, GSOSize: 1400}},
	} {
		t.Run(test.name, func(t *testing.T) {
			frame, hdr := makePacket(test.v6, test.tcp, test.payload)
			hdr.GSOType, hdr.GSOSize = test.hdr.GSOType, test.hdr.GSOSize
			check := func(t *testing.T, got virtio.NetHdr, b []byte) {
				t.Helper()
				assert.Equal(t, frame, b)
				// The kernel makes its own hint of what it has in one piece.
				assert.True(t, got.HdrLen == 0 || got.HdrLen >= hdr.HdrLen, "header length %d", got.HdrLen)
				got.HdrLen = hdr.HdrLen
				assert.Equal(t, hdr, got)
			}
			t.Run("ToGuest", func(t *testing.T) {
				datapathtest.Require(t, "uso", info.ToGuest.Has(test.needs), "Linux 6.2 or newer")
				n, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{{
					Hdr: hdr, Segs: [][]byte{frame[:hdr.HdrLen], frame[hdr.HdrLen:]}, N: len(frame),
				}})
				require.NoError(t, err)
				require.Equal(t, 1, n)
				require.Empty(t, a.Stats().AllDrops())
				b, err := p.Recv(patience)
				require.NoError(t, err)
				var got virtio.NetHdr
				got.Parse(b[:virtio.HdrSize])
				check(t, got, b[virtio.HdrSize:])
			})
			t.Run("FromGuest", func(t *testing.T) {
				datapathtest.Require(t, "uso", info.FromGuest.Has(test.needs), "Linux 6.2 or newer")
				b := make([]byte, virtio.HdrSize+len(frame))
				hdr.Put(b[:virtio.HdrSize])
				copy(b[virtio.HdrSize:], frame)
				require.NoError(t, p.Send(b))
				frames := make([]datapath.Frame, 4)
				n, err := a.QueuePairs()[0].ReadBatch(frames, lend)
				require.NoError(t, err)
				require.Equal(t, 1, n)
				f := frames[0]
				require.NoError(t, f.Hdr.Check(f.N, info.FromGuest))
				whole := append(append([]byte(nil), f.Segs[0]...), f.Segs[1]...)
				check(t, f.Hdr, whole[:f.N])
			})
		})
	}
}

func lend(int) [][]byte { return [][]byte{make([]byte, 128), make([]byte, datapath.MaxFrame)} }

// makePacket makes a TCP segment or UDP datagram with a partial checksum, and
// the virtio-net header that says so.
func makePacket(v6, tcp bool, payload int) ([]byte, virtio.NetHdr) {
	l4 := 8
	proto := byte(unix.IPPROTO_UDP)
	hdr := virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 14 + 20, CSumOffset: 6}
	if tcp {
		l4, proto, hdr.CSumOffset = 20, unix.IPPROTO_TCP, 16
	}
	if v6 {
		hdr.CSumStart = 14 + 40
	}
	hdr.HdrLen = hdr.CSumStart + uint16(l4)
	b := make([]byte, int(hdr.HdrLen)+payload)
	copy(b, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2})
	ip := b[14:]
	var src, dst []byte
	if v6 {
		binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IPV6)
		ip[0] = 6 << 4
		binary.BigEndian.PutUint16(ip[4:], uint16(l4+payload))
		ip[6], ip[7] = proto, 64
		copy(ip[8:], []byte{0x20, 0x01, 0x0d, 0xb8, 15: 1})
		copy(ip[24:], []byte{0x20, 0x01, 0x0d, 0xb8, 15: 2})
		src, dst = ip[8:24], ip[24:40]
	} else {
		binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
		ip[0] = 4<<4 | 5
		binary.BigEndian.PutUint16(ip[2:], uint16(20+l4+payload))
		ip[8], ip[9] = 64, proto
		copy(ip[12:], []byte{198, 18, 0, 1, 198, 18, 0, 2})
		src, dst = ip[12:16], ip[16:20]
		binary.BigEndian.PutUint16(ip[10:], ^sum(ip[:20]))
	}
	l := b[hdr.CSumStart:]
	binary.BigEndian.PutUint16(l[0:], 1000)
	binary.BigEndian.PutUint16(l[2:], 2000)
	if tcp {
		l[12], l[13] = 5<<4, 0x18 // data offset, PSH|ACK
	} else {
		binary.BigEndian.PutUint16(l[4:], uint16(l4+payload))
	}
	// A partial checksum starts from the pseudo-header's (virtio 1.3, 5.1.6.2).
	pseudo := append(append(append([]byte(nil), src...), dst...), 0, proto, byte((l4+payload)>>8), byte(l4+payload))
	binary.BigEndian.PutUint16(l[hdr.CSumOffset:], sum(pseudo))
	for i := range payload {
		l[l4+i] = byte(i * 31)
	}
	return b, hdr
}

// sum is the Internet checksum's sum (RFC 1071), not inverted.
func sum(b []byte) uint16 {
	var s uint32
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// TestDrops: what the kernel refuses is counted by reason, is no error, and does
// not keep the frames behind it.
func TestDrops(t *testing.T) {
	datapathtest.Leaks(t)
	ns := newGuestNS(t)
	a := mustOpen(t, ns, Config{})
	p := newPeer(t, ns, false)
	good, _ := makePacket(false, false, 100)
	frame := func(h virtio.NetHdr) datapath.Frame {
		return datapath.Frame{Hdr: h, Segs: [][]byte{good}, N: len(good)}
	}
	write := func(frames ...datapath.Frame) {
		t.Helper()
		n, err := a.QueuePairs()[0].WriteBatch(frames)
		require.NoError(t, err)
		require.Equal(t, len(frames), n)
	}
	write(
		frame(virtio.NetHdr{GSOType: 77}), // no such type
		frame(virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 60000, CSumOffset: 16}), // beyond the frame
		frame(virtio.NetHdr{}),
	)
	got, err := p.Recv(patience)
	require.NoError(t, err)
	assert.Equal(t, good, got)
	assert.Equal(t, map[string]uint64{"rejected": 2}, a.Stats().AllDrops())

	setLink := func(set func(netlink.Link) error) {
		require.NoError(t, ns.Do(func() error {
			link, err := netlink.LinkByName(ifname)
			if err != nil {
				return err
			}
			return set(link)
		}))
	}
	setLink(netlink.LinkSetDown)
	write(frame(virtio.NetHdr{}), frame(virtio.NetHdr{}))
	assert.EqualValues(t, 2, a.Stats().Drops(datapath.DropLinkDown))
	setLink(netlink.LinkSetUp)
	write(frame(virtio.NetHdr{}))
	assert.EqualValues(t, 2, a.Stats().ToGuest.Frames.Load())
	assert.EqualValues(t, 2*len(good), a.Stats().ToGuest.Bytes.Load())

	for errno, want := range map[unix.Errno]datapath.DropReason{
		unix.ENOBUFS: datapath.DropNoMemory, unix.ENOMEM: datapath.DropNoMemory,
		unix.EIO: datapath.DropLinkDown, unix.EINVAL: datapath.DropRejected, unix.EFAULT: datapath.DropRejected,
	} {
		assert.Equal(t, want, dropReason(errno), errno.Error())
	}
}

// mustJoin makes an attachment over a socket that keeps record boundaries, for
// what a tap's kernel does not do by itself.
func mustJoin(t *testing.T) (a *attachment, guest *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	guest = os.NewFile(uintptr(fds[1]), "guest")
	t.Cleanup(func() { _ = guest.Close() })
	a, err = newAttachment(datapath.Info{Name: "socket"}, []*os.File{os.NewFile(uintptr(fds[0]), "ours")}, nil)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, a.Close()) })
	return a, guest
}

// TestFB143FB146Lengths: whatever length the file delivers, from nothing but a
// header to more than the longest frame, is taken or counted, and what follows
// is read.
func TestFB143FB146Lengths(t *testing.T) {
	datapathtest.Leaks(t)
	a, guest := mustJoin(t)
	send := func(n int) { // n bytes, header included
		t.Helper()
		_, err := guest.Write(make([]byte, n))
		require.NoError(t, err)
	}
	frames := make([]datapath.Frame, 2)
	for _, test := range []struct {
		n      int // of the frame
		reason datapath.DropReason
		taken  bool
	}{
		{-9, datapath.DropTooShort, false},
		{-1, datapath.DropTooShort, false},
		{0, datapath.DropTooShort, false},
		{13, datapath.DropTooShort, false},
		{14, 0, true},
		{65549, 0, true},
		{datapath.MaxFrame, 0, true},
		{datapath.MaxFrame + 1, datapath.DropTooLong, false},
		{70_000, datapath.DropTooLong, false},
	} {
		before := a.Stats().AllDrops()
		send(virtio.HdrSize + test.n)
		send(virtio.HdrSize + 60)
		var got []int
		for len(got) == 0 || got[len(got)-1] != 60 {
			n, err := a.QueuePairs()[0].ReadBatch(frames, lend)
			require.NoError(t, err)
			for _, f := range frames[:n] {
				got = append(got, f.N)
			}
		}
		if test.taken {
			assert.Equal(t, []int{test.n, 60}, got)
			assert.Equal(t, before, a.Stats().AllDrops())
			continue
		}
		assert.Equal(t, []int{60}, got, "%d bytes", test.n)
		before[test.reason.String()]++
		assert.Equal(t, before, a.Stats().AllDrops(), "%d bytes", test.n)
	}
}

// TestFlood: a file that always has one more frame to drop does not keep
// ReadBatch from noticing Close: /dev/zero never ends and is always too long.
func TestFlood(t *testing.T) {
	datapathtest.Leaks(t)
	a, _ := mustJoin(t)
	zero, err := os.Open("/dev/zero")
	require.NoError(t, err)
	defer func() { _ = zero.Close() }()
	q := a.queue[0]
	q.in.frames, q.in.get = make([]datapath.Frame, 4), lend
	returned := make(chan bool, 1)
	go func() { returned <- q.readReady(zero.Fd()) }()
	select {
	case ready := <-returned:
		assert.True(t, ready)
		assert.Zero(t, q.in.n)
		assert.EqualValues(t, 2*4, a.Stats().Drops(datapath.DropTooLong))
	case <-time.After(patience):
		require.Fail(t, "still dropping")
	}
}

// TestRoom: when the file takes no more, WriteBatch is short and returns; Room
// fires when it takes frames again, not before, and at the end. A socket stands
// in for the tap, whose send buffer has no limit unless it is given one.
func TestRoom(t *testing.T) {
	datapathtest.Leaks(t)
	a, guest := mustJoin(t)
	qp := a.QueuePairs()[0]
	var err error

	frames := make([]datapath.Frame, 10)
	for i := range frames {
		frames[i] = datapath.Frame{Segs: [][]byte{make([]byte, 1000), make([]byte, 514)}, N: 1514}
	}
	for round := range 3 {
		sent := 0
		for n := len(frames); n == len(frames); sent += n {
			n, err = qp.WriteBatch(frames)
			require.NoError(t, err)
			require.Less(t, sent, 1<<20, "never full")
		}
		select {
		case <-qp.Room():
			require.Fail(t, "room before the guest read")
		case <-time.After(20 * time.Millisecond):
		}
		b := make([]byte, 2000)
		for range sent {
			require.NoError(t, guest.SetReadDeadline(time.Now().Add(patience)))
			n, err := guest.Read(b)
			require.NoError(t, err, "round %d", round)
			require.Equal(t, virtio.HdrSize+1514, n)
		}
		select {
		case <-qp.Room():
		case <-time.After(patience):
			require.Fail(t, "Room did not fire")
		}
	}
	for n := len(frames); n == len(frames); { // full, and a waiter under way when it ends
		n, err = qp.WriteBatch(frames)
		require.NoError(t, err)
	}
	require.NoError(t, a.Close())
	select {
	case <-qp.Room():
	case <-time.After(patience):
		require.Fail(t, "Room did not fire at the end")
	}
}

// TestAllocs: a frame costs no allocation in either direction, whatever number
// of segments it lies in.
func TestAllocs(t *testing.T) {
	ns := newGuestNS(t)
	a := mustOpen(t, ns, Config{})
	p := newPeer(t, ns, false)
	qp := a.QueuePairs()[0]
	packet, _ := makePacket(false, false, 1400)
	out := []datapath.Frame{
		{Segs: [][]byte{packet[:42], packet[42:]}, N: len(packet)},
		{N: len(packet)},
	}
	for b := packet; len(b) > 0; b = b[min(len(b), 100):] {
		out[1].Segs = append(out[1].Segs, b[:min(len(b), 100)])
	}
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		if n, err := qp.WriteBatch(out); n != 2 || err != nil {
			t.Fatal(n, err)
		}
	}), "to the guest")

	in := make([]datapath.Frame, 8)
	lent := lend(0)
	get := func(int) [][]byte { return lent }
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		if _, err := p.sock.Write(packet); err != nil {
			t.Fatal(err)
		}
		if n, err := qp.ReadBatch(in, get); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}), "from the guest")
}
