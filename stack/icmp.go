package stack

import (
	"encoding/binary"
	"net/netip"
)

// unreachable4 builds the ICMP message that answers a datagram from client to
// host: destination unreachable, port (RFC 792, type 3 code 3), quoting the
// headers that tell the client which socket it is about.
func unreachable4(client, host netip.AddrPort) []byte {
	b := make([]byte, 8+20+8)
	b[0], b[1] = 3, 3
	ip := b[8:28]
	ip[0] = 0x45
	binary.BigEndian.PutUint16(ip[2:], 28)
	ip[8], ip[9] = 64, 17
	copy(ip[12:16], client.Addr().Unmap().AsSlice())
	copy(ip[16:20], host.Addr().Unmap().AsSlice())
	binary.BigEndian.PutUint16(ip[10:], internetChecksum(ip))
	putUDP(b[28:], client, host)
	binary.BigEndian.PutUint16(b[2:], internetChecksum(b))
	return b
}

// unreachable6 is unreachable4 for IPv6 (RFC 4443, type 1 code 4). The kernel
// fills in the checksum.
func unreachable6(client, host netip.AddrPort) []byte {
	b := make([]byte, 8+40+8)
	b[0], b[1] = 1, 4
	ip := b[8:48]
	ip[0] = 0x60
	binary.BigEndian.PutUint16(ip[4:], 8)
	ip[6], ip[7] = 17, 64
	copy(ip[8:24], client.Addr().AsSlice())
	copy(ip[24:40], host.Addr().AsSlice())
	putUDP(b[48:], client, host)
	return b
}

func putUDP(b []byte, client, host netip.AddrPort) {
	binary.BigEndian.PutUint16(b[0:], client.Port())
	binary.BigEndian.PutUint16(b[2:], host.Port())
	binary.BigEndian.PutUint16(b[4:], 8)
}

// internetChecksum is RFC 1071's, of an even number of bytes.
func internetChecksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
