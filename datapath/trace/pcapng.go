package trace

import (
	"encoding/binary"
	"strconv"
)

// The blocks of pcapng that are used here (draft-ietf-opsawg-pcapng, 4), all in
// little-endian order.
const (
	BlockSection    = 0x0a0d0d0a
	BlockInterface  = 1
	BlockStatistics = 5
	BlockPacket     = 6 // the enhanced one

	byteOrderMagic = 0x1a2b3c4d
)

// Codes of options.
const (
	optEnd      = 0
	optComment  = 1
	shbUserAppl = 4
	ifName      = 2
	ifTSResol   = 9
	epbFlags    = 2
	epbDrops    = 4
	isbReceived = 4
	isbDropped  = 5
)

// Link types (tcpdump.org/linktypes.html).
const (
	linkEthernet = 1
	// linkText is LINKTYPE_WIRESHARK_UPPER_PDU: something that is no frame, with
	// the name of what reads it, here the dissector of plain text.
	linkText = 252
)

// maxComment bounds a comment: what an owner's name may bring.
const maxComment = 1024

// A Packet is a frame as pcapng keeps it, or, on an interface of link type
// linkText, a line about one.
type Packet struct {
	Interface uint32
	At        int64 // nanoseconds since 1970
	Dir       Direction
	Lost      uint64 // of this interface, since its last packet
	Length    int    // of the frame; Data may be less
	Data      []byte
	Comments  []string
}

var le = binary.LittleEndian

// beginBlock begins a block, which endBlock ends.
func beginBlock(b []byte, kind uint32) []byte {
	return append(le.AppendUint32(b, kind), 0, 0, 0, 0)
}

// endBlock ends the block that begins at b[start:], with the end of its options.
func endBlock(b []byte, start int) []byte {
	b = le.AppendUint32(b, optEnd)
	n := uint32(len(b) - start + 4)
	le.PutUint32(b[start+4:], n)
	return le.AppendUint32(b, n)
}

func appendOption(b []byte, code uint16, value ...string) []byte {
	n := 0
	for _, v := range value {
		n += len(v)
	}
	b = le.AppendUint16(le.AppendUint16(b, code), uint16(n))
	for _, v := range value {
		b = append(b, v...)
	}
	return pad(b, n)
}

// pad fills up what has n bytes to a multiple of four.
func pad(b []byte, n int) []byte { return append(b, "\x00\x00\x00"[:-n&3]...) }

func appendOption64(b []byte, code uint16, v uint64) []byte {
	b = le.AppendUint16(le.AppendUint16(b, code), 8)
	return le.AppendUint64(b, v)
}

func appendComment(b []byte, what, who string) []byte {
	return appendOption(b, optComment, what, who[:min(len(who), maxComment)])
}

func appendCount(b []byte, before string, n uint64, after string) []byte {
	start := len(b)
	b = le.AppendUint16(b, optComment)
	b = append(b, 0, 0)
	b = append(b, before...)
	b = strconv.AppendUint(b, n, 10)
	b = append(b, after...)
	le.PutUint16(b[start+2:], uint16(len(b)-start-4))
	return pad(b, len(b)-start)
}

func appendSection(b []byte) []byte {
	start := len(b)
	b = beginBlock(b, BlockSection)
	b = le.AppendUint32(b, byteOrderMagic)
	b = le.AppendUint16(le.AppendUint16(b, 1), 0) // version 1.0
	b = le.AppendUint64(b, ^uint64(0))            // of a length not known yet
	b = appendOption(b, shbUserAppl, "culvert")
	return endBlock(b, start)
}

func appendInterface(b []byte, name string, link uint16, snap int) []byte {
	start := len(b)
	b = beginBlock(b, BlockInterface)
	b = le.AppendUint16(le.AppendUint16(b, link), 0)
	b = le.AppendUint32(b, uint32(snap))
	b = appendOption(b, ifName, name)
	b = appendOption(b, ifTSResol, "\x09") // 10^-9 s
	return endBlock(b, start)
}

// AppendStatistics appends a statistics block to b: how many frames of an
// interface were written, and how many lost, up to a time in nanoseconds.
func AppendStatistics(b []byte, id uint32, at int64, seen, lost uint64) []byte {
	start := len(b)
	b = beginBlock(b, BlockStatistics)
	b = appendTime(le.AppendUint32(b, id), at)
	b = appendOption64(b, isbReceived, seen+lost) // pcap(3): received before it could be lost
	b = appendOption64(b, isbDropped, lost)
	return endBlock(b, start)
}

// appendTime appends a time as blocks have it: its upper half first.
func appendTime(b []byte, at int64) []byte {
	return le.AppendUint32(le.AppendUint32(b, uint32(uint64(at)>>32)), uint32(at))
}

// A packet's block is beginBlock, head, data or text, comments, endBlock.

func (p *Packet) head(b []byte) []byte { return appendTime(le.AppendUint32(b, p.Interface), p.At) }

func (p *Packet) data(b []byte) []byte {
	b = le.AppendUint32(le.AppendUint32(b, uint32(len(p.Data))), uint32(p.Length))
	b = append(b, p.Data...)
	return p.options(pad(b, len(p.Data)))
}

func (p *Packet) options(b []byte) []byte {
	if p.Dir != Unknown {
		b = le.AppendUint16(le.AppendUint16(b, epbFlags), 4)
		b = le.AppendUint32(b, uint32(p.Dir))
	}
	if p.Lost > 0 {
		b = appendOption64(b, epbDrops, p.Lost)
	}
	return b
}

// textHead says that plain text follows: a tag (12, a dissector's name), its
// length and value, in network order, and the end of tags.
const textHead = "\x00\x0c\x00\x10data-text-lines\x00\x00\x00\x00\x00"

func (p *Packet) text(b []byte, text string) []byte {
	n := len(textHead) + len(text)
	b = le.AppendUint32(le.AppendUint32(b, uint32(n)), uint32(n))
	b = append(append(b, textHead...), text...)
	return p.options(pad(b, n))
}
