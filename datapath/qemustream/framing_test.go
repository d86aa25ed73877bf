package qemustream

import (
	"encoding/binary"
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// cuts returns a readv over wire that gives at most next() bytes a call, then
// io.EOF.
func cuts(wire []byte, next func() int) func([][]byte) (int, error) {
	return func(bufs [][]byte) (n int, err error) {
		if len(wire) == 0 {
			return 0, io.EOF
		}
		n = scatter(bufs, wire[:min(max(next(), 1), len(wire))])
		wire = wire[n:]
		return n, nil
	}
}

// lend gives a header segment of 64 bytes and the rest, as the stack does.
func lend(n int) [][]byte {
	if n <= 64 {
		return [][]byte{make([]byte, n)}
	}
	return [][]byte{make([]byte, 64), make([]byte, n-64)}
}

func frameBytes(f datapath.Frame) (b []byte) {
	for _, s := range appendRange(nil, f.Segs, 0, f.N) {
		b = append(b, s...)
	}
	return b
}

func appendWire(wire []byte, frame []byte) []byte {
	return append(binary.BigEndian.AppendUint32(wire, uint32(len(frame))), frame...)
}

// pattern is n bytes that differ from their neighbours and from those of
// another seed.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed*13)
	}
	return b
}

// decodeAll reads until the error, batch frames at a time.
func decodeAll(d *decoder, batch int, get func(int) [][]byte) (all [][]byte, err error) {
	frames := make([]datapath.Frame, batch)
	for {
		n, err := d.readBatch(frames, get)
		if err != nil {
			return all, err
		}
		for _, f := range frames[:n] {
			all = append(all, frameBytes(f))
		}
	}
}

func TestDecodeWhateverTheCuts(t *testing.T) {
	var wire []byte
	var want [][]byte
	for i, n := range []int{14, 60, 64, 65, 1514, 9014, datapath.MaxFrame, 15, datapath.MaxFrame, 100} {
		want = append(want, pattern(n, i))
		wire = appendWire(wire, want[i])
	}
	for _, cut := range []int{1, 2, 3, 5, 64, 1000, 65536, len(wire)} {
		for _, batch := range []int{1, 3, 64} {
			var stats datapath.Stats
			got, err := decodeAll(newDecoder(cuts(wire, func() int { return cut }), &stats), batch, lend)
			require.ErrorIs(t, err, io.EOF)
			require.Equal(t, want, got, "cut %d, batch %d", cut, batch)
			assert.Empty(t, stats.AllDrops())
			assert.EqualValues(t, len(want), stats.FromGuest.Frames.Load())
		}
	}
}

// TestFB146ShortFrames: every length from 0 to 70, three fills; the good frame
// after each arrives, and the counter is the number of bad ones.
func TestFB146ShortFrames(t *testing.T) {
	var wire []byte
	var want [][]byte
	bad := 0
	for n := range 71 {
		for _, fill := range []byte{0x00, 0x5a, 0xff} {
			frame := make([]byte, n)
			for i := range frame {
				frame[i] = fill
			}
			wire = appendWire(wire, frame)
			if n < minFrame {
				bad++
			} else {
				want = append(want, frame)
			}
			want = append(want, pattern(60, n))
			wire = appendWire(wire, want[len(want)-1])
		}
	}
	var stats datapath.Stats
	got, err := decodeAll(newDecoder(cuts(wire, func() int { return 4096 }), &stats), 16, lend)
	require.ErrorIs(t, err, io.EOF)
	assert.Equal(t, want, got)
	assert.Equal(t, map[string]uint64{"too-short": uint64(bad)}, stats.AllDrops())
}

func TestLongFramesArePassedOver(t *testing.T) {
	var wire []byte
	for _, n := range []int{datapath.MaxFrame + 1, 69632, maxSkip} {
		wire = appendWire(wire, pattern(n, 1))
		wire = appendWire(wire, pattern(60, n))
	}
	var stats datapath.Stats
	got, err := decodeAll(newDecoder(cuts(wire, func() int { return 50000 }), &stats), 4, lend)
	require.ErrorIs(t, err, io.EOF)
	assert.Equal(t, [][]byte{pattern(60, datapath.MaxFrame+1), pattern(60, 69632), pattern(60, maxSkip)}, got)
	assert.Equal(t, map[string]uint64{"too-long": 3}, stats.AllDrops())
}

