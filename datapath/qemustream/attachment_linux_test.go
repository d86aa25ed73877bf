package qemustream

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// peer is the VMM's end: what QEMU's -netdev stream does with its socket.
type peer struct {
	conn Conn
	in   *bufio.Reader
	out  []byte
}

var _ datapathtest.Peer = (*peer)(nil)

func newPeer(conn Conn) *peer {
	return &peer{conn: conn, in: bufio.NewReaderSize(conn, prefixLen+datapath.MaxFrame)}
}

func (p *peer) MaxFrame() int { return datapath.MaxFrame }

func (p *peer) Send(frame []byte) error {
	p.out = appendWire(p.out[:0], frame)
	_, err := p.conn.Write(p.out)
	return err
}

func (p *peer) Recv(timeout time.Duration) ([]byte, error) {
	if err := p.conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	prefix, err := p.in.Peek(prefixLen)
	if err != nil {
		return nil, err
	}
	n := prefixLen + int(binary.BigEndian.Uint32(prefix))
	whole, err := p.in.Peek(n) // a time-out loses no byte
	if err != nil {
		return nil, err
	}
	frame := append([]byte(nil), whole[prefixLen:]...)
	_, err = p.in.Discard(n)
	return frame, err
}

func (p *peer) Leave() error {
	_ = p.conn.Close() // closing again is no error here
	return nil
}

// mustConnect returns two connected sockets, over loopback or in the file
// system.
func mustConnect(tb testing.TB, network string) (ours, theirs Conn) {
	tb.Helper()
	addr := "127.0.0.1:0"
	if network == "unix" {
		addr = filepath.Join(tb.TempDir(), "s")
	}
	l, err := net.Listen(network, addr)
	require.NoError(tb, err)
	defer func() { assert.NoError(tb, l.Close()) }()
	dialled, err := net.Dial(network, l.Addr().String())
	require.NoError(tb, err)
	accepted, err := l.Accept()
	require.NoError(tb, err)
	return accepted.(Conn), dialled.(Conn)
}

// mustAttach returns an attachment and the VMM's end of it, both closed with
// the test.
func mustAttach(tb testing.TB, network string) (datapath.Attachment, *peer) {
	tb.Helper()
	ours, theirs := mustConnect(tb, network)
	a, err := New(ours, network)
	require.NoError(tb, err)
	p := newPeer(theirs)
	tb.Cleanup(func() {
		assert.NoError(tb, a.Close())
		assert.NoError(tb, p.Leave())
	})
	return a, p
}

func TestConformance(t *testing.T) {
	for _, network := range []string{"unix", "tcp"} {
		t.Run(network, func(t *testing.T) {
			datapathtest.Conformance(t, func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
				return mustAttach(t, network)
			})
		})
	}
}

func TestInfo(t *testing.T) {
	datapathtest.Leaks(t)
	a, _ := mustAttach(t, "unix")
	assert.Equal(t, datapath.Info{Transport: "qemu", Name: "unix", Connected: true}, a.Info())
}

// writeAll writes frames, waiting for Room when there is none.
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

// numbered is a frame of n bytes that begins with a sequence number.
func numbered(n int, seq uint32) datapath.Frame {
	b := pattern(n, int(seq))
	binary.BigEndian.PutUint32(b, seq)
	return datapath.Frame{Segs: [][]byte{b[:min(n, 54)], b[min(n, 54):]}, N: n}
}

