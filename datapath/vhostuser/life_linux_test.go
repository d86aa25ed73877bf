package vhostuser

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// frame returns a frame of n bytes that is told from others by its number.
func frame(n int, seq uint32) []byte {
	b := bytes.Repeat([]byte{byte(seq)}, n)
	binary.BigEndian.PutUint32(b, seq)
	return b
}

// mustSame compares frames, of which it prints no more than it must.
func mustSame(t *testing.T, want, got []byte) {
	t.Helper()
	require.Equal(t, len(want), len(got), "length")
	require.Equal(t, want[:4], got[:min(4, len(got))], "number")
	require.True(t, bytes.Equal(want, got), "frame damaged")
}

func lend(n int) [][]byte { return [][]byte{make([]byte, n)} }

// write hands frames to the guest as far as there is room.
func write(a datapath.Attachment, frames ...[]byte) (int, error) {
	var batch []datapath.Frame
	for _, b := range frames {
		batch = append(batch, datapath.Frame{Segs: [][]byte{b}, N: len(b)})
	}
	return a.QueuePairs()[0].WriteBatch(batch)
}

func mustWrite(t *testing.T, a datapath.Attachment, frames ...[]byte) {
	t.Helper()
	n, err := write(a, frames...)
	require.NoError(t, err)
	require.Equal(t, len(frames), n)
}

// writeAll waits for room.
func writeAll(a datapath.Attachment, frames ...[]byte) error {
	for {
		n, err := write(a, frames...)
		if err != nil || n == len(frames) {
			return err
		}
		frames = frames[n:]
		select {
		case <-a.QueuePairs()[0].Room():
		case <-time.After(patience):
			return errors.New("no room")
		}
	}
}

// mustRead reads n frames, and ends the attachment if they do not come.
func mustRead(t *testing.T, a datapath.Attachment, n int) (all [][]byte) {
	t.Helper()
	defer time.AfterFunc(patience, func() { _ = a.Close() }).Stop()
	frames := make([]datapath.Frame, 8)
	for len(all) < n {
		k, err := a.QueuePairs()[0].ReadBatch(frames, lend)
		require.NoError(t, err)
		for _, f := range frames[:k] {
			all = append(all, bytes.Join(f.Segs, nil)[:f.N])
		}
	}
	return all
}

// mustEnd reads until the attachment ends, and returns how.
func mustEnd(t *testing.T, a datapath.Attachment) error {
	t.Helper()
	defer time.AfterFunc(patience, func() { _ = a.Close() }).Stop()
	frames := make([]datapath.Frame, 8)
	for {
		if _, err := a.QueuePairs()[0].ReadBatch(frames, lend); err != nil {
			return err
		}
	}
}

// send makes frames available in TX, all at once.
func (v *vmm) send(t *testing.T, frames ...[]byte) {
	t.Helper()
	for _, b := range frames {
		require.NoError(t, v.tx[0].Add(virtio.NetHdr{}, b))
	}
	v.tx[0].Publish()
}

func (v *vmm) mustRecv(t *testing.T) []byte {
	t.Helper()
	b, err := (&peer{v}).Recv(patience)
	require.NoError(t, err)
	return b
}

// exchange moves a frame each way.
func exchange(t *testing.T, a datapath.Attachment, v *vmm, seq uint32) {
	t.Helper()
	v.send(t, frame(60, seq))
	mustSame(t, frame(60, seq), mustRead(t, a, 1)[0])
	mustWrite(t, a, frame(1514, seq))
	mustSame(t, frame(1514, seq), v.mustRecv(t))
}

// mustOpen joins an attachment with a guest.
func mustOpen(t *testing.T, cfg config) (*Listener, datapath.Attachment, *vmm) {
	t.Helper()
	l := mustListen(t, Options{Queues: cfg.pairs})
	v := mustConnect(t, l.path, cfg)
	return l, mustAccept(t, l), v
}

// restart stops all rings and starts them again with the bases they had. change
// is called in between.
func (v *vmm) restart(t *testing.T, change func()) {
	t.Helper()
	bases := make([]uint16, len(v.lines))
	for i := range v.lines {
		var err error
		bases[i], err = v.stop(i)
		require.NoError(t, err)
	}
	change()
	for i := range v.lines {
		require.NoError(t, v.do(v.startSteps(i, bases[i])...))
	}
}

func combinations() map[string]config {
	all := make(map[string]config)
	for name, features := range map[string]uint64{
		"everything":   everything,
		"no EVENT_IDX": everything &^ featureEventIdx,
		"no INDIRECT":  everything &^ featureIndirectDesc,
	} {
		c := plain()
		c.features = features
		all[name] = c
	}
	c := plain()
	c.features, c.rxSize = everything&^featureMrgRxBuf, 2048
	all["no MRG_RXBUF"] = c
	return all
}