func TestStreamOutOfStepEndsIt(t *testing.T) {
	for _, length := range []uint32{maxSkip + 1, 1 << 31, 1<<32 - 1} {
		wire := appendWire(nil, pattern(60, 1))
		wire = binary.BigEndian.AppendUint32(wire, length)
		wire = appendWire(wire, pattern(60, 2))
		var stats datapath.Stats
		got, err := decodeAll(newDecoder(cuts(wire, func() int { return len(wire) }), &stats), 4, lend)
		require.ErrorIs(t, err, datapath.ErrPeerGone)
		assert.ErrorContains(t, err, "out of step")
		assert.Equal(t, [][]byte{pattern(60, 1)}, got, "what came before is delivered")
		assert.EqualValues(t, 1, stats.Drops(datapath.DropTooLong))
	}
}

func TestStreamCutInsideAFrameIsCounted(t *testing.T) {
	whole := appendWire(nil, pattern(100, 1))
	for n := range len(whole) {
		var stats datapath.Stats
		got, err := decodeAll(newDecoder(cuts(whole[:n], func() int { return 7 }), &stats), 4, lend)
		require.ErrorIs(t, err, io.EOF)
		assert.Empty(t, got)
		assert.EqualValues(t, min(n, 1), stats.Drops(datapath.DropTooShort), "cut after %d bytes", n)
	}
}

func TestLentMemoryTooSmallOrInCrumbs(t *testing.T) {
	wire := appendWire(appendWire(nil, pattern(3000, 1)), pattern(60, 2))
	t.Run("too small", func(t *testing.T) {
		var stats datapath.Stats
		get := func(n int) [][]byte { return lend(min(n, 100)) }
		got, err := decodeAll(newDecoder(cuts(wire, func() int { return 100 }), &stats), 1, get)
		require.ErrorIs(t, err, io.EOF)
		assert.Equal(t, [][]byte{pattern(60, 2)}, got)
		assert.EqualValues(t, 1, stats.Drops(datapath.DropNoMemory))
	})
	t.Run("more segments than a readv takes", func(t *testing.T) {
		var stats datapath.Stats
		get := func(n int) (segs [][]byte) {
			for range n {
				segs = append(segs, make([]byte, 1), nil)
			}
			return segs
		}
		read := cuts(wire, func() int { return 1500 })
		checked := func(bufs [][]byte) (int, error) {
			assert.LessOrEqual(t, len(bufs), maxVec)
			for _, b := range bufs {
				assert.NotEmpty(t, b)
			}
			return read(bufs)
		}
		got, err := decodeAll(newDecoder(checked, &stats), 1, get)
		require.ErrorIs(t, err, io.EOF)
		assert.Equal(t, [][]byte{pattern(3000, 1), pattern(60, 2)}, got)
	})
}

func TestUnsendable(t *testing.T) {
	f := func(n int, hdr virtio.NetHdr, segs ...[]byte) datapath.Frame {
		return datapath.Frame{Hdr: hdr, Segs: segs, N: n}
	}
	for name, c := range map[string]struct {
		frame datapath.Frame
		why   datapath.DropReason
		bad   bool
	}{
		"shortest":         {f(14, virtio.NetHdr{}, make([]byte, 14)), 0, false},
		"longest":          {f(datapath.MaxFrame, virtio.NetHdr{}, make([]byte, datapath.MaxFrame)), 0, false},
		"verified":         {f(60, virtio.NetHdr{Flags: virtio.FlagDataValid}, make([]byte, 99)), 0, false},
		"too short":        {f(13, virtio.NetHdr{}, make([]byte, 14)), datapath.DropTooShort, true},
		"negative":         {f(-1, virtio.NetHdr{}), datapath.DropTooShort, true},
		"too long":         {f(datapath.MaxFrame+1, virtio.NetHdr{}, make([]byte, 1<<17)), datapath.DropTooLong, true},
		"partial checksum": {f(60, virtio.NetHdr{Flags: virtio.FlagNeedsCSum}, make([]byte, 60)), datapath.DropNotOffered, true},
		"super-frame":      {f(60, virtio.NetHdr{GSOType: virtio.GSOTCPv4}, make([]byte, 60)), datapath.DropNotOffered, true},
		"less than N":      {f(60, virtio.NetHdr{}, make([]byte, 59)), datapath.DropRejected, true},
	} {
		t.Run(name, func(t *testing.T) {
			why, bad := unsendable(&c.frame)
			assert.Equal(t, c.bad, bad)
			assert.Equal(t, c.why, why)
		})
	}
}

