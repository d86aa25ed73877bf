package promoted

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A script plays the guest of one flow by hand, with a clock that goes when told: what
// a packet says goes in by says, and what the flow answers is looked at by expect.
type script struct {
	t     *testing.T
	table *Table
	batch *Batch
	conn  *Conn
	// Payloads of the batch that is under way.
	frames [][]byte
	done   chan error

	client *net.TCPConn // the far end of the flow's client
	ours   *socket
	ended  map[relay.Half]chan error

	now    time.Duration
	timers []*fakeTimer
	window int
	opened int    // and not freed
	begun  func() // called amid Start, unless nil
	// accepted is called when the guest has accepted, unless nil.
	accepted func()

	mu     sync.Mutex
	sent   []packet
	noRoom bool
	waiter Waiter
	waits  int // how often somebody was told to wait

	iss uint32 // theirs
	irs uint32 // ours
}

// A packet is what a flow has sent.
type packet struct {
	seq, ack uint32
	flags    uint8
	window   uint16
	stamped  bool
	mss      uint16
	payload  []byte
	gso      uint16
}

var (
	own   = netip.MustParseAddr("198.18.0.1")
	guest = netip.MustParseAddrPort("198.18.0.2:80")
)

func newScript(t *testing.T) *script {
	t.Helper()
	datapathtest.Require(t, "peekoff", Supported(), "promoted flows take SO_PEEK_OFF for TCP, which Linux has since 6.9")
	s := &script{t: t, done: make(chan error, 1), now: time.Hour, window: 256 << 10, iss: 0xffffff00}
	s.table = NewTable(Options{
		Link: s, Clock: s, MAC: [6]byte{2, 0, 0, 0, 0, 1}, Addr: own, MTU: 1500, FirstPort: 2048, LastPort: 65535,
		Window: func() int { return s.window },
		Later:  func(f func()) { go f() },
		Opened: func(netip.Addr) {
			s.opened++
			if s.begun != nil {
				s.begun()
			}
		},
		Closed: func(netip.Addr) {},
		Freed:  func(netip.Addr) { s.opened-- },
	})
	s.batch = s.table.NewBatch()
	t.Cleanup(func() {
		s.table.Close()
		assert.Zero(t, s.table.Stats().Flows)
		assert.Zero(t, s.opened)
		assert.Zero(t, s.table.held.Load())
		assert.Zero(t, s.table.linger.Load())
	})
	return s
}

// Send implements Link: it takes apart what the flow sends, and holds every checksum
// and length against its frame.
func (s *script) Send(_ uint32, frames []datapath.Frame, w Waiter) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noRoom {
		if w != nil {
			s.waiter = w
			s.waits++
		}
		return 0
	}
	for i := range frames {
		s.sent = append(s.sent, s.parse(&frames[i]))
	}
	return len(frames)
}

func (s *script) parse(f *datapath.Frame) packet {
	var b []byte
	for _, seg := range f.Segs {
		b = append(b, seg...)
	}
	assert.Len(s.t, b, f.N)
	assert.Equal(s.t, s.Node(), [6]byte(b[:6]))
	assert.Equal(s.t, [6]byte{2, 0, 0, 0, 0, 1}, [6]byte(b[6:12]))
	ip, tcp := b[ipAt:tcpAt], b[tcpAt:]
	assert.EqualValues(s.t, len(b)-ipAt, binary.BigEndian.Uint16(ip[2:]), "total length")
	assert.EqualValues(s.t, 0xffff, fold(sum(ip)), "header checksum")
	partial := fold(sum(ip[12:20]) + 6 + uint32(len(tcp)))
	assert.Equal(s.t, partial, binary.BigEndian.Uint16(tcp[tcpChecksumAt:]), "partial checksum")
	assert.EqualValues(s.t, virtio.FlagNeedsCSum, f.Hdr.Flags)
	assert.NoError(s.t, f.Hdr.Check(f.N, virtio.OffloadCSum|virtio.OffloadTSO4))
	seg, ok := Parse(tcp, nil, len(tcp))
	assert.True(s.t, ok)
	if len(seg.first) > 1448 {
		assert.EqualValues(s.t, len(b)-len(seg.first), f.Hdr.HdrLen)
	}
	return packet{
		seq: seg.seq, ack: seg.ack, flags: seg.flags, window: seg.window, stamped: seg.stamped, mss: seg.mss, payload: seg.first, gso: f.Hdr.GSOSize,
	}
}