// TestFB125LostKick: what is made available while the rings are stopped, and told
// by a kick that nobody heard, is served as soon as they run; and the driver is
// called, who may be waiting for what was returned before.
func TestFB125LostKick(t *testing.T) {
	for name, cfg := range combinations() {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			_, a, v := mustOpen(t, cfg)
			exchange(t, a, v, 1)
			v.restart(t, func() {
				for seq := range uint32(8) {
					require.NoError(t, v.tx[0].Add(virtio.NetHdr{}, frame(60, seq)))
				}
				v.tx[0].Kick = nil // the kick is lost
				v.tx[0].Publish()
				v.tx[0].Kick = v.lines[1].ring
				n, err := write(a, frame(60, 100))
				require.NoError(t, err)
				require.Zero(t, n, "no room while stopped")
				drain(t, v.lines[0].call)
				drain(t, v.lines[1].call)
			})
			for seq, b := range mustRead(t, a, 8) {
				mustSame(t, frame(60, uint32(seq)), b)
			}
			for _, l := range v.lines {
				assert.Positive(t, drain(t, l.call), "not called at the start")
			}
			select {
			case <-a.QueuePairs()[0].Room():
			case <-time.After(patience):
				require.Fail(t, "Room did not fire")
			}
			exchange(t, a, v, 9)
		})
	}
}

// drain takes an eventfd's counter.
func drain(t *testing.T, fd int) uint64 {
	t.Helper()
	var b [8]byte
	_, err := unix.Read(fd, b[:])
	if errors.Is(err, unix.EAGAIN) {
		return 0
	}
	require.NoError(t, err)
	return binary.NativeEndian.Uint64(b[:])
}

// TestFB126Paused: while the guest is paused nothing of its memory changes, and
// what is sent waits.
func TestFB126Paused(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	exchange(t, a, v, 1)
	var stop sync.WaitGroup
	done := make(chan struct{})
	stop.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				if _, err := write(a, frame(1000, 7)); err != nil {
					return
				}
				runtime.Gosched()
			}
		}
	})
	v.restart(t, func() {
		v.send(t, frame(60, 2))
		frozen := bytes.Clone(v.memory)
		time.Sleep(20 * time.Millisecond) // for what must not happen
		assert.True(t, bytes.Equal(frozen, v.memory), "written to a paused guest")
	})
	mustSame(t, frame(60, 2), mustRead(t, a, 1)[0])
	mustSame(t, frame(1000, 7), v.mustRecv(t))
	close(done)
	stop.Wait()
}

// TestFB127SlowRefill: a burst longer than the ring, then silence: each buffer
// that the guest gives brings one frame.
func TestFB127SlowRefill(t *testing.T) {
	for name, cfg := range combinations() {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			cfg.num = 16
			_, a, v := mustOpen(t, cfg)
			const frames = 500
			wrote := make(chan error, 1)
			go func() {
				for seq := uint32(0); seq < frames; {
					n, err := write(a, frame(600, seq), frame(600, seq+1))
					if err != nil {
						wrote <- err
						return
					}
					if seq += uint32(n); n < 2 && seq < frames {
						<-a.QueuePairs()[0].Room()
					}
				}
				wrote <- nil
			}()
			rx := v.rx[0]
			for seq := range uint32(frames) {
				for {
					_, b, ok, err := rx.Take()
					require.NoError(t, err)
					if ok {
						mustSame(t, frame(600, seq), b)
						break
					}
					rx.Post(1)
					require.True(t, v.await(0, time.Now().Add(patience)), "frame %d", seq)
				}
			}
			require.NoError(t, <-wrote)
		})
	}
}

// TestFB128NeverFits: without mergeable buffers a frame that a buffer cannot hold
// is dropped and counted, the buffer stays for one that it can hold, and nothing
// is sent that the driver did not say it takes.
func TestFB128NeverFits(t *testing.T) {
	datapathtest.Leaks(t)
	cfg := plain()
	cfg.features = featureVersion1 | featureGuestCSum
	cfg.rxSize = 212 // with the header
	cfg.num = 1
	_, a, v := mustOpen(t, cfg)
	st := a.Stats()
	mustWrite(t, a, frame(1514, 1), frame(201, 2), frame(200, 3))
	assert.EqualValues(t, 2, st.Drops(datapath.DropTooLong))
	assert.EqualValues(t, 1, st.ToGuest.Frames.Load())
	assert.EqualValues(t, 200, st.ToGuest.Bytes.Load())
	mustSame(t, frame(200, 3), v.mustRecv(t))

	super := datapath.Frame{Segs: [][]byte{frame(150, 4)}, N: 150, Hdr: virtio.NetHdr{
		Flags: virtio.FlagNeedsCSum, GSOType: virtio.GSOTCPv4, GSOSize: 50, HdrLen: 54, CSumStart: 34, CSumOffset: 16,
	}}
	wild := super
	wild.Hdr = virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: 34, CSumOffset: 5000}
	n, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{super, wild})
	require.NoError(t, err)
	assert.Equal(t, 2, n)
	assert.EqualValues(t, 1, st.Drops(datapath.DropNotOffered))
	assert.EqualValues(t, 1, st.Drops(datapath.DropBadHeader))
	mustWrite(t, a, frame(60, 5))
	mustSame(t, frame(60, 5), v.mustRecv(t))
}

