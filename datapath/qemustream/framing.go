package qemustream

import (
	"encoding/binary"
	"fmt"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

const (
	// prefixLen is the length in front of each frame: 32 bits, big-endian.
	prefixLen = 4
	// minFrame is an Ethernet header: two addresses of 6 bytes and a type of 2.
	minFrame = 14
	// maxSkip is the longest frame that is passed over rather than taken for
	// noise. QEMU itself never sends more than its NET_BUFSIZE of 4096+65536
	// bytes; 1 MiB is the next thing that could be meant, while a stream out of
	// step shows lengths of 32 random bits: it is caught with a probability of
	// 1 - 2^20/2^32, 99.98 %, at its first length.
	maxSkip = 1 << 20
	// readAhead is the read buffer: four of the longest frames a read.
	readAhead = 256 << 10
	// maxVec is the most buffers one readv or writev takes (UIO_MAXIOV).
	maxVec = 1024
)

// A decoder cuts a stream into frames. It is used by one goroutine.
type decoder struct {
	// read is readv(2): it waits for at least one byte, or returns an error.
	read  func(bufs [][]byte) (int, error)
	stats *datapath.Stats

	buf  []byte // buf[r:w] was read and is not yet cut
	r, w int
	skip int      // bytes of a refused frame still to pass over
	vec  [][]byte // what one read fills, kept so that none allocates
}

func newDecoder(read func(bufs [][]byte) (int, error), stats *datapath.Stats) *decoder {
	return &decoder{read: read, stats: stats, buf: make([]byte, readAhead)}
}

// readBatch is QueuePair.ReadBatch on the stream. It reads from the socket only
// while it has no frame to return, so an error never costs a frame.
func (d *decoder) readBatch(frames []datapath.Frame, get func(n int) [][]byte) (n int, err error) {
	for n < len(frames) {
		k := min(d.skip, d.w-d.r)
		d.r += k
		d.skip -= k
		have := d.w - d.r - prefixLen // bytes of the frame itself; may be negative
		if d.skip > 0 || have < 0 {
			if n > 0 {
				break
			}
			if err := d.fill(); err != nil {
				return 0, err
			}
			continue
		}

		length := binary.BigEndian.Uint32(d.buf[d.r:])
		size := int(min(length, maxSkip+1)) // fits an int of 32 bits
		switch {
		case size > maxSkip:
			if n > 0 {
				return n, nil // the next call finds it again, and has nothing to lose
			}
			d.stats.Drop(datapath.DropTooLong)
			return 0, fmt.Errorf("read frame length %d, stream out of step: %w", length, datapath.ErrPeerGone)
		case size > datapath.MaxFrame:
			d.refuse(size, datapath.DropTooLong)
			continue
		case size < minFrame:
			d.refuse(size, datapath.DropTooShort)
			continue
		case have < size && n > 0:
			return n, nil
		}

		segs := get(size)
		if total(segs) < size { // against the contract, but not worth a panic
			d.refuse(size, datapath.DropNoMemory)
			continue
		}
		d.r += prefixLen
		got := scatter(segs, d.buf[d.r:d.r+min(have, size)])
		d.r += got
		if got < size {
			if err := d.finish(segs, got, size); err != nil {
				return 0, err
			}
		}
		frames[n] = datapath.Frame{Segs: segs, N: size}
		n++
		d.stats.FromGuest.Frames.Add(1)
		d.stats.FromGuest.Bytes.Add(uint64(size))
	}
	return n, nil
}

// refuse passes over the frame that buf[r:] begins.
func (d *decoder) refuse(size int, why datapath.DropReason) {
	d.stats.Drop(why)
	d.r += prefixLen
	d.skip = size
}

// fill reads once into the buffer, behind the at most prefixLen-1 bytes that
// are left in it.
func (d *decoder) fill() error {
	d.w = copy(d.buf, d.buf[d.r:d.w])
	d.r = 0
	d.vec = append(d.vec[:0], d.buf[d.w:])
	n, err := d.read(d.vec)
	if err != nil {
		if d.w > 0 {
			d.stats.Drop(datapath.DropTooShort) // it ended inside a frame
		}
		return err
	}
	d.w += n
	return nil
}

// finish reads the bytes from got to size of a frame straight into segs, and
// what follows into the buffer, which is empty.
func (d *decoder) finish(segs [][]byte, got, size int) error {
	for got < size {
		d.vec = appendRange(d.vec[:0], segs, got, size)
		if len(d.vec) < maxVec {
			d.vec = append(d.vec, d.buf)
		} else {
			d.vec = d.vec[:maxVec] // more segments than one readv takes: again
		}
		n, err := d.read(d.vec)
		clear(d.vec) // lent memory is not ours to hold
		if err != nil {
			d.stats.Drop(datapath.DropTooShort)
			return err
		}
		direct := min(n, size-got)
		got += direct
		d.r, d.w = 0, n-direct
	}
	return nil
}

// unsendable says why a frame can never be sent, if that is so.
func unsendable(f *datapath.Frame) (why datapath.DropReason, bad bool) {
	switch {
	case f.N > datapath.MaxFrame:
		return datapath.DropTooLong, true
	case f.N < minFrame:
		return datapath.DropTooShort, true
	case f.Hdr.Flags&virtio.FlagNeedsCSum != 0 || f.Hdr.GSOType != virtio.GSONone:
		return datapath.DropNotOffered, true // no header goes with it to say so
	case total(f.Segs) < f.N:
		return datapath.DropRejected, true
	}
	return 0, false
}

// An encoder lays frames out for writev. It is used under the attachment's lock.
type encoder struct {
	prefix [maxVec / 2][prefixLen]byte // a frame takes two buffers or more
	vec    [][]byte
	rest   []byte // of the one frame that the socket took half of
}

// gather makes vec the wire form of as many leading frames as one writev takes,
// up to the first that is unsendable.
func (e *encoder) gather(frames []datapath.Frame) {
	e.vec = e.vec[:0]
	for i := range min(len(frames), len(e.prefix)) {
		f := &frames[i]
		if _, bad := unsendable(f); bad || len(e.vec)+1+len(f.Segs) > maxVec {
			return
		}
		binary.BigEndian.PutUint32(e.prefix[i][:], uint32(f.N))
		e.vec = append(e.vec, e.prefix[i][:])
		e.vec = appendRange(e.vec, f.Segs, 0, f.N)
	}
}

// sent works out which of frames, as gathered, the socket took with n bytes.
// It keeps the rest of a frame that was begun, which counts as taken.
func (e *encoder) sent(frames []datapath.Frame, n int) (taken, bytes int) {
	for n > 0 {
		f := &frames[taken]
		if n < prefixLen+f.N {
			e.keep(f, n)
		}
		n -= prefixLen + f.N
		bytes += f.N
		taken++
	}
	clear(e.vec)
	return taken, bytes
}

// keep makes rest the wire form of a frame without its first n bytes.
func (e *encoder) keep(f *datapath.Frame, n int) {
	if e.rest == nil {
		e.rest = make([]byte, 0, prefixLen+datapath.MaxFrame)
	}
	e.rest = binary.BigEndian.AppendUint32(e.rest[:0], uint32(f.N))
	for _, s := range f.Segs {
		e.rest = append(e.rest, s[:min(len(s), prefixLen+f.N-len(e.rest))]...)
	}
	e.rest = e.rest[:copy(e.rest, e.rest[n:])]
}

// total returns the bytes that segs hold together.
func total(segs [][]byte) (n int) {
	for _, s := range segs {
		n += len(s)
	}
	return n
}

// scatter copies src into segs in order and returns how much fitted.
func scatter(segs [][]byte, src []byte) (n int) {
	for _, s := range segs {
		n += copy(s, src[n:])
	}
	return n
}

// appendRange appends the parts of segs that hold their bytes from to to.
func appendRange(dst, segs [][]byte, from, to int) [][]byte {
	for _, s := range segs {
		if lo, hi := min(from, len(s)), min(to, len(s)); lo < hi {
			dst = append(dst, s[lo:hi])
		}
		from, to = max(from-len(s), 0), max(to-len(s), 0)
	}
	return dst
}
