package virtio

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestLayout pins the header's bytes (virtio 1.3, 5.1.6): u8 flags, u8 gso_type,
// le16 hdr_len, gso_size, csum_start, csum_offset, num_buffers.
func TestLayout(t *testing.T) {
	for _, test := range []struct {
		name string
		hdr  NetHdr
		want []byte
	}{
		{"zero", NetHdr{}, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
		{"zero, long form", NetHdr{}, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
		{
			"each field", NetHdr{
				Flags: 0x01, GSOType: 0x02, HdrLen: 0x0403, GSOSize: 0x0605,
				CSumStart: 0x0807, CSumOffset: 0x0a09,
			},
			[]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
		},
		{
			"each field, long form", NetHdr{
				Flags: 0x01, GSOType: 0x02, HdrLen: 0x0403, GSOSize: 0x0605,
				CSumStart: 0x0807, CSumOffset: 0x0a09, NumBuffers: 0x0c0b,
			},
			[]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12},
		},
		{
			"TCP over IPv4, super-frame with ECN", NetHdr{
				Flags: FlagNeedsCSum, GSOType: GSOTCPv4 | GSOECN, HdrLen: 54, GSOSize: 1448,
				CSumStart: 34, CSumOffset: 16,
			},
			[]byte{0x01, 0x81, 54, 0, 0xa8, 0x05, 34, 0, 16, 0},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := make([]byte, len(test.want))
			for i := range got {
				got[i] = 0xee // every byte has to be written
			}
			test.hdr.Put(got)
			assert.Equal(t, test.want, got)

			hdr := NetHdr{Flags: 0xff, GSOType: 0xff, NumBuffers: 0xffff} // every field has to be read
			hdr.Parse(test.want)
			assert.Equal(t, test.hdr, hdr)
		})
	}
	assert.Panics(t, func() { new(NetHdr).Put(make([]byte, HdrSize-1)) })
	assert.Panics(t, func() { new(NetHdr).Parse(make([]byte, HdrSize-1)) })
}
