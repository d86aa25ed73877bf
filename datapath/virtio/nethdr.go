package virtio

import (
	"encoding/binary"
	"errors"
)

// Bits of NetHdr.Flags (virtio 1.3, 5.1.6).
const (
	FlagNeedsCSum = 1 // checksum is partial: CSumStart, CSumOffset are valid
	FlagDataValid = 2 // checksum was verified by whoever handed us the frame
)

// Values of NetHdr.GSOType (virtio 1.3, 5.1.6).
const (
	GSONone  = 0
	GSOTCPv4 = 1
	GSOUDP   = 3 // UFO, long gone from Linux; never offered
	GSOTCPv6 = 4
	GSOUDPL4 = 5    // USO
	GSOECN   = 0x80 // ored to a TCP type
)

// Sizes of the header on a wire, in bytes.
const (
	HdrSize       = 10 // without num_buffers: legacy, and tap's default
	HdrSizeMrgBuf = 12 // with num_buffers: VERSION_1 or MRG_RXBUF
)

// NetHdr is struct virtio_net_hdr (virtio 1.3, 5.1.6).
type NetHdr struct {
	Flags      uint8
	GSOType    uint8
	HdrLen     uint16 // Ethernet, IP and transport headers together; a hint
	GSOSize    uint16 // payload bytes of each segment
	CSumStart  uint16 // where the checksum begins, from the frame's start
	CSumOffset uint16 // where it is stored, from CSumStart
	NumBuffers uint16 // only in the 12-byte form
}

// Put writes h in little-endian order, the order of VERSION_1, into b, which
// is HdrSize or HdrSizeMrgBuf bytes long and decides the form. On the hosts
// culvert supports this is also the native order that a tap uses.
func (h *NetHdr) Put(b []byte) {
	_ = b[HdrSize-1]
	b[0] = h.Flags
	b[1] = h.GSOType
	binary.LittleEndian.PutUint16(b[2:], h.HdrLen)
	binary.LittleEndian.PutUint16(b[4:], h.GSOSize)
	binary.LittleEndian.PutUint16(b[6:], h.CSumStart)
	binary.LittleEndian.PutUint16(b[8:], h.CSumOffset)
	if len(b) >= HdrSizeMrgBuf {
		binary.LittleEndian.PutUint16(b[10:], h.NumBuffers)
	}
}

// Parse reads h from b, which is HdrSize or HdrSizeMrgBuf bytes long. It
// checks nothing but the length; Check does.
func (h *NetHdr) Parse(b []byte) {
	_ = b[HdrSize-1]
	*h = NetHdr{
		Flags:      b[0],
		GSOType:    b[1],
		HdrLen:     binary.LittleEndian.Uint16(b[2:]),
		GSOSize:    binary.LittleEndian.Uint16(b[4:]),
		CSumStart:  binary.LittleEndian.Uint16(b[6:]),
		CSumOffset: binary.LittleEndian.Uint16(b[8:]),
	}
	if len(b) >= HdrSizeMrgBuf {
		h.NumBuffers = binary.LittleEndian.Uint16(b[10:])
	}
}

var (
	// ErrBadHeader says that a header cannot belong to its frame.
	ErrBadHeader = errors.New("virtio-net header impossible for this frame")
	// ErrNotOffered says that a header uses an offload that was not agreed.
	ErrNotOffered = errors.New("virtio-net header uses an offload that was not offered")
)

// Check verifies that h can belong to a frame of n bytes from a peer that was
// offered the offloads in offered: every offset lies inside the frame, and
// nothing is used that was not offered. It does not look into the frame.
func (h *NetHdr) Check(n int, offered Offloads) error {
	if h.Flags&FlagNeedsCSum != 0 {
		if !offered.Has(OffloadCSum) {
			return ErrNotOffered
		}
		if int(h.CSumStart)+int(h.CSumOffset)+2 > n {
			return ErrBadHeader
		}
	}
	if h.GSOType == GSONone {
		return nil
	}
	var need Offloads
	switch h.GSOType {
	case GSOTCPv4:
		need = OffloadTSO4
	case GSOTCPv6:
		need = OffloadTSO6
	case GSOTCPv4 | GSOECN:
		need = OffloadTSO4 | OffloadECN
	case GSOTCPv6 | GSOECN:
		need = OffloadTSO6 | OffloadECN
	case GSOUDPL4: // does not say which family
		need = OffloadUSO4 | OffloadUSO6
	default: // UFO, a type of a later version, ECN without TCP
		return ErrBadHeader
	}
	if !offered.Has(need) {
		return ErrNotOffered
	}
	// A super-frame without a partial checksum, or whose segments would hold
	// nothing, cannot be cut up (virtio 1.3, 5.1.6.2).
	if h.Flags&FlagNeedsCSum == 0 || h.GSOSize == 0 || int(h.HdrLen) > n {
		return ErrBadHeader
	}
	return nil
}
