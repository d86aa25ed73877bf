package unixgram

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/socketfile"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// patience bounds what should happen at once.
const patience = 10 * time.Second

// peer is the VMM's end: a bound datagram socket.
type peer struct {
	conn *net.UnixConn
	to   unix.Sockaddr // nil when connected
	buf  []byte
}

var _ datapathtest.Peer = (*peer)(nil)

// mustPeer binds a socket in a directory of its own and sends to path: with
// sendto(2) as QEMU does, or connected as vfkit is.
func mustPeer(tb testing.TB, path string, connected bool) *peer {
	tb.Helper()
	return mustPeerAt(tb, filepath.Join(tb.TempDir(), "vmm"), path, connected)
}

func mustPeerAt(tb testing.TB, at, path string, connected bool) *peer {
	tb.Helper()
	p := &peer{buf: make([]byte, datapath.MaxFrame+1), to: &unix.SockaddrUnix{Name: path}}
	var err error
	p.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at, Net: "unixgram"})
	require.NoError(tb, err)
	require.NoError(tb, p.conn.SetWriteBuffer(1<<20))
	if connected {
		require.NoError(tb, p.control(func(fd int) error { return unix.Connect(fd, p.to) }))
		p.to = nil
	}
	tb.Cleanup(func() { assert.NoError(tb, p.Leave()) })
	return p
}

func (p *peer) control(f func(fd int) error) (err error) {
	raw, err := p.conn.SyscallConn()
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

func (p *peer) MaxFrame() int { return datapath.MaxFrame }

// Send tries again while our queue is full: the kernel does not tell a sender
// that is not connected when there is room.
func (p *peer) Send(frame []byte) error {
	for {
		err := p.try(frame)
		if !errors.Is(err, unix.EAGAIN) {
			return err
		}
		time.Sleep(100 * time.Microsecond)
	}
}

func (p *peer) try(frame []byte) error {
	return p.control(func(fd int) error {
		if p.to == nil {
			_, err := unix.Write(fd, frame)
			return err
		}
		return unix.Sendto(fd, frame, 0, p.to)
	})
}

func (p *peer) Recv(timeout time.Duration) ([]byte, error) {
	if err := p.conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	n, err := p.conn.Read(p.buf)
	return append([]byte(nil), p.buf[:n]...), err
}

func (p *peer) Leave() error {
	_ = p.conn.Close() // closing again is no error here
	return nil
}

func mustListen(tb testing.TB, log *bytes.Buffer) (*Listener, string) {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "s")
	if log == nil {
		log = new(bytes.Buffer)
	}
	l, err := Listen(path, slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, l.Close()) })
	return l, path
}

func mustAccept(tb testing.TB, l *Listener) datapath.Attachment {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	a, err := l.Accept(ctx)
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, a.Close()) })
	return a
}

// mustAttach joins a peer by vfkit's greeting.
func mustAttach(tb testing.TB, connected bool) (datapath.Attachment, *peer) {
	tb.Helper()
	l, path := mustListen(tb, nil)
	p := mustPeer(tb, path, connected)
	require.NoError(tb, p.Send([]byte(greeting)))
	return mustAccept(tb, l), p
}

func lend(int) [][]byte { return [][]byte{make([]byte, 64), make([]byte, datapath.MaxFrame)} }

func frameBytes(f datapath.Frame) (b []byte) {
	for _, s := range f.Segs {
		b = append(b, s[:min(len(s), f.N-len(b))]...)
	}
	return b
}

func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed*13)
	}
	return b
}

// numbered is a frame of n bytes that begins with a sequence number.
func numbered(n int, seq uint32) datapath.Frame {
	b := pattern(n, int(seq))
	binary.BigEndian.PutUint32(b, seq)
	return datapath.Frame{Segs: [][]byte{b[:min(n, 54)], b[min(n, 54):]}, N: n}
}

