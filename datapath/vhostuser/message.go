package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// A message is a header, three 32-bit numbers, and a payload, all in native byte
// order, with descriptors beside its first byte (QEMU, docs/interop/vhost-user).
const (
	headerSize = 4 + 4 + 4
	// maxPayload is the longest of the requests we take, SET_MEM_TABLE: two
	// 32-bit numbers and the regions.
	maxPayload = 4 + 4 + maxTableRegions*regionSize
	// maxFDs is how many descriptors come with one message: one a region.
	maxFDs = maxTableRegions

	// maxTableRegions is how many regions SET_MEM_TABLE carries. More come one by
	// one, with ADD_MEM_REG.
	maxTableRegions = 8
	regionSize      = 4 * 8
)

// Bits of a header's flags.
const (
	flagVersion   = 0b11 // the protocol's version, in two bits
	flagReply     = 1 << 2
	flagNeedReply = 1 << 3

	version = 1
)

var (
	errVersion = errors.New("not a message of version 1 of the protocol")
	errTooLong = errors.New("message longer than any request")
	errSize    = errors.New("wrong payload size")
)

// A header begins each message.
type header struct {
	request request
	flags   uint32
	size    uint32 // of the payload
}

// parseHeader reads the header of a request, whose size is then at most
// maxPayload.
func parseHeader(b *[headerSize]byte) (header, error) {
	h := header{
		request: request(binary.NativeEndian.Uint32(b[0:])),
		flags:   binary.NativeEndian.Uint32(b[4:]),
		size:    binary.NativeEndian.Uint32(b[8:]),
	}
	switch {
	case h.flags&flagVersion != version, h.flags&flagReply != 0:
		return header{}, fmt.Errorf("%w: flags %#x", errVersion, h.flags)
	case h.size > maxPayload:
		return header{}, fmt.Errorf("%w: %s of %d bytes", errTooLong, h.request, h.size)
	}
	return h, nil
}

// appendReply appends the message that answers a request. Its flags are exactly
// version and reply: User Mode Linux insists.
func appendReply(b []byte, r request, payload []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(r))
	b = binary.NativeEndian.AppendUint32(b, version|flagReply)
	b = binary.NativeEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// u64Payload is the payload of most replies.
func u64Payload(v uint64) []byte { return binary.NativeEndian.AppendUint64(nil, v) }

// A vringState is a ring's index and a number: its size, its base, whether it is
// enabled.
type vringState struct{ index, num uint32 }

const vringStateSize = 4 + 4

func parseVringState(b []byte) vringState {
	return vringState{binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint32(b[4:])}
}

func (s vringState) payload() []byte {
	return binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, s.index), s.num)
}

// A vringAddr says where the parts of a ring lie, in the front-end's own
// addresses.
type vringAddr struct{ desc, used, avail uint64 }

// vringAddrSize: index, flags, then descriptors, used, available, log.
const vringAddrSize = 4 + 4 + 4*8

// parseVringAddr leaves out flags and log, which are for migration.
func parseVringAddr(b []byte) (index uint32, a vringAddr) {
	return binary.NativeEndian.Uint32(b), vringAddr{
		desc:  binary.NativeEndian.Uint64(b[8:]),
		used:  binary.NativeEndian.Uint64(b[16:]),
		avail: binary.NativeEndian.Uint64(b[24:]),
	}
}

// The number of SET_VRING_KICK, CALL and ERR: a ring's index, and a bit that
// says that no descriptor comes with it.
const (
	vringIndexMask = 0xff
	vringNoFD      = 1 << 8
)

// A region is a piece of the guest's memory: its guest-physical address, its
// address in the front-end, and where it lies in the descriptor that comes with
// it.
type region struct{ gpa, size, user, offset uint64 }

func parseRegion(b []byte) region {
	return region{
		gpa:    binary.NativeEndian.Uint64(b[0:]),
		size:   binary.NativeEndian.Uint64(b[8:]),
		user:   binary.NativeEndian.Uint64(b[16:]),
		offset: binary.NativeEndian.Uint64(b[24:]),
	}
}

// singleRegionSize is that of ADD_MEM_REG and REM_MEM_REG: 64 bits of padding,
// then the region.
const singleRegionSize = 8 + regionSize

// parseRegions reads the payload of SET_MEM_TABLE, at most maxPayload bytes: the
// number of regions, 32 bits of padding, the regions.
func parseRegions(b []byte) ([]region, error) {
	if len(b) < 8 {
		return nil, errSize
	}
	n := binary.NativeEndian.Uint32(b)
	if n > maxTableRegions {
		return nil, fmt.Errorf("%d memory regions in one message, the limit is %d", n, maxTableRegions)
	}
	b = b[8:]
	if len(b) < int(n)*regionSize { // more is padding to the whole structure
		return nil, errSize
	}
	regions := make([]region, n)
	for i := range regions {
		regions[i] = parseRegion(b[i*regionSize:])
	}
	return regions, nil
}

// A message is a request as it was read. Its descriptors are owned by whoever
// read it until a request takes them.
type message struct {
	header
	payload []byte
	fds     []int
}

// takeFDs hands over the descriptors.
func (m *message) takeFDs() []int {
	fds := m.fds
	m.fds = nil
	return fds
}
