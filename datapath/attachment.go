package datapath

import (
	"github.com/culvertnet/culvert/datapath/virtio"
)

// MaxFrame is the longest frame any transport moves, in bytes without the
// virtio-net header: the longest IP packet (65535) behind an Ethernet header
// (14) with one VLAN tag (4), rounded up to a multiple of 8.
const MaxFrame = 65560

// An Attachment is our end of one VM NIC. Like a net.Conn it does not
// reconnect: when the peer goes, every call returns ErrPeerGone, and a new
// Attachment has to be accepted. All methods are safe for concurrent use.
type Attachment interface {
	// Info describes the attachment. It is fixed for the attachment's life.
	Info() Info
	// QueuePairs returns at least one queue pair, the same slice each time.
	// The caller does not change it.
	QueuePairs() []QueuePair
	// Stats returns the attachment's counters, the same pointer each time.
	Stats() *Stats
	// Close gives up our end and frees what it holds. It unblocks all calls,
	// which then return ErrClosed. Closing again does nothing and returns nil.
	Close() error
}

// A QueuePair moves frames to and from one pair of the guest's queues. One
// goroutine may read; any number may write.
type QueuePair interface {
	// ReadBatch waits for at least one frame from the guest and fills
	// frames[:n], n >= 1. It takes what is there without waiting for more.
	//
	// get lends the memory of one frame: segments of together at least n bytes
	// where the transport knows the frame's length before it copies (n > 0),
	// and of at least MaxFrame bytes where it does not (get(0)). The transport
	// fills segments in order and stores them in Frame.Segs with the bytes used
	// in Frame.N, which never exceeds MaxFrame. After the call, segments that
	// no returned frame reached are the caller's to lend again; so an
	// acknowledgement never pins 64 KiB. Frame.Segs as it stood before the call
	// is ignored.
	//
	// A frame that cannot be taken (too long, cut short) is counted in Stats
	// and skipped; it is no error. The errors are ErrPeerGone and ErrClosed,
	// both final; n is then 0.
	ReadBatch(frames []Frame, get func(n int) [][]byte) (n int, err error)
	// WriteBatch hands frames to the guest in order and never blocks. Frame.N
	// bytes across Frame.Segs are sent, which the transport only reads. n <
	// len(frames) with a nil error means there is no room now: the rest were
	// not taken, and Room fires when it is worth trying again. A frame that can
	// never be sent is counted in Stats, dropped, and part of n. The errors are
	// ErrPeerGone and ErrClosed, both final.
	WriteBatch(frames []Frame) (n int, err error)
	// Room returns a channel, the same each time, that receives a value after a
	// short WriteBatch once there is room again, and after the attachment has
	// ended. It has a buffer of one: a value may be left from earlier, so a
	// receiver tries again and does not count.
	Room() <-chan struct{}
}

// A Frame is one Ethernet frame, or one GSO super-frame, with its virtio-net
// header.
type Frame struct {
	// Hdr is the virtio-net header. From a transport without headers, and to
	// one, it is zero.
	Hdr virtio.NetHdr
	// Segs is the frame's memory, the caller's. An Attachment never keeps it.
	Segs [][]byte
	// N is the frame's length in bytes across Segs.
	N int
}

// Info describes an Attachment.
type Info struct {
	// Transport is the kind: "tap", "qemu", "unixgram", "memory".
	Transport string
	// Name tells this attachment from others of its kind: an interface's name,
	// a socket's address.
	Name string
	// ToGuest is what the guest's NIC takes from us: partial checksums,
	// super-frames. We send nothing beyond it.
	ToGuest virtio.Offloads
	// FromGuest is what the guest's NIC was told it may send to us. A frame
	// beyond it is dropped by the reader of frames.
	FromGuest virtio.Offloads
	// Connected says that the transport notices by itself when the peer goes
	// (ErrPeerGone). Where it is false (datagrams) only a probe can tell.
	Connected bool
}