// TestMergedNeverFits: with mergeable buffers too there is a frame that a whole
// ring cannot hold.
func TestMergedNeverFits(t *testing.T) {
	datapathtest.Leaks(t)
	cfg := plain()
	cfg.rxSize, cfg.num = 100, 8
	_, a, v := mustOpen(t, cfg)
	mustWrite(t, a, frame(789, 1), frame(788, 2)) // 8 buffers of 100 bytes, a header of 12
	assert.EqualValues(t, 1, a.Stats().Drops(datapath.DropTooLong))
	mustSame(t, frame(788, 2), v.mustRecv(t))
	n, err := write(a, frame(788, 3), frame(788, 4))
	require.NoError(t, err)
	assert.Equal(t, 1, n, "the second waits")
	mustSame(t, frame(788, 3), v.mustRecv(t))
	<-a.QueuePairs()[0].Room()
}

// TestHeaders: the virtio-net header passes both ways as it is, but for what
// means nothing.
func TestHeaders(t *testing.T) {
	datapathtest.Leaks(t)
	hdr := virtio.NetHdr{
		Flags: virtio.FlagNeedsCSum, GSOType: virtio.GSOTCPv4, HdrLen: 54, GSOSize: 1448, CSumStart: 34, CSumOffset: 16,
	}
	for name, cfg := range combinations() {
		t.Run(name, func(t *testing.T) {
			cfg.rxSize = datapath.MaxFrame + 12
			cfg.num = 64
			_, a, v := mustOpen(t, cfg)
			assert.Equal(t, datapath.Info{
				Transport: "vhost-user", Name: a.(*attachment).dev.name, Connected: true,
				ToGuest:   virtio.OffloadCSum | virtio.OffloadTSO4 | virtio.OffloadTSO6,
				FromGuest: virtio.OffloadCSum | virtio.OffloadTSO4 | virtio.OffloadTSO6,
			}, a.Info())
			out := hdr
			out.NumBuffers = 77 // ours to say
			n, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{{Hdr: out, Segs: [][]byte{frame(60000, 1)}, N: 60000}})
			require.NoError(t, err)
			require.Equal(t, 1, n)
			require.True(t, v.await(0, time.Now().Add(patience)))
			got, b, ok, err := v.rx[0].Take()
			require.NoError(t, err)
			require.True(t, ok)
			got.NumBuffers = 0
			assert.Equal(t, hdr, got)
			mustSame(t, frame(60000, 1), b)

			require.NoError(t, v.tx[0].Add(out, frame(60000, 2)))
			v.tx[0].Publish()
			frames := make([]datapath.Frame, 1)
			n, err = a.QueuePairs()[0].ReadBatch(frames, lend)
			require.NoError(t, err)
			require.Equal(t, 1, n)
			assert.Equal(t, hdr, frames[0].Hdr)
			mustSame(t, frame(60000, 2), frames[0].Segs[0])
		})
	}
}

// TestNoFlagsWithoutGuestCSum: a driver that takes no checksum offload is told of
// none, not even of a sum that is known to be right.
func TestNoFlagsWithoutGuestCSum(t *testing.T) {
	cfg := plain()
	cfg.features &^= featureGuestCSum | featureGuestTSO4 | featureGuestTSO6
	_, a, v := mustOpen(t, cfg)
	_, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{{Hdr: virtio.NetHdr{Flags: virtio.FlagDataValid}, Segs: [][]byte{frame(60, 1)}, N: 60}})
	require.NoError(t, err)
	require.True(t, v.await(0, time.Now().Add(patience)))
	got, _, _, err := v.rx[0].Take()
	require.NoError(t, err)
	assert.Zero(t, got.Flags)
}

// TestFB133Back: a back-end that was away comes back on the same path, and a
// front-end that tries again finds it.
func TestFB133Back(t *testing.T) {
	datapathtest.Leaks(t)
	path := filepath.Join(t.TempDir(), "s")
	for seq := range uint32(5) {
		l, err := Listen(path, Options{})
		require.NoError(t, err)
		v := mustConnect(t, path, plain())
		a := mustAccept(t, l)
		exchange(t, a, v, seq)
		require.NoError(t, a.Close())
		require.NoError(t, l.Close())
		require.NoFileExists(t, path)
		_, err = v.ask(reqGetFeatures, nil)
		require.Error(t, err, "the front-end is told")
		_, err = dial(path, plain())
		require.Error(t, err)
		v.close()
	}
}