// Node implements Link.
func (s *script) Node() [6]byte { return [6]byte{2, 0, 0, 0, 0, 2} }

// Now implements Clock.
func (s *script) Now() time.Duration { return s.now }

// Resumed implements Clock.
func (s *script) Resumed() time.Time { return time.Time{} }

// Until implements Clock.
func (s *script) Until(f func()) Timer {
	timer := &fakeTimer{script: s, f: f}
	s.timers = append(s.timers, timer)
	return timer
}

type fakeTimer struct {
	script *script
	f      func()
	at     time.Duration // 0 when it is not set
}

func (f *fakeTimer) Set(d time.Duration) { f.at = f.script.now + d }
func (f *fakeTimer) Stop()               { f.at = 0 }

// pass lets time pass, and what it brings happen.
func (s *script) pass(d time.Duration) {
	for end := s.now + d; ; {
		var next *fakeTimer
		for _, timer := range s.timers {
			if timer.at != 0 && timer.at <= end && (next == nil || timer.at < next.at) {
				next = timer
			}
		}
		if next == nil {
			s.now = end
			return
		}
		s.now, next.at = max(s.now, next.at), 0
		next.f()
	}
}

// dial begins a flow.
func (s *script) dial() {
	s.table.Start(guest, func(c relay.GuestConn, err error) {
		if err == nil {
			s.conn = c.(*Conn)
			if s.accepted != nil {
				s.accepted()
			}
		}
		s.done <- err
	})
}

// find returns the flow that was dialled last, answered or not.
func (s *script) find() *Conn {
	for _, c := range s.table.conns {
		return c
	}
	return nil
}

// says gives the flow a segment of the guest's. Its numbers count from the first of each
// side, its window in bytes.
func (s *script) says(flags uint8, seq, ack uint32, window int, payload string, stamp ...uint32) {
	s.t.Helper()
	s.brings(flags, seq, ack, window, payload, stamp...)
	s.end()
}

// brings is says for a segment of a batch that goes on, until end.
func (s *script) brings(flags uint8, seq, ack uint32, window int, payload string, stamp ...uint32) {
	s.t.Helper()
	seg := Segment{
		seq: s.iss + seq, ack: s.irs + ack, flags: flags, window: uint16(window), scale: -1, first: []byte(payload),
	}
	if len(stamp) > 0 {
		seg.stamped, seg.stamp, seg.echo = true, stamp[0], s.table.now()
	}
	if flags&flagSYN != 0 {
		seg.mss = 1460
	}
	c := s.conn
	if c == nil {
		c = s.find()
	}
	require.NotNil(s.t, c, "there is no flow")
	s.batch.Take(c, &seg)
	s.frames = append(s.frames, seg.first)
}

// end ends a batch. The memory of its frames is used for others.
func (s *script) end() {
	s.batch.End()
	for _, f := range s.frames {
		clear(f)
	}
	s.frames = nil
}

// expect returns what the flow has sent since the last expect: so many packets.
func (s *script) expect(n int) []packet {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := s.sent
	s.sent = nil
	require.Len(s.t, sent, n, "packets: %s", s.show(sent))
	for i := range sent {
		sent[i].seq -= s.irs
		if sent[i].flags&flagACK != 0 {
			sent[i].ack -= s.iss
		}
	}
	return sent
}

// take returns what the flow has sent since, as it was sent.
func (s *script) take() []packet {
	s.mu.Lock()
	defer s.mu.Unlock()
	sent := s.sent
	s.sent = nil
	return sent
}