// mustRead reads n frames.
func mustRead(tb testing.TB, a datapath.Attachment, n int) (all [][]byte) {
	tb.Helper()
	for len(all) < n {
		frames := make([]datapath.Frame, 4)
		k, err := a.QueuePairs()[0].ReadBatch(frames, lend)
		require.NoError(tb, err)
		for _, f := range frames[:k] {
			all = append(all, frameBytes(f))
		}
	}
	return all
}

func writeAll(q datapath.QueuePair, frames []datapath.Frame) error {
	for len(frames) > 0 {
		n, err := q.WriteBatch(frames)
		if err != nil {
			return err
		}
		if frames = frames[n:]; len(frames) > 0 {
			<-q.Room()
		}
	}
	return nil
}

func mustPass(tb testing.TB, a datapath.Attachment, p *peer) {
	tb.Helper()
	want := pattern(100, 1)
	require.NoError(tb, p.Send(want))
	require.Equal(tb, [][]byte{want}, mustRead(tb, a, 1))
	require.NoError(tb, writeAll(a.QueuePairs()[0], []datapath.Frame{{Segs: [][]byte{want}, N: len(want)}}))
	got, err := p.Recv(patience)
	require.NoError(tb, err)
	require.Equal(tb, want, got)
}

var kinds = map[string]bool{"sendto": false, "connected": true}

func TestConformance(t *testing.T) {
	for name, connected := range kinds {
		t.Run(name, func(t *testing.T) {
			datapathtest.Conformance(t, func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
				return mustAttach(t, connected)
			})
		})
	}
}

func TestInfo(t *testing.T) {
	l, path := mustListen(t, nil)
	p := mustPeer(t, path, false)
	require.NoError(t, p.Send(pattern(60, 0)))
	assert.Equal(t, datapath.Info{Transport: "unixgram", Name: path}, mustAccept(t, l).Info())
}

// TestFirstFrameIsNotLost, nor those behind it; the greeting is not a frame,
// whenever it comes.
func TestFirstFrameIsNotLost(t *testing.T) {
	for name, connected := range kinds {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			l, path := mustListen(t, nil)
			p := mustPeer(t, path, connected)
			var want [][]byte
			for i := range 4 {
				want = append(want, pattern(60+i, i))
				require.NoError(t, p.Send(want[i]))
			}
			require.NoError(t, p.Send([]byte(greeting)))
			want = append(want, pattern(14, 9))
			require.NoError(t, p.Send(want[4]))
			a := mustAccept(t, l)
			assert.Equal(t, want, mustRead(t, a, 5))
			assert.Empty(t, a.Stats().AllDrops())
		})
	}
}

// TestOnlyThePeer: the first to send is the peer. What another had queued before
// is dropped and counted, what it sends later is refused by the kernel.
func TestOnlyThePeer(t *testing.T) {
	datapathtest.Leaks(t)
	l, path := mustListen(t, nil)
	first, other := mustPeer(t, path, false), mustPeer(t, path, false)
	require.NoError(t, first.Send(pattern(60, 1)))
	require.NoError(t, other.Send(pattern(60, 2)))
	require.NoError(t, first.Send(pattern(60, 3)))
	a := mustAccept(t, l)
	assert.Equal(t, [][]byte{pattern(60, 1), pattern(60, 3)}, mustRead(t, a, 2))
	assert.Equal(t, map[string]uint64{"foreign-source": 1}, a.Stats().AllDrops())
	assert.ErrorIs(t, other.Send(pattern(60, 4)), unix.EPERM)
	mustPass(t, a, first)
}