// TestFB134ResumeFromUsed: after 20 of 64 buffers have been used another back-end
// goes on with the 21st, whatever base it is given: what the ring says is what
// has happened.
func TestFB134ResumeFromUsed(t *testing.T) {
	for name, base := range map[string]uint16{"used index": 20, "available index": 64, "zero": 0} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			cfg := plain()
			cfg.num = 64
			_, a, v := mustOpen(t, cfg)
			for seq := range uint32(20) {
				mustWrite(t, a, frame(100, seq))
				v.send(t, frame(100, seq))
			}
			mustRead(t, a, 20)
			rx := v.rx[0]
			for seq := range uint32(20) {
				_, b, ok, err := rx.Take()
				require.NoError(t, err)
				require.True(t, ok)
				mustSame(t, frame(100, seq), b)
			}
			v.send(t) // TX is all taken

			// The same guest, another connection to another back-end.
			require.NoError(t, a.Close())
			l := mustListen(t, Options{})
			conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: l.path})
			require.NoError(t, err)
			require.NoError(t, v.conn.Close())
			v.conn = conn
			steps := v.steps()
			for i := range steps {
				if steps[i].request == reqSetVringBase {
					binary.NativeEndian.PutUint32(steps[i].payload[4:], uint32(base))
				}
			}
			require.NoError(t, v.do(steps...))
			a = mustAccept(t, l)
			for seq := uint32(20); seq < 64; seq++ {
				before := rx.Vring().UsedIndex()
				mustWrite(t, a, frame(100, seq))
				require.Equal(t, before+1, rx.Vring().UsedIndex())
				_, b, ok, err := rx.Take() // refuses what was never given, or given back already
				require.NoError(t, err)
				require.True(t, ok)
				mustSame(t, frame(100, seq), b)
			}
			assert.Zero(t, rx.Pending())
			rx.Post(64)
			exchange(t, a, v, 99)
		})
	}
}

// TestFB136Handshake: a connection that breaks after any number of requests leaves
// nothing behind, also not in the next.
func TestFB136Handshake(t *testing.T) {
	datapathtest.Leaks(t)
	l := mustListen(t, Options{})
	cfg := plain()
	v, err := dial(l.path, cfg)
	require.NoError(t, err)
	steps := len(v.steps())
	v.close()
	for try := range 100 {
		for n := range steps {
			if try >= 2 && (n+try)%steps > 3 {
				continue // all of them twice, then some of them
			}
			v, err := dial(l.path, cfg)
			require.NoError(t, err)
			require.NoError(t, v.do(v.steps()[:n]...), "try %d, %d requests", try, n)
			v.close()
		}
	}
	v = mustConnect(t, l.path, cfg)
	exchange(t, mustAccept(t, l), v, 1)
	assert.Zero(t, l.Refused())
}

// TestKilledAtEveryByte: likewise in the middle of a request.
func TestKilledAtEveryByte(t *testing.T) {
	datapathtest.Leaks(t)
	l := mustListen(t, Options{})
	cfg := plain()
	cfg.protocol &^= protocolReplyAck // nobody waits for answers
	v := mustConnect(t, l.path, cfg)
	require.NoError(t, mustAccept(t, l).Close())
	steps := v.steps()
	var err error
	for i, s := range steps {
		b := encode(s.request, 0, s.payload)
		for cut := 1; cut < len(b); cut++ {
			if i > 12 && cut%5 != 0 {
				continue // rings are alike
			}
			require.NoError(t, v.conn.Close())
			v.conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: l.path})
			require.NoError(t, err)
			require.NoError(t, v.do(steps[:i]...))
			require.NoError(t, v.write(b[:cut], s.fds...))
		}
	}
	v.close()
	v = mustConnect(t, l.path, cfg)
	exchange(t, mustAccept(t, l), v, 1)
}

// TestFB137Reboots: a guest that reboots under one attachment finds rings as new
// as its own.
func TestFB137Reboots(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	for seq := range uint32(20) {
		exchange(t, a, v, seq)
		exchange(t, a, v, 100+seq)
		v.restart(t, func() { v.boot(0) }) // with stale bases at that
		assert.Zero(t, v.rx[0].Vring().UsedIndex())
		v.send(t, frame(60, 5))
		mustWrite(t, a, frame(60, 6))
		assert.EqualValues(t, 1, v.rx[0].Vring().UsedIndex())
		mustSame(t, frame(60, 6), v.mustRecv(t))
		mustSame(t, frame(60, 5), mustRead(t, a, 1)[0])
	}
}

