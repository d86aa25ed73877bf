package trace

import (
	"net/netip"
	"slices"
)

// A Filter matches frames by their headers: a useful part of pcap-filter(7),
// compiled once by ParseFilter. It is safe for concurrent use.
type Filter struct{ root *node }

// What a node asks.
type op uint8

const (
	opAnd op = iota
	opOr
	opNot
	opProto // etherType, and proto unless it is 0
	opHost  // prefix
	opPort  // lo to hi
	opEther // mac
	opCast  // broadcast or multicast, of Ethernet
	opDir
	opLess
	opGreater
)

// Which ends an address or a port is asked of.
type ends uint8

const (
	either ends = iota
	both
	srcOnly
	dstOnly
)

// A node is one question, or joins those of a and b.
type node struct {
	op        op
	a, b      *node
	ends      ends
	etherType []uint16 // any of these; none for all
	proto     uint8
	prefix    netip.Prefix
	lo, hi    uint16
	mac       [6]byte
	broadcast bool
	dir       Direction
	n         int
}

// Match reports whether a frame that was written matches.
func (f *Filter) Match(p *Packet) bool {
	h := parseHeaders(p.Data[:min(len(p.Data), maxHeaders)])
	return f.match(&h, p.Length, p.Dir)
}

// match reports whether a frame of n bytes with headers h matches.
func (f *Filter) match(h *headers, n int, dir Direction) bool { return f.root.match(h, n, dir) }

func (q *node) match(h *headers, n int, dir Direction) bool {
	switch q.op {
	case opAnd:
		return q.a.match(h, n, dir) && q.b.match(h, n, dir)
	case opOr:
		return q.a.match(h, n, dir) || q.b.match(h, n, dir)
	case opNot:
		return !q.a.match(h, n, dir)
	case opProto:
		return q.speaks(h)
	case opHost:
		return q.speaks(h) && h.tags == 0 && h.addrs && q.ends.of(q.prefix.Contains(h.src), q.prefix.Contains(h.dst))
	case opPort:
		return q.speaks(h) && h.ports && q.ends.of(q.covers(h.srcPort), q.covers(h.dstPort))
	case opEther:
		return h.l3 > 0 && q.ends.of(h.srcMAC == q.mac, h.dstMAC == q.mac)
	case opCast:
		if q.broadcast {
			return h.dstMAC == [6]byte{255, 255, 255, 255, 255, 255}
		}
		return h.dstMAC[0]&1 != 0
	case opDir:
		return dir == q.dir
	case opLess:
		return n <= q.n
	case opGreater:
		return n >= q.n
	}
	return false
}

// speaks reports whether h is of the node's protocols. Frames with a VLAN tag
// are not, as in pcap-filter(7) without the word vlan.
func (q *node) speaks(h *headers) bool {
	if len(q.etherType) == 0 {
		return true
	}
	return h.tags == 0 && h.l3 > 0 && slices.Contains(q.etherType, h.etherType) && (q.proto == 0 || h.proto == q.proto)
}

func (q *node) covers(port uint16) bool { return q.lo <= port && port <= q.hi }

func (e ends) of(src, dst bool) bool {
	switch e {
	case both:
		return src && dst
	case srcOnly:
		return src
	case dstOnly:
		return dst
	}
	return src || dst
}