// TestEncodeWhateverTheSocketTakes gives the encoder every possible result of
// one writev: what was sent and what is kept is the whole wire form of exactly
// the frames that count as taken.
func TestEncodeWhateverTheSocketTakes(t *testing.T) {
	var frames []datapath.Frame
	var wire []byte
	for i, n := range []int{14, 70, 200} {
		p := pattern(n, i)
		wire = appendWire(wire, p)
		segs := [][]byte{p[:5], nil, p[5:14], append(p[14:n:n], "not of the frame"...)}
		frames = append(frames, datapath.Frame{Segs: segs, N: n})
	}
	var e encoder
	for n := range len(wire) + 1 {
		e.rest = e.rest[:0]
		e.gather(frames)
		require.Equal(t, len(wire), total(e.vec))
		sent := make([]byte, n)
		at := 0
		for _, b := range e.vec {
			at += copy(sent[at:], b)
		}
		taken, bytes := e.sent(frames, n)
		sent = append(sent, e.rest...)
		require.Equal(t, wire[:len(sent)], sent)
		require.Equal(t, prefixLen*taken+bytes, len(sent))
	}
}

func TestGatherStopsAtWhatOneWritevTakes(t *testing.T) {
	var e encoder
	many := make([]datapath.Frame, 2*maxVec)
	for i := range many {
		many[i] = datapath.Frame{Segs: [][]byte{make([]byte, 14)}, N: 14}
	}
	e.gather(many)
	assert.Len(t, e.vec, maxVec)
	for i := range many {
		many[i].Segs = [][]byte{make([]byte, 4), make([]byte, 4), make([]byte, 6)}
	}
	e.gather(many)
	assert.LessOrEqual(t, len(e.vec), maxVec)
	assert.Greater(t, len(e.vec), maxVec-4)
	many[3].N = 5
	e.gather(many)
	assert.Len(t, e.vec, 3*4, "up to the unsendable one")
}

// FuzzDecode feeds arbitrary bytes in arbitrary cuts: frames or an error, never
// both, never a panic, and the same whatever the cuts.
func FuzzDecode(f *testing.F) {
	f.Add(appendWire(appendWire(nil, pattern(60, 1)), pattern(1514, 2)), []byte{1, 3, 200})
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 1, 7, 0, 1, 0, 24}, []byte{5})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 1}, []byte{0})
	f.Add(appendWire(nil, pattern(datapath.MaxFrame+1, 3)), []byte{255, 1})
	f.Fuzz(func(t *testing.T, wire, sizes []byte) {
		if len(wire) > 1<<20 {
			return
		}
		run := func(next func() int, batch int) (all [][]byte, drops map[string]uint64, fail string) {
			var stats datapath.Stats
			d := newDecoder(cuts(wire, next), &stats)
			frames := make([]datapath.Frame, batch)
			for calls := 0; ; calls++ {
				require.LessOrEqual(t, calls, len(wire)+1)
				n, err := d.readBatch(frames, lend)
				require.Equal(t, err != nil, n == 0)
				if err != nil {
					return all, stats.AllDrops(), err.Error()
				}
				for _, fr := range frames[:n] {
					require.GreaterOrEqual(t, fr.N, minFrame)
					require.LessOrEqual(t, fr.N, datapath.MaxFrame)
					all = append(all, frameBytes(fr))
				}
			}
		}
		i := 0
		all, drops, fail := run(func() int {
			if len(sizes) == 0 {
				return 1
			}
			i++
			n := int(sizes[i%len(sizes)])
			return n*n + 1
		}, 1+len(sizes)%7)
		wantAll, wantDrops, wantFail := run(func() int { return len(wire) }, 64)
		assert.Equal(t, wantAll, all)
		assert.Equal(t, wantDrops, drops)
		assert.Equal(t, wantFail, fail)
	})
}