func (s *script) show(ps []packet) (text string) {
	for _, p := range ps {
		text += fmt.Sprintf("[flags %x seq %d ack %d window %d, %d bytes] ", p.flags, p.seq-s.irs, p.ack-s.iss, p.window, len(p.payload))
	}
	return text
}

// connect dials and has the guest accept; a stamp of 0 is for a guest without.
func (s *script) connect(stamp uint32) {
	s.t.Helper()
	s.dial()
	syn := s.expect(1)[0]
	s.irs = syn.seq
	assert.EqualValues(s.t, flagSYN, syn.flags)
	assert.EqualValues(s.t, 1460, syn.mss)
	assert.True(s.t, syn.stamped)
	if stamp != 0 {
		s.says(flagSYN|flagACK, 0, 1, 65535, "", stamp)
	} else {
		s.says(flagSYN|flagACK, 0, 1, 65535, "")
	}
	require.NoError(s.t, <-s.done)
	ack := s.expect(1)[0]
	assert.EqualValues(s.t, flagACK, ack.flags)
	assert.EqualValues(s.t, 1, ack.seq)
	assert.EqualValues(s.t, 1, ack.ack)
}

// copy begins the flow's copies, with a client.
func (s *script) copy() {
	s.t.Helper()
	s.client, s.ours = newSocket(s.t)
	s.ended = map[relay.Half]chan error{relay.HalfClient: make(chan error, 1), relay.HalfGuest: make(chan error, 1)}
	s.conn.SetMeters(new(relay.Meter), new(relay.Meter))
	s.conn.Copy(s.ours, func(from relay.Half, err error) { s.ended[from] <- err })
}

// clientSays has the client send, and the flow hear of it.
func (s *script) clientSays(text string) {
	s.t.Helper()
	_, err := s.client.Write([]byte(text))
	require.NoError(s.t, err)
	s.ours.await(s.t, len(text))
	s.ours.ready(relay.ReadyRead)
}

// clientReads returns what the client has.
func (s *script) clientReads(n int) string {
	s.t.Helper()
	b := make([]byte, n)
	require.NoError(s.t, s.client.SetReadDeadline(time.Now().Add(5*time.Second)))
	for got := 0; got < n; {
		k, err := s.client.Read(b[got:])
		require.NoError(s.t, err)
		got += k
	}
	return string(b)
}

// A socket is a client of the host's as a relay.Pollable that is told by hand.
type socket struct {
	*os.File
	fd    int
	ready func(relay.Ready)
}

// newSocket returns both ends of a connection over loopback.
func newSocket(t *testing.T) (client *net.TCPConn, ours *socket) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	defer l.Close()
	c, err := net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
	require.NoError(t, err)
	accepted, err := l.AcceptTCP()
	require.NoError(t, err)
	f, err := accepted.File()
	require.NoError(t, err)
	require.NoError(t, accepted.Close())
	ours = &socket{File: f, fd: int(f.Fd())}
	require.NoError(t, unix.SetNonblock(ours.fd, true))
	t.Cleanup(func() { _ = c.Close(); _ = f.Close() })
	return c, ours
}

// await waits until the socket holds n bytes.
func (s *socket) await(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		held, err := unix.IoctlGetInt(s.fd, unix.TIOCINQ)
		return err == nil && held >= n
	}, 5*time.Second, time.Millisecond)
}

func (s *socket) Control(f func(fd uintptr)) error    { f(uintptr(s.fd)); return nil }
func (s *socket) Watch(ready func(relay.Ready)) error { s.ready = ready; return nil }
func (s *socket) WatchWrite() error                   { return nil }
func (s *socket) CloseRead() error                    { return nil }
func (s *socket) CloseWrite() error                   { return unix.Shutdown(s.fd, unix.SHUT_WR) }
func (s *socket) KeepAlive() error                    { return nil }
func (s *socket) Abort()                              {}
func (s *socket) Close() error                        { return nil }