// TestResets: RESET_DEVICE and a device status of 0 stop everything, and what
// starts after them is new. The attachment lives on.
func TestResets(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	for seq := range uint32(4) {
		exchange(t, a, v, seq)
		if seq%2 == 0 {
			require.NoError(t, v.tell(reqResetDevice, nil))
		} else {
			require.NoError(t, v.tell(reqSetStatus, u64s(0)))
		}
		n, err := write(a, frame(60, 1))
		require.NoError(t, err)
		require.Zero(t, n)
		v.boot(0)
		require.NoError(t, v.tell(reqSetFeatures, u64s(v.cfg.features|featureProtocolFeatures)))
		for i := range v.lines {
			require.NoError(t, v.do(v.startSteps(i, 0)...))
			require.NoError(t, v.tell(reqSetVringEnable, u32s(uint32(i), 1)))
		}
	}
	exchange(t, a, v, 9)
}

// TestOtherOffloads: a driver that starts with other offloads ends the attachment
// and gets one of its own, on the same connection.
func TestOtherOffloads(t *testing.T) {
	datapathtest.Leaks(t)
	l, a, v := mustOpen(t, plain())
	exchange(t, a, v, 1)
	for _, features := range []uint64{
		everything &^ featureGuestTSO4, everything &^ featureCSum, everything, 0, featureVersion1, everything,
	} {
		before := a.Info()
		v.cfg.features = features
		if features&featureMrgRxBuf == 0 {
			v.cfg.rxSize = 1600
		}
		v.restart(t, func() {
			require.NoError(t, v.tell(reqSetFeatures, u64s(features|featureProtocolFeatures)))
			v.boot(0)
		})
		if before.ToGuest != toGuest(features) || before.FromGuest != fromGuest(features) {
			require.ErrorIs(t, mustEnd(t, a), datapath.ErrPeerGone)
			_, err := write(a, frame(60, 1))
			require.ErrorIs(t, err, datapath.ErrPeerGone)
			assert.Equal(t, before, a.Info())
			require.NoError(t, a.Close())
			a = mustAccept(t, l)
		}
		assert.Equal(t, toGuest(features), a.Info().ToGuest)
		assert.Equal(t, fromGuest(features), a.Info().FromGuest)
		exchange(t, a, v, 2)
	}
	assert.Zero(t, l.Refused())
}

// TestAcceptAgain: an attachment that we close frees the rings for the next, on
// the same connection, and Accept waits until it has been closed.
func TestAcceptAgain(t *testing.T) {
	datapathtest.Leaks(t)
	l, a, v := mustOpen(t, plain())
	for seq := range uint32(20) {
		exchange(t, a, v, seq)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		_, err := l.Accept(ctx)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		reading := make(chan error, 1)
		go func() {
			_, err := a.QueuePairs()[0].ReadBatch(make([]datapath.Frame, 1), lend)
			reading <- err
		}()
		require.NoError(t, a.Close())
		require.ErrorIs(t, <-reading, datapath.ErrClosed)
		v.send(t, frame(60, 77)) // waits for the next
		a = mustAccept(t, l)
		mustSame(t, frame(60, 77), mustRead(t, a, 1)[0])
	}
}

// TestReconnects: a front-end that is killed in the middle of traffic and comes
// back, many times.
func TestReconnects(t *testing.T) {
	datapathtest.Leaks(t)
	l := mustListen(t, Options{})
	for i := range 100 {
		v := mustConnect(t, l.path, plain())
		a := mustAccept(t, l)
		var wg sync.WaitGroup
		wg.Go(func() {
			for seq := uint32(0); ; seq++ {
				if (&peer{v}).Send(frame(1000, seq)) != nil {
					return
				}
			}
		})
		wg.Go(func() {
			for {
				if _, err := write(a, frame(2000, 1)); err != nil {
					assert.ErrorIs(t, err, datapath.ErrPeerGone)
					return
				}
				runtime.Gosched()
			}
		})
		mustRead(t, a, 1+i%7)
		v.close()
		require.ErrorIs(t, mustEnd(t, a), datapath.ErrPeerGone)
		wg.Wait()
		require.NoError(t, a.Close())
	}
	assert.Zero(t, l.Refused())
}

