package virtqueue

import "math"

// Bounds of a chain. A chain beyond them is refused with a ChainError.
const (
	// MaxSegments is the most pieces a chain may have, and the most descriptors
	// an indirect table may have. Linux needs 19 for the longest frame (17
	// fragments, the linear part, the header); QEMU's limit is 1024 too.
	MaxSegments = 1024
	// MaxReadable is the most bytes a driver may hand us in one chain: the
	// longest frame (65560) and its header (12), and about as much again, so
	// that what is a little too long is for the caller to judge and count.
	MaxReadable = 128 << 10
	// MaxWritable is the most bytes a driver may lend us in one chain. The
	// specification allows 2^32; this fits an int everywhere.
	MaxWritable = math.MaxInt32
)

// A ChainError says why a chain cannot be used. The ring it came from can.
type ChainError uint8

// The reasons, from NumChainErrors-1 down to 1.
const (
	ErrLoop          ChainError = 1 + iota // more descriptors than its table has: it comes back to itself
	ErrNext                                // next is no descriptor of the table
	ErrNotNegotiated                       // INDIRECT without VIRTIO_F_INDIRECT_DESC
	ErrNested                              // INDIRECT inside an indirect table
	ErrIndirectNext                        // INDIRECT and NEXT together
	ErrTable                               // indirect table empty, ragged, or of more than MaxSegments entries
	ErrDirection                           // readable behind writable
	ErrFault                               // memory that the guest does not have
	ErrTooLong                             // more than MaxReadable or MaxWritable bytes
	ErrSegments                            // more than MaxSegments pieces
	ErrEmpty                               // no bytes at all
	numChainErrors
)

// NumChainErrors is the size of an array with a counter for each ChainError;
// element 0 stays unused.
const NumChainErrors = int(numChainErrors)

var chainErrors = [NumChainErrors]string{
	"none", "loop", "next-out-of-range", "indirect-not-negotiated", "indirect-nested", "indirect-with-next",
	"indirect-table-size", "readable-after-writable", "outside-memory", "too-long", "too-many-segments", "empty",
}

// String returns the reason's name for counters, such as "outside-memory".
func (e ChainError) String() string {
	if int(e) >= NumChainErrors {
		return "unknown"
	}
	return chainErrors[e]
}

// Error returns the reason as an error text.
func (e ChainError) Error() string { return "bad descriptor chain: " + e.String() }

// A Chain is what the driver made available in one go: bytes to read, then
// bytes to write, in pieces. It is filled by Pop and may be used again and again;
// the zero value is ready. The pieces are guest memory: the driver may change
// them at any time, so what has to be checked is copied out first. They are good
// until the chain is pushed or unpopped, or the chain is popped into again.
type Chain struct {
	// Head names the chain to Push.
	Head uint16
	// Readable are the pieces the device reads, in order. None is empty.
	Readable [][]byte
	// Writable are the pieces the device writes, in order. None is empty.
	Writable [][]byte
	// ReadableLen and WritableLen are their lengths in bytes, at most
	// MaxReadable and MaxWritable. They are not both 0, unless Pop returned an
	// error.
	ReadableLen, WritableLen int

	segs  [][]byte // Readable, then Writable
	split int      // where Writable begins in segs; all of them while -1
	table []byte   // an indirect table that lies in two regions
}

func (c *Chain) reset(head uint16) {
	*c = Chain{Head: head, segs: c.segs[:0], split: -1, table: c.table}
}

// refuse leaves nothing but the head.
func (c *Chain) refuse(err ChainError) error {
	c.reset(c.Head)
	return err
}

// add appends what one descriptor covers, and returns 0 or why it does not. A
// descriptor of no bytes is allowed and adds nothing.
func (c *Chain) add(mem Memory, d desc) ChainError {
	if d.flags&descFWrite != 0 {
		if c.split < 0 {
			c.split = len(c.segs)
		}
		if uint64(d.len) > MaxWritable-uint64(c.WritableLen) {
			return ErrTooLong
		}
		c.WritableLen += int(d.len)
	} else {
		if c.split >= 0 {
			return ErrDirection
		}
		if uint64(d.len) > MaxReadable-uint64(c.ReadableLen) {
			return ErrTooLong
		}
		c.ReadableLen += int(d.len)
	}
	for addr, n := d.addr, d.len; n > 0; {
		if len(c.segs) == MaxSegments {
			return ErrSegments
		}
		seg, ok := slice(mem, addr, n)
		if !ok {
			return ErrFault
		}
		c.segs = append(c.segs, seg)
		addr += uint64(len(seg))
		n -= uint32(len(seg))
	}
	return 0
}

// slice is mem.Slice, held to what it promises.
func slice(mem Memory, addr uint64, n uint32) ([]byte, bool) {
	if addr+uint64(n) < addr {
		return nil, false
	}
	b, err := mem.Slice(addr, n)
	return b, err == nil && len(b) > 0 && len(b) <= int(n)
}

// gather returns an indirect table of n bytes: in place where it lies in one
// region, which is always but for a driver that means to be different, else a
// copy.
func (c *Chain) gather(mem Memory, addr uint64, n uint32) ([]byte, error) {
	b, ok := slice(mem, addr, n)
	if ok && len(b) == int(n) {
		return b, nil
	}
	c.table = c.table[:0]
	for ok {
		c.table = append(c.table, b...)
		addr += uint64(len(b))
		if n -= uint32(len(b)); n == 0 {
			return c.table, nil
		}
		b, ok = slice(mem, addr, n)
	}
	return nil, ErrFault
}

// done ends a walk.
func (c *Chain) done() error {
	if len(c.segs) == 0 {
		return c.refuse(ErrEmpty)
	}
	if c.split < 0 {
		c.split = len(c.segs)
	}
	c.Readable, c.Writable = c.segs[:c.split:c.split], c.segs[c.split:]
	return nil
}

// CopyOut copies readable bytes from the skip'th on to dst, and returns how
// many: all there are, or as many as dst has room for.
func (c *Chain) CopyOut(dst [][]byte, skip int) int { return copySegs(dst, 0, c.Readable, skip) }

// CopyIn copies the bytes of src from the from'th on to the writable bytes from
// the skip'th on, and returns how many: all there are, or as many as the chain
// has room for.
func (c *Chain) CopyIn(src [][]byte, from, skip int) int {
	return copySegs(c.Writable, skip, src, from)
}

// copySegs copies as much as src has from its sOff'th byte on and dst has room
// for from its dOff'th byte on. Offsets are not negative.
func copySegs(dst [][]byte, dOff int, src [][]byte, sOff int) (n int) {
	for len(dst) > 0 && len(src) > 0 {
		switch {
		case dOff >= len(dst[0]):
			dOff -= len(dst[0])
			dst = dst[1:]
		case sOff >= len(src[0]):
			sOff -= len(src[0])
			src = src[1:]
		default:
			k := copy(dst[0][dOff:], src[0][sOff:])
			n, dOff, sOff = n+k, dOff+k, sOff+k
		}
	}
	return n
}