// TestWhoCannotBeThePeer: a first datagram that is no frame, or that comes from a
// socket that cannot be answered, is passed over, said once, and the next one
// taken.
func TestWhoCannotBeThePeer(t *testing.T) {
	datapathtest.Leaks(t)
	var log bytes.Buffer
	l, path := mustListen(t, &log)
	unbound, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	gone := mustPeer(t, path, false)
	short := mustPeer(t, path, false)
	for range 2 {
		_, err = unbound.Write(pattern(60, 0))
		require.NoError(t, err)
	}
	require.NoError(t, unbound.Close())
	require.NoError(t, gone.Send(pattern(60, 0)))
	require.NoError(t, gone.Leave())
	for _, b := range []string{"", "VFK", "VFKT2"} {
		require.NoError(t, short.Send([]byte(b)))
	}
	p := mustPeer(t, path, false)
	require.NoError(t, p.Send(pattern(60, 7)))
	a := mustAccept(t, l)
	assert.Equal(t, [][]byte{pattern(60, 7)}, mustRead(t, a, 1))
	assert.Equal(t, 1, strings.Count(log.String(), "unbound"), log.String())
	assert.Equal(t, 3, strings.Count(log.String(), "cannot take"), log.String())
}

// TestAbstractPeer: the kernel's own names for sockets hold any byte.
func TestAbstractPeer(t *testing.T) {
	for name, at := range map[string]string{"named": fmt.Sprintf("@culvert-test-%d", os.Getpid()), "with a NUL": fmt.Sprintf("@culvert\x00test\x00%d", os.Getpid())} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			l, path := mustListen(t, nil)
			p := mustPeerAt(t, at, path, false)
			require.NoError(t, p.Send(pattern(60, 1)))
			a := mustAccept(t, l)
			require.Len(t, mustRead(t, a, 1), 1)
			mustPass(t, a, p)
		})
	}
}

// TestPeerGone: a send finds that the peer's socket has gone, and the VMM that
// has been started again, on the same path or another, is the next peer. None of
// the frames that the old one left is taken for the new one's.
func TestPeerGone(t *testing.T) {
	for name, connected := range kinds {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			l, path := mustListen(t, nil)
			at := filepath.Join(t.TempDir(), "vmm")
			p := mustPeerAt(t, at, path, connected)
			for i := range 50 {
				require.NoError(t, p.Send([]byte(greeting)))
				a := mustAccept(t, l)
				mustPass(t, a, p)
				require.NoError(t, p.Send(pattern(60, 99)))
				require.NoError(t, p.Leave())
				_, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{numbered(60, 0)})
				require.ErrorIs(t, err, datapath.ErrPeerGone)
				<-a.QueuePairs()[0].Room()
				_, err = a.QueuePairs()[0].ReadBatch(make([]datapath.Frame, 1), lend)
				require.ErrorIs(t, err, datapath.ErrPeerGone)
				if i%2 == 0 {
					require.NoError(t, a.Close())
					_, err = a.QueuePairs()[0].WriteBatch(nil)
					require.ErrorIs(t, err, datapath.ErrClosed)
				}
				require.NoError(t, os.Remove(at))
				p = mustPeerAt(t, at, path, connected)
			}
		})
	}
}

