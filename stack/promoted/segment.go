package promoted

import (
	"encoding/binary"
)

// TCP's flags (RFC 9293, 3.1).
const (
	flagFIN = 1 << iota
	flagSYN
	flagRST
	flagPSH
	flagACK
)

// Kinds of TCP options.
const (
	optEnd    = 0
	optNOP    = 1
	optMSS    = 2 // RFC 9293, 3.7.1
	optScale  = 3 // RFC 7323, 2
	optStamps = 8 // RFC 7323, 3
)

// tcpHeader is the length of TCP's header without options.
const tcpHeader = 20

// A Segment is what one frame of the guest's says, read once.
type Segment struct {
	seq, ack uint32
	flags    uint8
	window   uint16
	stamped  bool
	stamp    uint32 // the guest's clock
	echo     uint32 // ours, as the guest last heard it

	// Of a SYN.
	mss   uint16 // 0 for none
	scale int8   // -1 for none

	// The payload, in two pieces, in the frame's memory.
	first, rest []byte
}

// Parse reads a TCP segment of n bytes which begins in head and goes on in body. Its
// header has to lie in head. ok is false for one that is impossible.
func Parse(head, body []byte, n int) (s Segment, ok bool) {
	if n < tcpHeader || len(head) < tcpHeader || len(head)+len(body) < n {
		return s, false
	}
	size := int(head[12]>>4) * 4
	if size < tcpHeader || size > n || size > len(head) {
		return s, false
	}
	s.seq = binary.BigEndian.Uint32(head[4:])
	s.ack = binary.BigEndian.Uint32(head[8:])
	s.flags = head[13]
	s.window = binary.BigEndian.Uint16(head[14:])
	s.scale = -1
	s.options(head[tcpHeader:size])
	s.first = head[size:min(n, len(head))]
	s.rest = body[:n-size-len(s.first)]
	return s, true
}

// stampsFirst is how Linux and most begin the options of an established flow: NOP,
// NOP, timestamps of 10 bytes.
const stampsFirst = 0x0101080a

// options reads the options that we know of.
func (s *Segment) options(b []byte) {
	if len(b) == 12 && binary.BigEndian.Uint32(b) == stampsFirst {
		s.stamped, s.stamp, s.echo = true, binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
		return
	}
	for len(b) > 0 {
		switch b[0] {
		case optEnd:
			return
		case optNOP:
			b = b[1:]
			continue
		}
		if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
			return // what comes behind a broken option is none
		}
		switch v := b[2:b[1]]; {
		case b[0] == optMSS && len(v) == 2:
			s.mss = binary.BigEndian.Uint16(v)
		case b[0] == optScale && len(v) == 1:
			s.scale = int8(min(v[0], maxScale))
		case b[0] == optStamps && len(v) == 8:
			s.stamped, s.stamp, s.echo = true, binary.BigEndian.Uint32(v), binary.BigEndian.Uint32(v[4:])
		}
		b = b[b[1]:]
	}
}

// maxScale is the greatest shift of a window (RFC 7323, 2.3).
const maxScale = 14

func (s *Segment) has(flags uint8) bool { return s.flags&flags != 0 }

// size is how many bytes of payload there are.
func (s *Segment) size() int { return len(s.first) + len(s.rest) }

// span is how many sequence numbers the segment takes, a first one's aside.
func (s *Segment) span() uint32 {
	n := uint32(s.size())
	if s.has(flagFIN) {
		n++
	}
	return n
}

// cut drops the first n bytes of the payload.
func (s *Segment) cut(n int) {
	k := min(n, len(s.first))
	s.first, s.rest = s.first[k:], s.rest[n-k:]
	s.seq += uint32(n)
}

// keep drops all but the first n bytes of the payload.
func (s *Segment) keep(n int) {
	k := min(n, len(s.first))
	s.first, s.rest = s.first[:k], s.rest[:n-k]
}

// before reports whether sequence number a comes before b (RFC 9293, 3.4).
func before(a, b uint32) bool { return int32(a-b) < 0 }
