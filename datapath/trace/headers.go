package trace

import (
	"encoding/binary"
	"net/netip"
)

// maxHeaders is how much of a frame is looked at: Ethernet with two tags (22),
// IPv4 with all options (60) and TCP with all of its own (60) are 142; the rest
// is for IPv6's extensions.
const maxHeaders = 192

// EtherTypes and protocol numbers (IANA).
const (
	typeIPv4   = 0x0800
	typeARP    = 0x0806
	typeVLAN   = 0x8100
	typeQinQ   = 0x88a8
	typeIPv6   = 0x86dd
	protoICMP  = 1
	protoTCP   = 6
	protoUDP   = 17
	protoICMP6 = 58
)

// headers is what a frame's headers say, as far as they are there. Nothing of it
// is to be trusted.
type headers struct {
	srcMAC, dstMAC [6]byte
	etherType      uint16 // behind the tags; 0 for a frame too short to have one
	tags           int
	vlan           uint16 // of the first tag
	l3             int    // where the network header begins

	addrs    bool // src and dst are there: of IP, or of ARP's sender and target
	src, dst netip.Addr

	proto    uint8 // of IP, behind IPv6's extensions; 0 if there is none to see
	fragment bool  // not the first of a fragmented packet
	l4       int   // where the transport header begins; 0 if it is not there

	ports            bool
	srcPort, dstPort uint16
}

// parseHeaders reads the headers in b, the beginning of a frame.
func parseHeaders(b []byte) (h headers) {
	if len(b) < 14 {
		return h
	}
	copy(h.dstMAC[:], b)
	copy(h.srcMAC[:], b[6:])
	h.etherType = binary.BigEndian.Uint16(b[12:])
	h.l3 = 14
	for h.tags < 2 && (h.etherType == typeVLAN || h.etherType == typeQinQ) && len(b) >= h.l3+4 {
		if h.tags == 0 {
			h.vlan = binary.BigEndian.Uint16(b[h.l3:]) & 0xfff
		}
		h.etherType = binary.BigEndian.Uint16(b[h.l3+2:])
		h.l3 += 4
		h.tags++
	}
	switch ip := b[h.l3:]; h.etherType {
	case typeARP: // of Ethernet and IPv4 alone
		if len(ip) >= 28 && ip[4] == 6 && ip[5] == 4 {
			h.addrs = true
			h.src, h.dst = netip.AddrFrom4([4]byte(ip[14:18])), netip.AddrFrom4([4]byte(ip[24:28]))
		}
	case typeIPv4:
		h.ipv4(b, ip)
	case typeIPv6:
		h.ipv6(b, ip)
	}
	return h
}

func (h *headers) ipv4(b, ip []byte) {
	if len(ip) < 20 || ip[0]>>4 != 4 {
		return
	}
	h.addrs = true
	h.src, h.dst = netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20]))
	h.proto = ip[9]
	h.fragment = binary.BigEndian.Uint16(ip[6:])&0x1fff != 0
	if n := int(ip[0]&15) * 4; n >= 20 {
		h.transport(b, h.l3+n)
	}
}

// ipv6 walks the extension headers (RFC 8200, 4): no more of them than fit into
// what is looked at.
func (h *headers) ipv6(b, ip []byte) {
	if len(ip) < 40 || ip[0]>>4 != 6 {
		return
	}
	h.addrs = true
	h.src, h.dst = netip.AddrFrom16([16]byte(ip[8:24])), netip.AddrFrom16([16]byte(ip[24:40]))
	next, at := ip[6], h.l3+40
	for {
		switch next {
		case 0, 43, 60: // hop-by-hop, routing, destination options
			if len(b) < at+8 {
				return
			}
			next, at = b[at], at+8+int(b[at+1])*8
		case 44: // fragment
			if len(b) < at+8 {
				return
			}
			h.fragment = h.fragment || binary.BigEndian.Uint16(b[at+2:])&0xfff8 != 0
			next, at = b[at], at+8
		default:
			h.proto = next
			h.transport(b, at)
			return
		}
		if h.fragment {
			h.proto = next // as far as a later fragment knows
			return
		}
	}
}

func (h *headers) transport(b []byte, at int) {
	if h.fragment || at >= len(b) {
		return
	}
	h.l4 = at
	if (h.proto == protoTCP || h.proto == protoUDP) && len(b) >= at+4 {
		h.ports = true
		h.srcPort, h.dstPort = binary.BigEndian.Uint16(b[at:]), binary.BigEndian.Uint16(b[at+2:])
	}
}