// TestFB131PeerStopsReading: the peer takes nothing until the socket is full,
// then everything. Nothing is lost, repeated or torn, and the frame that was
// half sent when it stopped comes out whole.
func TestFB131PeerStopsReading(t *testing.T) {
	for _, network := range []string{"unix", "tcp"} {
		for _, size := range []int{60, 1514, 9000, datapath.MaxFrame} {
			t.Run(fmt.Sprintf("%s/%d", network, size), func(t *testing.T) {
				datapathtest.Leaks(t)
				a, p := mustAttach(t, network)
				q := a.QueuePairs()[0]
				batch := make([]datapath.Frame, 32)
				seq := uint32(0)
				short := false
				for !short {
					for i := range batch {
						batch[i] = numbered(size, seq+uint32(i))
					}
					n, err := q.WriteBatch(batch)
					require.NoError(t, err)
					seq += uint32(n)
					short = n < len(batch)
				}
				n, err := q.WriteBatch(batch)
				require.NoError(t, err)
				require.Zero(t, n, "still full")
				select {
				case <-q.Room():
					require.Fail(t, "Room fired while the socket is full")
				default:
				}

				const more = 50
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
					got, err := p.Recv(10 * time.Second)
					require.NoError(t, err)
					want := numbered(size, i)
					require.Equal(t, frameBytes(want), got, "frame %d", i)
				}
				require.NoError(t, <-sent)
				assert.Empty(t, a.Stats().AllDrops())
				assert.EqualValues(t, seq+more, a.Stats().ToGuest.Frames.Load())
				assert.EqualValues(t, uint64(seq+more)*uint64(size), a.Stats().ToGuest.Bytes.Load())
			})
		}
	}
}

// TestWritersTakeTurns: frames of several writers are never mixed.
func TestWritersTakeTurns(t *testing.T) {
	datapathtest.Leaks(t)
	a, p := mustAttach(t, "unix")
	q := a.QueuePairs()[0]
	const writers, each = 4, 200
	var room sync.Cond
	room.L = new(sync.Mutex)
	done := make(chan struct{})
	go func() { // one receiver of Room for all writers, as the contract has it
		for {
			select {
			case <-q.Room():
				room.L.Lock()
				room.Broadcast()
				room.L.Unlock()
			case <-done:
				return
			}
		}
	}()
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				f := []datapath.Frame{numbered(1000*(w+1), uint32(w*each+i))}
				room.L.Lock()
				for {
					n, err := q.WriteBatch(f)
					assert.NoError(t, err)
					if n == 1 || err != nil {
						break
					}
					room.Wait()
				}
				room.L.Unlock()
			}
		})
	}
	next := make([]uint32, writers)
	for range writers * each {
		got, err := p.Recv(10 * time.Second)
		require.NoError(t, err)
		w := len(got)/1000 - 1
		require.Equal(t, frameBytes(numbered(len(got), uint32(w*each)+next[w])), got)
		next[w]++
	}
	wg.Wait()
	close(done)
}

// TestFB121CutAnywhere attaches and detaches 200 times with traffic both ways,
// and cuts the peer off at a random byte of a frame.
func TestFB121CutAnywhere(t *testing.T) {
	datapathtest.Leaks(t)
	rnd := rand.New(rand.NewPCG(121, 0))
	for cycle := range 200 {
		ours, theirs := mustConnect(t, []string{"unix", "tcp"}[cycle%2])
		a, err := New(ours, "cut")
		require.NoError(t, err)
		q := a.QueuePairs()[0]
		var wg sync.WaitGroup
		var got int
		wg.Go(func() {
			frames := make([]datapath.Frame, 8)
			for {
				n, err := q.ReadBatch(frames, lend)
				if err != nil {
					assert.ErrorIs(t, err, datapath.ErrPeerGone)
					return
				}
				got += n
			}
		})
		wg.Go(func() {
			for err := error(nil); err == nil; {
				err = writeAll(q, []datapath.Frame{numbered(60+cycle*20, 0), numbered(1514, 1)})
			}
		})
		wire := appendWire(appendWire(nil, pattern(60+rnd.IntN(9000), 1)), pattern(1514, 2))
		cut := rnd.IntN(len(wire) + 1)
		_, err = theirs.Write(wire[:cut])
		require.NoError(t, err)
		if cycle%3 == 0 { // with the socket full, too: the writer waits for Room
			_ = theirs.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, _ = theirs.Read(make([]byte, 1+rnd.IntN(5000)))
		}
		require.NoError(t, theirs.Close())
		wg.Wait()
		require.LessOrEqual(t, got, 2)

		_, err = q.WriteBatch([]datapath.Frame{numbered(60, 0)})
		require.ErrorIs(t, err, datapath.ErrPeerGone)
		require.NoError(t, a.Close())
		require.NoError(t, a.Close())
		_, err = q.WriteBatch([]datapath.Frame{numbered(60, 0)})
		require.ErrorIs(t, err, datapath.ErrClosed)
	}
}

