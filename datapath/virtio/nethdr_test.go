package virtio

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

const all = OffloadCSum | OffloadTSO4 | OffloadTSO6 | OffloadECN | OffloadUSO4 | OffloadUSO6

// TestFB148Check: no field of the header is trusted: not an offset beyond the
// frame, not an offload that was not agreed, not a type that does not exist.
func TestFB148Check(t *testing.T) {
	csum := NetHdr{Flags: FlagNeedsCSum, CSumStart: 34, CSumOffset: 16}
	gso := func(typ uint8) NetHdr {
		h := csum
		h.GSOType, h.GSOSize, h.HdrLen = typ, 1448, 54
		return h
	}
	with := func(h NetHdr, change func(*NetHdr)) NetHdr {
		change(&h)
		return h
	}
	for _, test := range []struct {
		name    string
		hdr     NetHdr
		n       int
		offered Offloads
		want    error
	}{
		{"nothing", NetHdr{}, 60, 0, nil},
		{"nothing, empty frame", NetHdr{}, 0, 0, nil},
		{"hints without meaning", NetHdr{HdrLen: 60000, GSOSize: 1, CSumStart: 60000, CSumOffset: 60000}, 60, 0, nil},
		{"data valid", NetHdr{Flags: FlagDataValid}, 60, 0, nil},
		{"flag of a later version", NetHdr{Flags: 4}, 60, 0, nil},

		{"checksum", csum, 1514, OffloadCSum, nil},
		{"checksum, not offered", csum, 1514, 0, ErrNotOffered},
		{"checksum at the very end", csum, 34 + 16 + 2, OffloadCSum, nil},
		{"checksum half outside", csum, 34 + 16 + 1, OffloadCSum, ErrBadHeader},
		{"checksum start outside", with(csum, func(h *NetHdr) { h.CSumStart = 1515 }), 1514, OffloadCSum, ErrBadHeader},
		{"checksum offset outside", with(csum, func(h *NetHdr) { h.CSumOffset = 1515 }), 1514, OffloadCSum, ErrBadHeader},
		{"offsets that overflow 16 bits", with(csum, func(h *NetHdr) { h.CSumStart, h.CSumOffset = 0xffff, 0xffff }), 65549, OffloadCSum, ErrBadHeader},
		{"offsets whose 16-bit sum is small", with(csum, func(h *NetHdr) { h.CSumStart, h.CSumOffset = 0xfff0, 0x20 }), 1514, OffloadCSum, ErrBadHeader},

		{"TSO4", gso(GSOTCPv4), 65549, OffloadCSum | OffloadTSO4, nil},
		{"TSO4, not offered", gso(GSOTCPv4), 65549, all &^ OffloadTSO4, ErrNotOffered},
		{"TSO4, checksum not offered", gso(GSOTCPv4), 65549, all &^ OffloadCSum, ErrNotOffered},
		{"TSO6", gso(GSOTCPv6), 65549, OffloadCSum | OffloadTSO6, nil},
		{"TSO6, not offered", gso(GSOTCPv6), 65549, all &^ OffloadTSO6, ErrNotOffered},
		{"TSO4 with ECN", gso(GSOTCPv4 | GSOECN), 65549, OffloadCSum | OffloadTSO4 | OffloadECN, nil},
		{"TSO6 with ECN", gso(GSOTCPv6 | GSOECN), 65549, all, nil},
		{"ECN, not offered", gso(GSOTCPv4 | GSOECN), 65549, all &^ OffloadECN, ErrNotOffered},
		{"USO", gso(GSOUDPL4), 65549, OffloadCSum | OffloadUSO4 | OffloadUSO6, nil},
		{"USO, one family offered", gso(GSOUDPL4), 65549, all &^ OffloadUSO6, ErrNotOffered},
		{"USO with ECN, which is TCP's", gso(GSOUDPL4 | GSOECN), 65549, all, ErrBadHeader},
		{"UFO, never offered", gso(GSOUDP), 65549, all, ErrBadHeader},
		{"ECN alone", gso(GSOECN), 65549, all, ErrBadHeader},
		{"no such type", gso(2), 65549, all, ErrBadHeader},
		{"type of a later version", gso(6), 65549, all, ErrBadHeader},

		{"TSO4 without partial checksum", with(gso(GSOTCPv4), func(h *NetHdr) { h.Flags = 0 }), 65549, all, ErrBadHeader},
		{"segments of nothing", with(gso(GSOTCPv4), func(h *NetHdr) { h.GSOSize = 0 }), 65549, all, ErrBadHeader},
		{"headers as long as the frame", with(gso(GSOTCPv4), func(h *NetHdr) { h.HdrLen = 1514 }), 1514, all, nil},
		{"headers longer than the frame", with(gso(GSOTCPv4), func(h *NetHdr) { h.HdrLen = 1515 }), 1514, all, ErrBadHeader},
		{"super-frame of one segment", gso(GSOTCPv4), 60, all, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := test.hdr
			assert.ErrorIs(t, test.hdr.Check(test.n, test.offered), test.want)
			assert.Equal(t, before, test.hdr)
		})
	}
}

func TestOffloads(t *testing.T) {
	for _, test := range []struct {
		set  Offloads
		want []string
	}{
		{0, []string{}},
		{OffloadCSum, []string{"csum"}},
		{OffloadECN | OffloadTSO6, []string{"tso6", "ecn"}},
		{all, []string{"csum", "tso4", "tso6", "ecn", "uso4", "uso6"}},
		{1 << 15, []string{}},
	} {
		assert.Equal(t, test.want, test.set.Names())
	}
	assert.True(t, all.Has(OffloadTSO4|OffloadUSO6))
	assert.True(t, Offloads(0).Has(0))
	assert.False(t, OffloadTSO4.Has(OffloadTSO4|OffloadCSum))
}
