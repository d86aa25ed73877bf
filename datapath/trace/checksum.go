package trace

import (
	"encoding/binary"

	"github.com/culvertnet/culvert/datapath/virtio"
)

const flagNeedsCSum = virtio.FlagNeedsCSum

// complete completes the partial checksum of a whole frame, as the NIC it was
// left to would (virtio 1.3, 5.1.6.2), and reports whether it is now complete.
// Only a header that means the frame's own TCP or UDP checksum is believed.
func complete(b []byte, hdr *virtio.NetHdr, h *headers) bool {
	var at int
	switch h.proto {
	case protoTCP:
		at = 16
	case protoUDP:
		at = 6
	default:
		return false
	}
	if h.l4 == 0 || int(hdr.CSumStart) != h.l4 || int(hdr.CSumOffset) != at || len(b) < h.l4+at+2 {
		return false
	}
	// The field holds the pseudo-header's sum, which belongs to the whole.
	sum := ^fold(add(0, b[h.l4:]))
	if sum == 0 && h.proto == protoUDP {
		sum = 0xffff // zero says that there is none (RFC 768)
	}
	binary.BigEndian.PutUint16(b[h.l4+at:], sum)
	return true
}

// add adds b's 16-bit words to sum (RFC 1071), eight bytes at a time.
func add(sum uint64, b []byte) uint64 {
	for ; len(b) >= 8; b = b[8:] {
		v := binary.BigEndian.Uint64(b)
		sum += v>>32 + v&0xffffffff
	}
	for ; len(b) >= 2; b = b[2:] {
		sum += uint64(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	return sum
}

// fold folds a sum of words into one.
func fold(sum uint64) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