// TestAcceptWaitsForTheEnd: nothing of a live attachment goes to another.
func TestAcceptWaitsForTheEnd(t *testing.T) {
	datapathtest.Leaks(t)
	l, path := mustListen(t, nil)
	p := mustPeer(t, path, false)
	require.NoError(t, p.Send(pattern(60, 0)))
	a := mustAccept(t, l)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := l.Accept(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Len(t, mustRead(t, a, 1), 1)
	mustPass(t, a, p)

	require.NoError(t, p.Send(pattern(60, 1))) // to the old one, unread
	require.NoError(t, a.Close())
	require.NoError(t, p.Send(pattern(60, 2)))
	assert.Equal(t, [][]byte{pattern(60, 2)}, mustRead(t, mustAccept(t, l), 1))
}

// TestAcceptSurvivesEMFILE: without a descriptor left the first frame waits, and
// is delivered when there is one again.
func TestAcceptSurvivesEMFILE(t *testing.T) {
	datapathtest.Leaks(t)
	var log bytes.Buffer
	l, path := mustListen(t, &log)
	p := mustPeer(t, path, false)
	require.NoError(t, p.Send(pattern(60, 1)))
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	none := limit
	none.Cur = 1 // standard input's: a number just above the highest would leave the gaps below it
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	ctx, cancel := context.WithTimeout(t.Context(), 2*acceptPause)
	defer cancel()
	_, acceptErr := l.Accept(ctx)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.ErrorIs(t, acceptErr, context.DeadlineExceeded)
	assert.Equal(t, 1, strings.Count(log.String(), "cannot take"), log.String())
	assert.Contains(t, log.String(), unix.EMFILE.Error())
	assert.Equal(t, [][]byte{pattern(60, 1)}, mustRead(t, mustAccept(t, l), 1))
}

func TestAcceptEnds(t *testing.T) {
	datapathtest.Leaks(t)
	l, _ := mustListen(t, nil)
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		_, err := l.Accept(ctx)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	accepted := make(chan error)
	go func() {
		_, err := l.Accept(context.Background())
		accepted <- err
	}()
	time.Sleep(5 * time.Millisecond) // mostly until it waits in the kernel; either way it ends
	require.NoError(t, l.Close())
	assert.ErrorIs(t, <-accepted, datapath.ErrClosed)
	require.NoError(t, l.Close())
	_, err := l.Accept(t.Context())
	assert.ErrorIs(t, err, datapath.ErrClosed)
}

// TestFB122SocketFile: private, a live one refused, gone with the listener.
func TestFB122SocketFile(t *testing.T) {
	datapathtest.Leaks(t)
	l, path := mustListen(t, nil)
	info, err := os.Lstat(path)
	require.NoError(t, err)
	assert.Equal(t, fs.ModeSocket|0o600, info.Mode())
	_, err = Listen(path, slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, socketfile.ErrInUse)
	require.NoError(t, l.Close())
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	assert.Empty(t, left)
	_, err = Listen(filepath.Join(t.TempDir(), "missing", "s"), slog.New(slog.DiscardHandler))
	assert.ErrorIs(t, err, fs.ErrNotExist)
}

// TestFB146ShortDatagrams: every length from 0 to 70, three fills.
func TestFB146ShortDatagrams(t *testing.T) {
	datapathtest.Leaks(t)
	a, p := mustAttach(t, false)
	sent := make(chan error)
	go func() {
		for n := range 71 {
			for _, fill := range []byte{0, 0x5a, 0xff} {
				for _, frame := range [][]byte{bytes.Repeat([]byte{fill}, n), pattern(60, n)} {
					if err := p.Send(frame); err != nil {
						sent <- err
						return
					}
				}
			}
		}
		sent <- nil
	}()
	good := mustRead(t, a, 3*(71-minFrame)+3*71)
	require.NoError(t, <-sent)
	assert.Equal(t, pattern(60, 70), good[len(good)-1])
	assert.Equal(t, map[string]uint64{"too-short": 3 * minFrame}, a.Stats().AllDrops())
}

func TestTooLong(t *testing.T) {
	datapathtest.Leaks(t)
	a, p := mustAttach(t, false)
	for i, n := range []int{datapath.MaxFrame + 1, datapath.MaxFrame + 64, datapath.MaxFrame + 65, 200_000} {
		require.NoError(t, p.Send(pattern(n, 0)))
		require.NoError(t, p.Send(pattern(60, i)))
		require.Equal(t, [][]byte{pattern(60, i)}, mustRead(t, a, 1))
	}
	assert.Equal(t, map[string]uint64{"too-long": 4}, a.Stats().AllDrops())
}

func TestUnsendable(t *testing.T) {
	datapathtest.Leaks(t)
	a, p := mustAttach(t, false)
	frames := []datapath.Frame{
		{Segs: [][]byte{make([]byte, 1<<17)}, N: datapath.MaxFrame + 1},
		{Segs: [][]byte{make([]byte, 14)}, N: 13},
		{N: -1},
		{Segs: [][]byte{make([]byte, 60)}, N: 60, Hdr: virtio.NetHdr{Flags: virtio.FlagNeedsCSum}},
		{Segs: [][]byte{make([]byte, 60)}, N: 60, Hdr: virtio.NetHdr{GSOType: virtio.GSOTCPv6}},
		{Segs: [][]byte{make([]byte, 59)}, N: 60},
		numbered(60, 1),
	}
	n, err := a.QueuePairs()[0].WriteBatch(frames)
	require.NoError(t, err)
	require.Equal(t, len(frames), n)
	got, err := p.Recv(patience)
	require.NoError(t, err)
	assert.Equal(t, frameBytes(numbered(60, 1)), got)
	assert.Equal(t, map[string]uint64{"too-long": 1, "too-short": 2, "not-offered": 2, "rejected": 1}, a.Stats().AllDrops())
}

// TestFB131PeerStopsReading: the peer's queue fills, WriteBatch is short, and
// Room fires when the peer has taken something: by the kernel's word alone,
// without a timer. This is the kernel behaviour that connect(2) is for.
func TestFB131PeerStopsReading(t *testing.T) {
	for name, connected := range kinds {
		for _, size := range []int{60, 1514, datapath.MaxFrame} {
			t.Run(fmt.Sprintf("%s/%d", name, size), func(t *testing.T) {
				datapathtest.Leaks(t)
				a, p := mustAttach(t, connected)
				q := a.QueuePairs()[0]
				seq := uint32(0)
				for n := 1; n == 1; seq += uint32(n) {
					var err error
					n, err = q.WriteBatch([]datapath.Frame{numbered(size, seq)})
					require.NoError(t, err)
				}
				require.NotZero(t, seq)
				select {
				case <-q.Room():
					require.Fail(t, "Room fired while the peer's queue is full")
				case <-time.After(20 * time.Millisecond):
				}
				const more = 100
				sent := make(chan error)
				go func() {
					<-q.Room()
					for i := range uint32(more) {
						if err := writeAll(q, []datapath.Frame{numbered(size, seq+i)}); err != nil {
							sent <- err
							return
						}
					}
					sent <- nil
				}()
				for i := range seq + more {
					got, err := p.Recv(patience)
					require.NoError(t, err)
					require.Equal(t, frameBytes(numbered(size, i)), got, "frame %d", i)
				}
				require.NoError(t, <-sent)
				assert.Empty(t, a.Stats().AllDrops())
				assert.EqualValues(t, seq+more, a.Stats().ToGuest.Frames.Load())
			})
		}
	}
}

// TestPeerGoneWhileFull: a writer that waits for room hears that the peer left.
func TestPeerGoneWhileFull(t *testing.T) {
	for name, connected := range kinds {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			a, p := mustAttach(t, connected)
			wrote := make(chan error)
			// Room for the one word: whoever says it may be ahead of whoever waits for it, and says it once.
			full := make(chan struct{}, 1)
			go func() {
				q := a.QueuePairs()[0]
				for {
					n, err := q.WriteBatch([]datapath.Frame{numbered(9000, 0)})
					if err != nil {
						wrote <- err
						return
					}
					if n == 0 {
						select {
						case full <- struct{}{}:
						default:
						}
						<-q.Room()
					}
				}
			}()
			<-full
			require.NoError(t, p.Leave())
			assert.ErrorIs(t, <-wrote, datapath.ErrPeerGone)
		})
	}
}

