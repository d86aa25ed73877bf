package trace

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"
	"unicode"
)

// Line returns a packet of interface i as one line for people, without its end,
// in tcpdump's manner: time, interface, direction, what the frame says, comments.
// It holds no control characters, whatever the guest sent.
func (p *Packet) Line(i Interface) string {
	var b strings.Builder
	b.WriteString(time.Unix(0, p.At).Format("15:04:05.000000"))
	fmt.Fprintf(&b, " %s %-3s ", i.Name, [...]string{"?", "In", "Out", "?"}[p.Dir&3])
	if i.Text {
		if len(p.Data) >= len(textHead) {
			b.Write(p.Data[len(textHead):])
		}
	} else {
		p.describe(&b)
	}
	for _, c := range p.Comments {
		if !i.Text || !strings.HasPrefix(c, "drop ") { // the text says it
			b.WriteString(", " + c)
		}
	}
	if p.Lost > 0 {
		fmt.Fprintf(&b, ", %d lost before it", p.Lost)
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '�'
	}, b.String())
}

// describe writes what the frame says.
func (p *Packet) describe(b *strings.Builder) {
	h := parseHeaders(p.Data)
	if h.l3 == 0 {
		fmt.Fprintf(b, "unknown, too short for Ethernet, length %d", p.Length)
		return
	}
	if h.tags > 0 {
		fmt.Fprintf(b, "vlan %d, ", h.vlan)
	}
	length := max(0, p.Length-h.l3)
	switch {
	case h.etherType == typeARP && h.addrs:
		arp := p.Data[h.l3:]
		switch binary.BigEndian.Uint16(arp[6:]) {
		case 1:
			fmt.Fprintf(b, "ARP, Request who-has %s tell %s", h.dst, h.src)
		case 2:
			fmt.Fprintf(b, "ARP, Reply %s is-at %s", h.src, macText(arp[8:14]))
		default:
			fmt.Fprintf(b, "ARP, unknown operation of %s", h.src)
		}
		fmt.Fprintf(b, ", length %d", length)
	case h.addrs:
		p.describeIP(b, &h)
	default:
		fmt.Fprintf(b, "%s > %s, unknown (0x%04x), length %d", macText(h.srcMAC[:]), macText(h.dstMAC[:]), h.etherType, length)
	}
}

func macText(b []byte) string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", b[0], b[1], b[2], b[3], b[4], b[5])
}

// describeIP writes an IP packet's line. Lengths are those of the packet, not of
// the frame, which may be padded.
func (p *Packet) describeIP(b *strings.Builder, h *headers) {
	ip := p.Data[h.l3:]
	name, end := "IP", h.l3
	if h.etherType == typeIPv6 {
		name, end = "IP6", end+40+int(binary.BigEndian.Uint16(ip[4:]))
	} else {
		end += int(binary.BigEndian.Uint16(ip[2:]))
	}
	end = min(end, p.Length)
	payload := func(from int) int { return max(0, end-from) }
	if !h.ports {
		fmt.Fprintf(b, "%s %s > %s: ", name, h.src, h.dst)
		switch {
		case h.fragment:
			fmt.Fprintf(b, "fragment of protocol %d, length %d", h.proto, payload(h.l3))
		case h.l4 > 0 && (h.proto == protoICMP || h.proto == protoICMP6) && len(p.Data) >= h.l4+2:
			fmt.Fprintf(b, "ICMP%s %s, length %d", name[2:], icmpText(h.proto, p.Data[h.l4], p.Data[h.l4+1]), payload(h.l4))
		default:
			fmt.Fprintf(b, "protocol %d, length %d", h.proto, payload(h.l3))
		}
		return
	}
	fmt.Fprintf(b, "%s %s > %s: ", name, endText(h.src, h.srcPort), endText(h.dst, h.dstPort))
	l4 := p.Data[h.l4:]
	switch {
	case h.proto == protoUDP:
		fmt.Fprintf(b, "UDP, length %d", payload(h.l4+8))
	case len(l4) < 20:
		b.WriteString("TCP, cut short")
	default:
		n := payload(h.l4 + int(l4[12]>>4)*4)
		seq := binary.BigEndian.Uint32(l4[4:])
		fmt.Fprintf(b, "Flags [%s], seq %d", flagText(l4[13]), seq)
		if n > 0 {
			fmt.Fprintf(b, ":%d", seq+uint32(n))
		}
		if l4[13]&0x10 != 0 {
			fmt.Fprintf(b, ", ack %d", binary.BigEndian.Uint32(l4[8:]))
		}
		fmt.Fprintf(b, ", win %d, length %d", binary.BigEndian.Uint16(l4[14:]), n)
	}
}

// endText writes an address and a port as tcpdump does.
func endText(a netip.Addr, port uint16) string { return fmt.Sprintf("%s.%d", a, port) }

// flagText writes TCP's flags as tcpdump does: "S.", "P.", "none".
func flagText(flags byte) string {
	text := ""
	for _, f := range []struct {
		bit  byte
		name string
	}{{1, "F"}, {2, "S"}, {4, "R"}, {8, "P"}, {0x10, "."}, {0x20, "U"}, {0x40, "E"}, {0x80, "W"}} {
		if flags&f.bit != 0 {
			text += f.name
		}
	}
	if text == "" {
		return "none"
	}
	return text
}

func icmpText(proto, kind, code byte) string {
	known := map[[2]byte]string{
		{protoICMP, 0}: "echo reply", {protoICMP, 8}: "echo request", {protoICMP, 3}: "unreachable", {protoICMP, 11}: "time exceeded",
		{protoICMP6, 128}: "echo request", {protoICMP6, 129}: "echo reply", {protoICMP6, 1}: "unreachable", {protoICMP6, 2}: "packet too big",
		{protoICMP6, 133}: "router solicitation", {protoICMP6, 134}: "router advertisement",
		{protoICMP6, 135}: "neighbor solicitation", {protoICMP6, 136}: "neighbor advertisement",
	}
	if name, ok := known[[2]byte{proto, kind}]; ok {
		if code != 0 {
			return fmt.Sprintf("%s, code %d", name, code)
		}
		return name
	}
	return fmt.Sprintf("type %d, code %d", kind, code)
}
