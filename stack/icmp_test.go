package stack

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
)

// The messages to the byte: RFC 792 and RFC 4443, type and code, then the
// headers of the datagram they are about.
func TestUnreachableLayout(t *testing.T) {
	assert.Equal(t, []byte{
		3, 3, 0xf7, 0xed, 0, 0, 0, 0, // port unreachable, checksum, unused
		0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0x7c, 0xce, // IPv4, 28 bytes, TTL 64, UDP, checksum
		127, 0, 0, 1, 127, 0, 0, 2, // client, host
		0x04, 0xd2, 0, 53, 0, 8, 0, 0, // ports 1234 and 53, 8 bytes, no checksum
	}, unreachable4(netip.MustParseAddrPort("127.0.0.1:1234"), netip.MustParseAddrPort("127.0.0.2:53")))

	want := append([]byte{
		1, 4, 0, 0, 0, 0, 0, 0, // port unreachable; the kernel sums
		0x60, 0, 0, 0, 0, 8, 17, 64, // IPv6, 8 bytes, UDP, hop limit 64
	}, append(append(
		netip.MustParseAddr("fd00::1").AsSlice(), netip.MustParseAddr("::1").AsSlice()...),
		0x04, 0xd2, 0, 53, 0, 8, 0, 0)...)
	assert.Equal(t, want, unreachable6(netip.MustParseAddrPort("[fd00::1]:1234"), netip.MustParseAddrPort("[::1]:53")))
}

// A header with its checksum in it sums up to nothing (RFC 1071).
func TestInternetChecksum(t *testing.T) {
	b := unreachable4(netip.MustParseAddrPort("198.18.0.1:65535"), netip.MustParseAddrPort("198.18.255.254:1"))
	assert.Zero(t, internetChecksum(b))
	assert.Zero(t, internetChecksum(b[8:28]))
}