// TestGoneOnce: while the rings of a front-end that has left are being stopped,
// which takes a moment where there are many, they are given to nobody any more.
func TestGoneOnce(t *testing.T) {
	datapathtest.Leaks(t)
	l := mustListen(t, Options{Queues: MaxQueues})
	cfg := plain()
	cfg.features |= featureMQ
	cfg.pairs, cfg.num, cfg.rxSize = MaxQueues, 16, 1600
	for range 20 {
		v := mustConnect(t, l.path, cfg)
		a := mustAccept(t, l)
		v.close()
		require.ErrorIs(t, mustEnd(t, a), datapath.ErrPeerGone)
		require.NoError(t, a.Close())
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		_, err := l.Accept(ctx)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
}

// TestSecondFrontend: whoever has the guest keeps it; the other is told at once,
// logged once.
func TestSecondFrontend(t *testing.T) {
	datapathtest.Leaks(t)
	log := &logBuffer{}
	l := mustListen(t, Options{Log: log.logger()})
	v := mustConnect(t, l.path, plain())
	a := mustAccept(t, l)
	for range 3 {
		other, err := dial(l.path, plain())
		require.NoError(t, err)
		_, err = other.ask(reqGetFeatures, nil)
		require.Error(t, err)
		other.close()
	}
	assert.EqualValues(t, 3, l.Refused())
	assert.Equal(t, 1, log.lines(), log.String())
	exchange(t, a, v, 1)
}

// TestListenerCloses: an attachment lives on, with its connection; without one
// the connection ends.
func TestListenerCloses(t *testing.T) {
	datapathtest.Leaks(t)
	l, a, v := mustOpen(t, plain())
	require.NoError(t, l.Close())
	require.NoFileExists(t, l.path)
	exchange(t, a, v, 1)
	v.restart(t, func() {})
	exchange(t, a, v, 2)
	_, err := l.Accept(t.Context())
	require.ErrorIs(t, err, datapath.ErrClosed)
	require.NoError(t, a.Close())
	_, err = v.ask(reqGetFeatures, nil)
	require.Error(t, err)

	l = mustListen(t, Options{})
	v = mustConnect(t, l.path, plain())
	require.NoError(t, l.Close())
	_, err = v.ask(reqGetFeatures, nil)
	require.Error(t, err)
}

// TestMemoryChanges: regions that are replaced, taken away and given back under
// running rings.
func TestMemoryChanges(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	exchange(t, a, v, 1)
	for seq := range uint32(5) {
		require.NoError(t, v.tell(reqSetMemTable, v.table(), v.memfd, v.memfd))
		exchange(t, a, v, seq)

		low := append(u64s(0), v.regions()[1].encode()...) // with the rings
		require.NoError(t, v.tell(reqRemMemReg, low))
		v.send(t, frame(60, 50))
		n, err := write(a, frame(60, 51))
		require.NoError(t, err)
		require.Zero(t, n, "there is no ring")
		require.NoError(t, v.tell(reqAddMemReg, low, v.memfd))
		<-a.QueuePairs()[0].Room()
		mustSame(t, frame(60, 50), mustRead(t, a, 1)[0])
		exchange(t, a, v, seq)
	}
	// Buffers that are not there any more are bad chains, no more.
	require.NoError(t, v.tell(reqRemMemReg, append(u64s(0), v.regions()[0].encode()...)))
	for n := 1; n > 0; { // as long as there are buffers elsewhere
		var err error
		n, err = write(a, frame(60, 1))
		require.NoError(t, err)
	}
	assert.Positive(t, a.Stats().Drops(datapath.DropRejected))
}

// TestDisabled: TX of a ring that is not enabled is taken and thrown away, RX not
// used; enabled again, all works.
func TestDisabled(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	exchange(t, a, v, 1)
	for i := range v.lines {
		require.NoError(t, v.tell(reqSetVringEnable, u32s(uint32(i), 0)))
	}
	n, err := write(a, frame(60, 1))
	require.NoError(t, err)
	require.Zero(t, n)
	read := make(chan [][]byte)
	go func() { read <- mustRead(t, a, 1) }()
	v.send(t, frame(60, 2), frame(60, 3))
	require.Eventually(t, func() bool { return a.Stats().Drops(datapath.DropLinkDown) == 2 }, patience, time.Millisecond)
	for i := range v.lines {
		require.NoError(t, v.tell(reqSetVringEnable, u32s(uint32(i), 1)))
	}
	<-a.QueuePairs()[0].Room()
	v.send(t, frame(60, 4))
	mustSame(t, frame(60, 4), (<-read)[0])
	exchange(t, a, v, 5)
}

// TestQueuesComeAndGo: frames for a pair that the driver does not use (ethtool
// -L) take another's RX; its TX is read when it is used.
func TestQueuesComeAndGo(t *testing.T) {
	datapathtest.Leaks(t)
	cfg := plain()
	cfg.features |= featureMQ
	cfg.pairs = 2
	_, a, v := mustOpen(t, cfg)
	require.Len(t, a.QueuePairs(), 2)
	second := a.QueuePairs()[1]
	put := func(seq uint32) {
		n, err := second.WriteBatch([]datapath.Frame{{Segs: [][]byte{frame(60, seq)}, N: 60}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	for _, i := range []uint32{2, 3} {
		require.NoError(t, v.tell(reqSetVringEnable, u32s(i, 0)))
	}
	put(1)
	require.True(t, v.await(0, time.Now().Add(patience)))
	_, b, _, err := v.rx[0].Take()
	require.NoError(t, err)
	mustSame(t, frame(60, 1), b)
	for _, i := range []uint32{2, 3} {
		require.NoError(t, v.tell(reqSetVringEnable, u32s(i, 1)))
	}
	put(2)
	require.True(t, v.await(2, time.Now().Add(patience)))
	_, b, _, err = v.rx[1].Take()
	require.NoError(t, err)
	mustSame(t, frame(60, 2), b)
	require.NoError(t, v.tx[1].Add(virtio.NetHdr{}, frame(60, 3)))
	v.tx[1].Publish()
	frames := make([]datapath.Frame, 1)
	n, err := second.ReadBatch(frames, lend)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	mustSame(t, frame(60, 3), frames[0].Segs[0])
}

// TestFB146Short: TX frames of every length up to 70 bytes, and chains that are
// all header, or less, with three fills: what is no frame is counted.
func TestFB146Short(t *testing.T) {
	for name, cfg := range combinations() {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			_, a, v := mustOpen(t, cfg)
			tx := v.tx[0]
			mem, form := tx.Memory(), headerForm(cfg.features)
			gpa := mem.Alloc(200, 1)
			bad := 0
			for _, fill := range []byte{0, 0xff, 0x5a} {
				for n := 1; n <= 70+form; n++ {
					copy(mem.Bytes(gpa, n), bytes.Repeat([]byte{fill}, n))
					_, err := tx.Driver.Add([]datapathtest.Span{{GPA: gpa, Len: uint32(n)}}, nil)
					require.NoError(t, err)
					tx.Publish()
					if n < form+etherHeader {
						bad++
					} else {
						require.Len(t, mustRead(t, a, 1)[0], n-form)
					}
					for tx.Pending() > 0 {
						if _, _, ok, err := tx.TakeUsed(); !ok {
							require.NoError(t, err)
							if n < form+etherHeader { // nobody reads: a good one takes it along
								break
							}
						}
					}
				}
				v.send(t, frame(60, uint32(fill)))
				mustSame(t, frame(60, uint32(fill)), mustRead(t, a, 1)[0])
				assert.EqualValues(t, bad, a.Stats().Drops(datapath.DropTooShort))
			}
		})
	}
}

// TestAttacks: everything a driver can do to a transmit queue. What leaves the
// ring in order is counted and the next frame passes; what does not ends the
// attachment, and the next driver works on the same connection.
func TestAttacks(t *testing.T) {
	for name, cfg := range combinations() {
		for _, attack := range datapathtest.Attacks(cfg.queueFeatures()) {
			t.Run(name+"/"+attack.Name, func(t *testing.T) {
				datapathtest.Leaks(t)
				l, a, v := mustOpen(t, cfg)
				exchange(t, a, v, 1)
				require.NoError(t, v.tx[0].Reclaim())
				st := a.Stats()
				drops := func() uint64 { return st.Drops(datapath.DropRejected) + st.Drops(datapath.DropTooShort) }
				attack.Run(v.tx[0].Driver)
				if !errors.Is(attack.Want, virtqueue.ErrCorrupt) {
					v.send(t, frame(60, 2))
					mustSame(t, frame(60, 2), mustRead(t, a, 1)[0])
					assert.EqualValues(t, 1, drops())
					exchange(t, a, v, 3)
					return
				}
				err := mustEnd(t, a)
				require.ErrorIs(t, err, datapath.ErrPeerGone)
				require.ErrorIs(t, err, virtqueue.ErrCorrupt)
				require.NoError(t, a.Close())
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
				_, err = l.Accept(ctx)
				cancel()
				require.ErrorIs(t, err, context.DeadlineExceeded, "a broken ring is not given out again")
				v.restart(t, func() { v.boot(0) })
				exchange(t, mustAccept(t, l), v, 4)
			})
		}
	}
}

// TestAttacksRX: the same to a receive queue: a writer skips what it cannot use.
func TestAttacksRX(t *testing.T) {
	for name, cfg := range combinations() {
		for _, attack := range datapathtest.Attacks(cfg.queueFeatures()) {
			if attack.Name == "writable-only" {
				continue // which here is as it should be
			}
			t.Run(name+"/"+attack.Name, func(t *testing.T) {
				datapathtest.Leaks(t)
				_, a, v := mustOpen(t, cfg)
				rx := v.rx[0]
				for rx.Idle() < int(cfg.num)/2 { // to have free descriptors
					mustWrite(t, a, frame(60, 1))
					_, _, ok, err := rx.Take()
					require.NoError(t, err)
					require.True(t, ok)
				}
				attack.Run(rx.Driver)
				var err error
				for seq := uint32(0); err == nil && seq < uint32(cfg.num); seq++ {
					_, err = write(a, frame(60, seq))
				}
				if errors.Is(attack.Want, virtqueue.ErrCorrupt) {
					require.ErrorIs(t, err, datapath.ErrPeerGone)
					require.ErrorIs(t, err, virtqueue.ErrCorrupt)
					return
				}
				require.NoError(t, err)
				assert.EqualValues(t, 1, a.Stats().Drops(datapath.DropRejected))
			})
		}
	}
}

// TestScribbles: a driver that writes all over its rings while they are used.
func TestScribbles(t *testing.T) {
	datapathtest.Leaks(t)
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			_, a, v := mustOpen(t, plain())
			rng := rand.New(rand.NewPCG(seed, 1))
			ended := make(chan error, 1)
			go func() { ended <- mustEnd(t, a) }()
			avail := uint16(0)
			for i := range 200 {
				v.tx[0].Scribble(rng, 20)
				v.rx[0].Scribble(rng, 20)
				avail += uint16(rng.IntN(4))
				v.tx[0].SetAvailIndex(avail)
				if _, err := write(a, frame(3000, uint32(i)), frame(60, uint32(i))); err != nil {
					require.ErrorIs(t, err, datapath.ErrPeerGone)
					break
				}
			}
			require.NoError(t, a.Close())
			<-ended
		})
	}
}