// TestCloseWhileFull: Close ends a waiting attachment, its reader included.
func TestCloseWhileFull(t *testing.T) {
	datapathtest.Leaks(t)
	a, _ := mustAttach(t, "unix")
	q := a.QueuePairs()[0]
	read := make(chan error)
	go func() {
		_, err := q.ReadBatch(make([]datapath.Frame, 1), lend)
		read <- err
	}()
	for n := 1; n == 1; {
		var err error
		n, err = q.WriteBatch([]datapath.Frame{numbered(9000, 0)})
		require.NoError(t, err)
	}
	require.NoError(t, a.Close())
	assert.ErrorIs(t, <-read, datapath.ErrClosed)
	<-q.Room()
}

// TestNoiseEndsTheAttachment: a stream out of step ends both directions, for a
// peer that stays connected as well.
func TestNoiseEndsTheAttachment(t *testing.T) {
	datapathtest.Leaks(t)
	a, p := mustAttach(t, "unix")
	q := a.QueuePairs()[0]
	_, err := p.conn.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	require.NoError(t, err)
	_, err = q.ReadBatch(make([]datapath.Frame, 1), lend)
	require.ErrorIs(t, err, datapath.ErrPeerGone)
	<-q.Room()
	_, err = q.WriteBatch([]datapath.Frame{numbered(60, 0)})
	require.ErrorIs(t, err, datapath.ErrPeerGone)
	_, err = p.Recv(10 * time.Second)
	assert.Error(t, err, "the peer is told by a closed connection")
}

func TestAllocs(t *testing.T) {
	a, p := mustAttach(t, "unix")
	q := a.QueuePairs()[0]
	const batch = 16
	out, in := make([]datapath.Frame, batch), make([]datapath.Frame, batch)
	var wire []byte
	for i := range out {
		out[i] = numbered(1514, uint32(i))
		wire = appendWire(wire, pattern(1514, i))
	}
	head, body := make([]byte, 128), make([]byte, datapath.MaxFrame)
	segs := [][]byte{head, body}
	get := func(int) [][]byte { return segs }
	sink := make([]byte, len(wire))
	assert.Zero(t, testing.AllocsPerRun(200, func() {
		if _, err := p.conn.Write(wire); err != nil {
			t.Error(err)
		}
		for n := 0; n < batch; {
			k, err := q.ReadBatch(in, get)
			if err != nil {
				t.Error(err)
			}
			n += k
		}
		if n, err := q.WriteBatch(out); n != batch || err != nil {
			t.Error(n, err)
		}
		for n := 0; n < len(wire); {
			k, err := p.conn.Read(sink)
			if err != nil {
				t.Error(err)
			}
			n += k
		}
	}))
}

func BenchmarkWriteBatch(b *testing.B) {
	for _, size := range []int{60, 1514, 65534} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			a, p := mustAttach(b, "unix")
			drained := make(chan struct{})
			go func() {
				defer close(drained)
				for buf := make([]byte, readAhead); ; {
					if _, err := p.conn.Read(buf); err != nil {
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

func BenchmarkReadBatch(b *testing.B) {
	for _, size := range []int{60, 1514, 65534} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			a, p := mustAttach(b, "unix")
			var wire []byte
			for range 16 {
				wire = appendWire(wire, pattern(size, 0))
			}
			stopped := make(chan struct{})
			go func() {
				defer close(stopped)
				for {
					if _, err := p.conn.Write(wire); err != nil {
						return
					}
				}
			}()
			segs := [][]byte{make([]byte, 128), make([]byte, datapath.MaxFrame)}
			frames := make([]datapath.Frame, 64)
			b.SetBytes(int64(size))
			for n := 0; n < b.N; {
				k, err := a.QueuePairs()[0].ReadBatch(frames, func(int) [][]byte { return segs })
				if err != nil {
					b.Fatal(err)
				}
				n += k
			}
			b.StopTimer()
			_ = a.Close()
			<-stopped
		})
	}
}
