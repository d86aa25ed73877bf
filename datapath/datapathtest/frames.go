package datapathtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/culvertnet/culvert/datapath"
)

// patience is how long a frame or an ending may take before it counts as lost.
// It only ends tests that fail: nothing waits it out when all is well.
const patience = 10 * time.Second

// Test frames carry IEEE's local experimental EtherType, so that whatever else
// a guest's own stack sends is told from them; then their writer, sequence
// number and length, which decide every byte that follows.
const (
	etherType = 0x88b5
	minFrame  = 60 // shortest Ethernet frame, without its checksum
	prefixLen = 14 + 1 + 4 + 4
)

// makeFrame returns the test frame of n bytes, n >= minFrame, that a writer
// sends as its seq-th.
func makeFrame(writer byte, seq uint32, n int) []byte {
	b := make([]byte, n)
	copy(b, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2})
	binary.BigEndian.PutUint16(b[12:], etherType)
	b[14] = writer
	binary.BigEndian.PutUint32(b[15:], seq)
	binary.BigEndian.PutUint32(b[19:], uint32(n))
	x := seq*2654435761 + uint32(writer) + uint32(n) // Knuth's multiplicative hash, as a seed
	for i := prefixLen; i < n; i++ {
		x = x*1664525 + 1013904223 // Numerical Recipes' linear congruential generator
		b[i] = byte(x >> 24)
	}
	return b
}

// isTestFrame tells a test frame from what else is on the link.
func isTestFrame(b []byte) bool {
	return len(b) >= prefixLen && binary.BigEndian.Uint16(b[12:]) == etherType
}

// writerOf returns the writer and the sequence number of a test frame.
func writerOf(b []byte) (writer byte, seq uint32) {
	return b[14], binary.BigEndian.Uint32(b[15:])
}

// sizes returns the frame lengths worth trying on a transport that carries up
// to most bytes: Ethernet's limits, the edges of powers of two and of the
// readers' 128-byte header segment, and the longest frames of any link.
func sizes(most int) []int {
	all := []int{
		60, 61, 62, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025,
		1280, 1448, 1500, 1513, 1514, 1515, 1518, 2047, 2048, 2049, 4095, 4096, 4097, 9014,
		16384, 32768, 65174, 65535, 65536, 65549, datapath.MaxFrame - 1, datapath.MaxFrame,
	}
	var fit []int
	for _, n := range all {
		if n <= most {
			fit = append(fit, n)
		}
	}
	return fit
}

// cut lays b out as a Frame over segments of at most size bytes, behind an
// empty one and followed by memory that is not part of the frame.
func cut(b []byte, size int) datapath.Frame {
	f := datapath.Frame{Segs: [][]byte{{}}, N: len(b)}
	for len(b) > 0 {
		n := min(size, len(b))
		f.Segs = append(f.Segs, append([]byte(nil), b[:n]...))
		b = b[n:]
	}
	last := &f.Segs[len(f.Segs)-1]
	*last = append(*last, 0xee, 0xee, 0xee) // beyond N: not to be sent
	return f
}

// join returns a copy of a frame's bytes.
func join(f datapath.Frame) []byte {
	b := make([]byte, 0, f.N)
	for _, s := range f.Segs {
		b = append(b, s[:min(len(s), f.N-len(b))]...)
	}
	return b
}

// writeAll hands all frames to the guest, waiting for room as the contract says.
func writeAll(qp datapath.QueuePair, frames []datapath.Frame) error {
	for {
		n, err := qp.WriteBatch(frames)
		if err != nil {
			return err
		}
		if n < 0 || n > len(frames) {
			return fmt.Errorf("WriteBatch took %d of %d frames", n, len(frames))
		}
		if frames = frames[n:]; len(frames) == 0 {
			return nil
		}
		select {
		case <-qp.Room():
		case <-time.After(patience):
			return errors.New("short WriteBatch, and Room did not fire")
		}
	}
}