// TestKickStorm: kicks without work cost a look each and are no news.
func TestKickStorm(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	read := make(chan [][]byte)
	go func() { read <- mustRead(t, a, 1) }()
	v.tx[0].KickStorm(10_000)
	v.rx[0].KickStorm(10_000)
	v.send(t, frame(60, 1))
	mustSame(t, frame(60, 1), (<-read)[0])
}

// TestTruncated: a front-end that cuts its memory short under running rings loses
// its own connection, and nobody else theirs.
func TestTruncated(t *testing.T) {
	for name, use := range map[string]func(t *testing.T, a datapath.Attachment, v *vmm) error{
		"read": func(t *testing.T, a datapath.Attachment, _ *vmm) error { return mustEnd(t, a) },
		"write": func(t *testing.T, a datapath.Attachment, _ *vmm) error {
			_, err := write(a, frame(60, 1))
			return err
		},
		"request": func(t *testing.T, a datapath.Attachment, v *vmm) error {
			_ = v.write(encode(reqSetVringKick, 0, u64s(0)), v.lines[0].kick)
			return mustEndWithout(t, a)
		},
	} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			_, other, bystander := mustOpen(t, plain())
			l, a, v := mustOpen(t, plain())
			exchange(t, a, v, 1)
			v.send(t, frame(60, 2))
			require.NoError(t, unix.Ftruncate(v.memfd, 0))
			err := use(t, a, v)
			require.ErrorIs(t, err, datapath.ErrPeerGone)
			require.ErrorIs(t, err, errFault)
			_, err = v.answer(reqSetOwner)
			require.Error(t, err, "the connection is closed")
			exchange(t, other, bystander, 3)

			require.NoError(t, a.Close())
			v = mustConnect(t, l.path, plain())
			exchange(t, mustAccept(t, l), v, 4)
		})
	}
}

