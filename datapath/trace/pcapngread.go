package trace

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
)

// maxBlock bounds a block: the longest frame, with comments, several times over.
const maxBlock = 1 << 20

// ErrNotOurs says that a stream is not of the kind that Stream writes.
var ErrNotOurs = errors.New("not a trace as culvert writes it")

// A Block is one block of a stream, whole: what is written to another file as it
// is. Its parts are parsed on demand.
type Block struct {
	Kind uint32
	Raw  []byte // valid until the next block is read
}

// A BlockReader reads a stream that Stream wrote, in little-endian order.
type BlockReader struct {
	in  *bufio.Reader
	buf []byte
}

// NewBlockReader returns a BlockReader of r.
func NewBlockReader(r io.Reader) *BlockReader {
	return &BlockReader{in: bufio.NewReaderSize(r, 256<<10)}
}

// Next returns the next block. Its errors are io.EOF between two blocks,
// io.ErrUnexpectedEOF inside one, ErrNotOurs, and the reader's own.
func (r *BlockReader) Next() (Block, error) {
	head, err := r.in.Peek(8)
	if len(head) == 0 && err != nil {
		return Block{}, err
	}
	if err != nil {
		return Block{}, noEOF(err)
	}
	n := int(le.Uint32(head[4:]))
	if n < 12 || n > maxBlock || n%4 != 0 {
		return Block{}, fmt.Errorf("block of %d bytes: %w", n, ErrNotOurs)
	}
	if cap(r.buf) < n {
		r.buf = make([]byte, n)
	}
	b := Block{Kind: le.Uint32(head), Raw: r.buf[:n]}
	if _, err := io.ReadFull(r.in, b.Raw); err != nil {
		return Block{}, noEOF(err)
	}
	if int(le.Uint32(b.Raw[n-4:])) != n {
		return Block{}, fmt.Errorf("block of two lengths: %w", ErrNotOurs)
	}
	if b.Kind == BlockSection && (n < 28 || le.Uint32(b.Raw[8:]) != byteOrderMagic) {
		return Block{}, fmt.Errorf("section of another byte order: %w", ErrNotOurs)
	}
	return b, nil
}

// Buffered reports whether the next block has come already, or a part of it.
func (r *BlockReader) Buffered() bool { return r.in.Buffered() > 0 }

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// body returns what lies between a block's lengths, at least n bytes.
func (b Block) body(kind uint32, n int) ([]byte, error) {
	if b.Kind != kind || len(b.Raw) < 12+n {
		return nil, fmt.Errorf("block of kind %d and %d bytes: %w", b.Kind, len(b.Raw), ErrNotOurs)
	}
	return b.Raw[8 : len(b.Raw)-4], nil
}

// options calls each for each of b's options.
func options(b []byte, each func(code uint16, value []byte)) error {
	for len(b) >= 4 {
		code, n := le.Uint16(b), int(le.Uint16(b[2:]))
		if b = b[4:]; code == optEnd {
			return nil
		}
		padded := n + -n&3
		if padded > len(b) {
			return fmt.Errorf("option of %d bytes: %w", n, ErrNotOurs)
		}
		each(code, b[:n])
		b = b[padded:]
	}
	return nil
}

// Dropped reports whether the packet was dropped.
func (p *Packet) Dropped() bool {
	for _, c := range p.Comments {
		if len(c) > 5 && c[:5] == "drop " {
			return true
		}
	}
	return false
}

// An Interface is what an interface block says.
type Interface struct {
	Name string // "VM/qN", or "VM/drops"
	Text bool   // its packets are lines of text, not frames
}

// Interface parses an interface block.
func (b Block) Interface() (i Interface, err error) {
	body, err := b.body(BlockInterface, 8)
	if err != nil {
		return i, err
	}
	i.Text = le.Uint16(body) == linkText
	err = options(body[8:], func(code uint16, value []byte) {
		if code == ifName {
			i.Name = string(value)
		}
	})
	return i, err
}

// Packet parses a packet block. The packet's Data is the block's.
func (b Block) Packet() (p Packet, err error) {
	body, err := b.body(BlockPacket, 20)
	if err != nil {
		return p, err
	}
	n := le.Uint32(body[12:])
	length := le.Uint32(body[16:])
	padded := uint64(n) + uint64(-n&3)
	if padded > uint64(len(body)-20) || length > math.MaxInt32 {
		return p, fmt.Errorf("packet of %d bytes: %w", n, ErrNotOurs)
	}
	p = Packet{
		Interface: le.Uint32(body), At: int64(uint64(le.Uint32(body[4:]))<<32 | uint64(le.Uint32(body[8:]))),
		Data: body[20 : 20+n], Length: int(length),
	}
	err = options(body[20+padded:], func(code uint16, value []byte) {
		switch {
		case code == optComment:
			p.Comments = append(p.Comments, string(value))
		case code == epbFlags && len(value) == 4:
			p.Dir = Direction(le.Uint32(value) & 3)
		case code == epbDrops && len(value) == 8:
			p.Lost = le.Uint64(value)
		}
	})
	return p, err
}

// Statistics parses a statistics block: how many frames its interface has had,
// and how many of them were lost to the stream.
func (b Block) Statistics() (id uint32, received, lost uint64, err error) {
	body, err := b.body(BlockStatistics, 12)
	if err != nil {
		return 0, 0, 0, err
	}
	id = le.Uint32(body)
	err = options(body[12:], func(code uint16, value []byte) {
		switch {
		case code == isbReceived && len(value) == 8:
			received = le.Uint64(value)
		case code == isbDropped && len(value) == 8:
			lost = le.Uint64(value)
		}
	})
	return id, received, lost, err
}