// writeShared is writeAll for one of several writers. Room wakes one waiter, so
// it looks again by itself.
func writeShared(qp datapath.QueuePair, frames []datapath.Frame) error {
	for deadline := time.Now().Add(patience); len(frames) > 0; {
		n, err := qp.WriteBatch(frames)
		if err != nil {
			return err
		}
		if frames = frames[n:]; n > 0 {
			deadline = time.Now().Add(patience)
			continue
		}
		if time.Now().After(deadline) {
			return errors.New("no room for a frame")
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// recv returns the next test frame that reaches the guest.
func recv(guest Peer) ([]byte, error) {
	for {
		b, err := guest.Recv(patience)
		if err != nil || isTestFrame(b) {
			return b, err
		}
	}
}

// An inbox reads all queue pairs of an attachment until they end.
type inbox struct {
	frames chan []byte   // the test frames, each a copy
	errs   chan error    // how each queue pair ended
	done   chan struct{} // the test has ended: nobody takes from frames

	count, bytes atomic.Uint64 // all frames read, test frames or not
}

// read starts an inbox that asks for up to batch frames at a time. It ends with
// the attachment; the test's end closes it and waits.
func read(t *testing.T, ours datapath.Attachment, batch int) *inbox {
	qps := ours.QueuePairs()
	in := &inbox{
		frames: make(chan []byte, 256),
		errs:   make(chan error, len(qps)),
		done:   make(chan struct{}),
	}
	var wg sync.WaitGroup
	for _, qp := range qps {
		wg.Go(func() { in.errs <- in.run(t, qp, batch) })
	}
	t.Cleanup(func() {
		close(in.done)
		assert.NoError(t, ours.Close())
		wg.Wait()
	})
	return in
}

func (in *inbox) run(t *testing.T, qp datapath.QueuePair, batch int) error {
	frames := make([]datapath.Frame, batch)
	l := lender{t: t}
	for {
		n, err := qp.ReadBatch(frames, l.get)
		if err != nil {
			assert.Zero(t, n, "frames beside an error")
			return err
		}
		if !assert.Positive(t, n, "ReadBatch returned neither a frame nor an error") ||
			!assert.LessOrEqual(t, n, len(frames)) {
			return errors.New("ReadBatch broke its contract")
		}
		var got [][]byte
		for _, f := range frames[:n] {
			l.check(f)
			got = append(got, join(f))
			in.count.Add(1)
			in.bytes.Add(uint64(f.N))
		}
		l.reclaim(frames[:n])
		for _, b := range got {
			if !isTestFrame(b) {
				continue
			}
			select {
			case in.frames <- b:
			case <-in.done:
				return nil
			}
		}
	}
}

// next returns the next test frame that came from the guest.
func (in *inbox) next() ([]byte, error) {
	select {
	case b := <-in.frames:
		return b, nil
	case <-time.After(patience):
		return nil, errors.New("no frame from the guest")
	}
}

// ended returns how one queue pair's reading ended.
func (in *inbox) ended() error {
	select {
	case err := <-in.errs:
		return err
	case <-time.After(patience):
		return errors.New("ReadBatch did not return")
	}
}

// A lender lends memory as package stack/netstack does, and watches that what
// it lends is used as the contract says.
type lender struct {
	t    *testing.T
	lent map[*byte]bool // first byte of each segment lent in this call, and before without being reached
	head [][]byte       // lent earlier, not reached: lent again
	body [][]byte
}

func (l *lender) get(n int) [][]byte {
	if l.lent == nil {
		l.lent = make(map[*byte]bool)
	}
	var segs [][]byte
	switch {
	case n == 0: // length unknown: a header segment and one for all the rest
		segs = [][]byte{l.take(&l.head, 128), l.take(&l.body, datapath.MaxFrame)}
	case n < 0 || n > datapath.MaxFrame:
		assert.Fail(l.t, "get called with an impossible length", "%d", n)
		return [][]byte{make([]byte, datapath.MaxFrame)}
	case n < 2:
		segs = [][]byte{make([]byte, n)}
	default: // length known: exactly as much, in uneven pieces
		cut := min(54, n/2)
		segs = [][]byte{make([]byte, cut), make([]byte, n-cut)}
	}
	for _, s := range segs {
		l.lent[&s[0]] = true
	}
	return segs
}

func (l *lender) take(from *[][]byte, n int) []byte {
	if k := len(*from); k > 0 {
		s := (*from)[k-1]
		*from = (*from)[:k-1]
		return s
	}
	return make([]byte, n)
}

// check asserts that a returned frame lies in lent memory that no other frame
// of the call lies in.
func (l *lender) check(f datapath.Frame) {
	if !assert.LessOrEqual(l.t, f.N, datapath.MaxFrame) || !assert.Positive(l.t, f.N) {
		return
	}
	room := 0
	for _, s := range f.Segs {
		if room >= f.N {
			break // not reached
		}
		if len(s) == 0 {
			continue
		}
		assert.True(l.t, l.lent[&s[0]], "a frame lies in memory that was not lent for it")
		delete(l.lent, &s[0])
		room += len(s)
	}
	assert.GreaterOrEqual(l.t, room, f.N, "a frame is longer than its segments")
}

// reclaim takes back what no frame reached, and spoils what frames did: the
// transport has no business with it any more.
func (l *lender) reclaim(frames []datapath.Frame) {
	for _, f := range frames {
		room := 0
		for _, s := range f.Segs {
			switch {
			case room < f.N:
				for i := range s {
					s[i] = 0xdd
				}
			case len(s) == 128:
				l.head = append(l.head, s)
			case len(s) == datapath.MaxFrame:
				l.body = append(l.body, s)
			}
			room += len(s)
		}
	}
}