// mustEndWithout waits for the end without touching the rings.
func mustEndWithout(t *testing.T, a datapath.Attachment) error {
	t.Helper()
	select {
	case <-a.(*attachment).done:
	case <-time.After(patience):
		require.Fail(t, "still attached")
	}
	return a.(*attachment).ended()
}

// TestPipeCall: User Mode Linux is called through a pipe.
func TestPipeCall(t *testing.T) {
	datapathtest.Leaks(t)
	_, a, v := mustOpen(t, plain())
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, v.tell(reqSetVringCall, u64s(0), int(w.Fd())))
	require.NoError(t, w.Close())
	b := make([]byte, 16)
	n, err := r.Read(b)
	require.NoError(t, err)
	assert.Equal(t, u64s(1), b[:n], "called once when it was set")
	mustWrite(t, a, frame(60, 1))
	n, err = r.Read(b)
	require.NoError(t, err)
	assert.Equal(t, u64s(1), b[:n])
	require.NoError(t, r.Close())
	mustWrite(t, a, frame(60, 2)) // to nobody
}

// TestNoAllocations: neither way of a frame allocates.
func TestNoAllocations(t *testing.T) {
	if race {
		t.Skip("needs a build without the race detector, which allocates")
	}
	_, a, v := mustOpen(t, plain())
	qp := a.QueuePairs()[0]
	segs := [][]byte{make([]byte, 54), make([]byte, 4000)}
	frames := []datapath.Frame{{Segs: segs, N: 4054}}
	assert.Zero(t, testing.AllocsPerRun(50, func() { // 3 of 256 buffers each
		if n, err := qp.WriteBatch(frames); n != 1 || err != nil {
			t.Error(n, err)
		}
	}), "to the guest")
	for seq := range uint32(txBufs) {
		require.NoError(t, v.tx[0].Add(virtio.NetHdr{}, frame(1000, seq)))
	}
	v.tx[0].Publish()
	get := func(int) [][]byte { return segs }
	assert.Zero(t, testing.AllocsPerRun(50, func() {
		if n, err := qp.ReadBatch(frames, get); n != 1 || err != nil {
			t.Error(n, err)
		}
	}), "from the guest")
}
