package datapathtest

import (
	"errors"
	"fmt"

	"github.com/culvertnet/culvert/datapath/virtio"
)

// A TxQueue is a virtio-net driver's transmit queue.
type TxQueue struct {
	*Driver
	hdrSize int
	bufSize int
	segSize int
	bufs    []uint64          // free
	sent    map[uint16]uint64 // by head
}

// NewTxQueue returns a transmit queue on d, with bufs buffers for frames of at
// most frameSize bytes. hdrSize is virtio.HdrSize or virtio.HdrSizeMrgBuf. A
// frame lies in descriptors of at most segSize bytes behind one for its header;
// segSize 0 puts header and frame into one.
func NewTxQueue(d *Driver, bufs, frameSize, hdrSize, segSize int) *TxQueue {
	t := &TxQueue{Driver: d, hdrSize: hdrSize, bufSize: hdrSize + frameSize, segSize: segSize, sent: make(map[uint16]uint64)}
	for range bufs {
		t.bufs = append(t.bufs, d.mem.Alloc(t.bufSize, 1))
	}
	return t
}

// Add makes a frame available, its header before it. The device does not see it
// before Publish. Buffers of frames the device is done with are used again first.
// The error is ErrFull, or what the device did wrong.
func (t *TxQueue) Add(h virtio.NetHdr, frame []byte) error {
	if err := t.Reclaim(); err != nil {
		return err
	}
	if len(t.bufs) == 0 {
		return ErrFull
	}
	gpa := t.bufs[len(t.bufs)-1]
	n := t.hdrSize + len(frame)
	if n > t.bufSize {
		return fmt.Errorf("frame of %d bytes, buffers of %d", len(frame), t.bufSize-t.hdrSize)
	}
	b := t.mem.Bytes(gpa, n)
	h.Put(b[:t.hdrSize])
	copy(b[t.hdrSize:], frame)
	spans := []Span{{gpa, uint32(n)}}
	if t.segSize > 0 {
		spans = []Span{{gpa, uint32(t.hdrSize)}}
		for off := t.hdrSize; off < n; off += t.segSize {
			spans = append(spans, Span{gpa + uint64(off), uint32(min(t.segSize, n-off))})
		}
	}
	head, err := t.Driver.Add(spans, nil)
	if err != nil {
		return err
	}
	t.bufs = t.bufs[:len(t.bufs)-1]
	t.sent[head] = gpa
	return nil
}

// Reclaim takes back the buffers of frames that the device is done with.
func (t *TxQueue) Reclaim() error {
	for {
		head, _, ok, err := t.TakeUsed()
		if !ok {
			return err
		}
		t.bufs = append(t.bufs, t.sent[head])
		delete(t.sent, head)
	}
}

// An RxQueue is a virtio-net driver's receive queue.
type RxQueue struct {
	*Driver
	hdrSize   int
	mergeable bool
	bufSize   int
	segSize   int
	bufs      []uint64          // free
	posted    map[uint16]uint64 // by head
}

// NewRxQueue returns a receive queue on d, with bufs buffers of bufSize bytes,
// headers included, none of them posted yet. hdrSize is as in NewTxQueue.
// mergeable means that MRG_RXBUF was negotiated: a frame may lie in several
// buffers. A buffer is one descriptor, or several of at most segSize bytes each
// if that is not 0.
func NewRxQueue(d *Driver, bufs, bufSize, hdrSize, segSize int, mergeable bool) *RxQueue {
	r := &RxQueue{Driver: d, hdrSize: hdrSize, mergeable: mergeable, bufSize: bufSize, segSize: segSize, posted: make(map[uint16]uint64)}
	if r.segSize == 0 {
		r.segSize = bufSize
	}
	for range bufs {
		r.bufs = append(r.bufs, d.mem.Alloc(bufSize, 1))
	}
	return r
}

// Post makes up to n free buffers available and publishes them. It returns how
// many there were.
func (r *RxQueue) Post(n int) (posted int) {
	for ; posted < n && len(r.bufs) > 0; posted++ {
		gpa := r.bufs[len(r.bufs)-1]
		var spans []Span
		for off := 0; off < r.bufSize; off += r.segSize {
			spans = append(spans, Span{gpa + uint64(off), uint32(min(r.segSize, r.bufSize-off))})
		}
		head, err := r.Add(nil, spans)
		if err != nil {
			break
		}
		r.bufs = r.bufs[:len(r.bufs)-1]
		r.posted[head] = gpa
	}
	r.Publish()
	return posted
}

// Take takes the next frame that the device gave, in memory the caller may keep.
// Its buffers are free again, but not posted. ok says that there was one; the
// error, what the device did wrong. A buffer that came back empty is skipped:
// that is how a device returns one that it cannot use.
func (r *RxQueue) Take() (h virtio.NetHdr, frame []byte, ok bool, err error) {
	b, ok, err := r.takeBuf()
	for ok && len(b) == 0 {
		b, ok, err = r.takeBuf()
	}
	if !ok {
		return h, nil, false, err
	}
	if len(b) < r.hdrSize {
		return h, nil, false, fmt.Errorf("received %d bytes, header is %d", len(b), r.hdrSize)
	}
	h.Parse(b[:r.hdrSize])
	frame = b[r.hdrSize:]
	if !r.mergeable {
		if r.hdrSize == virtio.HdrSizeMrgBuf && h.NumBuffers != 1 {
			return h, nil, false, fmt.Errorf("num_buffers %d without MRG_RXBUF", h.NumBuffers) // virtio 1.3, 5.1.6.4.1
		}
		return h, frame, true, nil
	}
	if h.NumBuffers == 0 {
		return h, nil, false, errors.New("num_buffers is 0")
	}
	for i := uint16(1); i < h.NumBuffers; i++ {
		// All buffers of a frame are published at once (virtio 1.3, 5.1.6.4.1).
		b, _, err = r.takeBuf()
		if err != nil {
			return h, nil, false, err
		}
		if len(b) == 0 { // or not there
			return h, nil, false, fmt.Errorf("buffer %d of %d is missing", i, h.NumBuffers)
		}
		frame = append(frame, b...)
	}
	return h, frame, true, nil
}

// takeBuf takes the next buffer that the device returned, and a copy of what it
// wrote to it.
func (r *RxQueue) takeBuf() (b []byte, ok bool, err error) {
	head, written, ok, err := r.TakeUsed()
	if !ok {
		return nil, false, err
	}
	gpa := r.posted[head]
	delete(r.posted, head)
	r.bufs = append(r.bufs, gpa)
	return append([]byte(nil), r.mem.Bytes(gpa, r.bufSize)[:written]...), true, nil
}

// Idle returns how many buffers are free to be posted.
func (r *RxQueue) Idle() int { return len(r.bufs) }