// TestFB121AttachDetach: 200 attachments with traffic both ways, each ended by
// the peer or by us at a random moment.
func TestFB121AttachDetach(t *testing.T) {
	datapathtest.Leaks(t)
	rnd := rand.New(rand.NewPCG(121, 0))
	l, path := mustListen(t, nil)
	at := filepath.Join(t.TempDir(), "vmm")
	for cycle := range 200 {
		p := mustPeerAt(t, at, path, cycle%2 == 0)
		require.NoError(t, p.Send([]byte(greeting)))
		a := mustAccept(t, l)
		q := a.QueuePairs()[0]
		var wg sync.WaitGroup
		wg.Go(func() {
			frames := make([]datapath.Frame, 8)
			for err := error(nil); err == nil; {
				_, err = q.ReadBatch(frames, lend)
			}
		})
		wg.Go(func() {
			for err := error(nil); err == nil; {
				err = writeAll(q, []datapath.Frame{numbered(60, 0), numbered(1514, 1)})
			}
		})
		for i := range rnd.IntN(20) {
			_ = p.try(pattern(rnd.IntN(2000), i))
			if i%3 == 0 {
				_, err := p.Recv(patience)
				require.NoError(t, err)
			}
		}
		if cycle%3 == 0 {
			require.NoError(t, a.Close())
			require.NoError(t, p.Leave())
		} else {
			require.NoError(t, p.Leave())
		}
		if cycle%3 == 1 {
			require.NoError(t, a.Close())
		}
		wg.Wait()
		require.NoError(t, a.Close())
		require.NoError(t, os.Remove(at))
	}
}

func TestAllocs(t *testing.T) {
	a, p := mustAttach(t, false)
	q := a.QueuePairs()[0]
	out := []datapath.Frame{numbered(1514, 0), numbered(60, 1)}
	in := make([]datapath.Frame, 2)
	wire := pattern(1514, 0)
	segs := lend(0)
	get := func(int) [][]byte { return segs }
	sendTo := func(fd uintptr) {
		if err := unix.Sendto(int(fd), wire, 0, p.to); err != nil {
			t.Error(err)
		}
	}
	raw, err := p.conn.SyscallConn()
	require.NoError(t, err)
	assert.Zero(t, testing.AllocsPerRun(200, func() {
		if err := raw.Control(sendTo); err != nil {
			t.Error(err)
		}
		if n, err := q.ReadBatch(in, get); n == 0 || err != nil {
			t.Error(n, err)
		}
	}))
	assert.Zero(t, testing.AllocsPerRun(200, func() {
		if n, err := q.WriteBatch(out); n != len(out) || err != nil {
			t.Error(n, err)
		}
		for range out {
			if _, err := p.conn.Read(p.buf); err != nil {
				t.Error(err)
			}
		}
	}))
}

// FuzzReadBatch sends one arbitrary datagram and a good frame behind it: the
// good one arrives, the other does if it is a frame, and is counted if not.
func FuzzReadBatch(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte(greeting))
	f.Add(pattern(13, 0))
	f.Add(pattern(14, 0))
	f.Add(pattern(datapath.MaxFrame, 0))
	f.Add(pattern(datapath.MaxFrame+1, 0))
	a, p := mustAttach(f, false)
	var good, bad uint64
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 100_000 {
			return
		}
		require.NoError(t, p.Send(b))
		require.NoError(t, p.Send(pattern(60, 0)))
		want := [][]byte{pattern(60, 0)}
		switch {
		case len(b) >= minFrame && len(b) <= datapath.MaxFrame:
			want = [][]byte{b, pattern(60, 0)}
		case string(b) != greeting:
			bad++
		}
		good += uint64(len(want))
		require.Equal(t, want, mustRead(t, a, len(want)))
		require.Equal(t, good, a.Stats().FromGuest.Frames.Load())
		require.Equal(t, bad, a.Stats().Drops(datapath.DropTooShort)+a.Stats().Drops(datapath.DropTooLong))
	})
}

func BenchmarkWriteBatch(b *testing.B) {
	for name, connected := range kinds {
		for _, size := range []int{60, 1514, 65534} {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				a, p := mustAttach(b, connected)
				drained := make(chan struct{})
				go func() {
					defer close(drained)
					for {
						if _, err := p.conn.Read(p.buf); err != nil {
							return
						}
					}
				}()
				batch := make([]datapath.Frame, 16)
				for i := range batch {
					batch[i] = numbered(size, 0)
				}
				b.SetBytes(int64(size))
				for n := 0; n < b.N; n += len(batch) {
					if err := writeAll(a.QueuePairs()[0], batch); err != nil {
						b.Fatal(err)
					}
				}
				b.StopTimer()
				_ = p.Leave()
				<-drained
			})
		}
	}
}
