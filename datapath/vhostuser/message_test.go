package vhostuser

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// littleEndian skips a test of exact bytes where numbers lie the other way round.
func littleEndian(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("needs a little-endian machine: the protocol's numbers are in native order")
	}
}

// TestLayout pins the bytes of each structure (QEMU, docs/interop/vhost-user).
func TestLayout(t *testing.T) {
	littleEndian(t)
	h, err := parseHeader(&[headerSize]byte{12, 0, 0, 0, 0b1001, 0, 0, 0, 8, 0, 0, 0})
	require.NoError(t, err)
	assert.Equal(t, header{reqSetVringKick, version | flagNeedReply, 8}, h)

	assert.Equal(t, []byte{1, 0, 0, 0, 0b101, 0, 0, 0, 8, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0},
		appendReply(nil, reqGetFeatures, u64Payload(0x102)))

	assert.Equal(t, vringState{1, 0x0302}, parseVringState([]byte{1, 0, 0, 0, 2, 3, 0, 0}))
	assert.Equal(t, []byte{1, 0, 0, 0, 2, 3, 0, 0}, vringState{1, 0x0302}.payload())

	b := make([]byte, vringAddrSize)
	for i := range 4 {
		b[8+8*i] = byte(0xa0 + i)
	}
	b[0], b[4] = 3, 1 // flags, which are not looked at
	index, addr := parseVringAddr(b)
	assert.EqualValues(t, 3, index)
	assert.Equal(t, vringAddr{desc: 0xa0, used: 0xa1, avail: 0xa2}, addr)

	table := make([]byte, 8+2*regionSize)
	table[0] = 2
	for i := range 8 {
		table[8+8*i] = byte(i + 1)
	}
	regions, err := parseRegions(table)
	require.NoError(t, err)
	assert.Equal(t, []region{{gpa: 1, size: 2, user: 3, offset: 4}, {gpa: 5, size: 6, user: 7, offset: 8}}, regions)
	whole := append(table, make([]byte, maxPayload-len(table))...)
	regions, err = parseRegions(whole)
	require.NoError(t, err, "a table padded to the whole structure")
	assert.Len(t, regions, 2)
	assert.Equal(t, 264, maxPayload)
}

func TestHeaderRefused(t *testing.T) {
	put := func(r request, flags, size uint32) *[headerSize]byte {
		var b [headerSize]byte
		binary.NativeEndian.PutUint32(b[0:], uint32(r))
		binary.NativeEndian.PutUint32(b[4:], flags)
		binary.NativeEndian.PutUint32(b[8:], size)
		return &b
	}
	for _, flags := range []uint32{0, 2, 3, flagReply | version} {
		_, err := parseHeader(put(reqSetOwner, flags, 0))
		assert.ErrorIs(t, err, errVersion, "flags %#x", flags)
	}
	for _, size := range []uint32{maxPayload + 1, 1 << 31, 1<<32 - 1} {
		_, err := parseHeader(put(reqSetMemTable, version, size))
		assert.ErrorIs(t, err, errTooLong, "%d bytes", size)
		assert.ErrorContains(t, err, "SET_MEM_TABLE")
	}
	_, err := parseHeader(put(reqSetMemTable, version, maxPayload))
	assert.NoError(t, err)
	_, err = parseHeader(put(99, version, 1000))
	assert.ErrorContains(t, err, "request 99")
}

func TestRegionsRefused(t *testing.T) {
	put := func(n uint32, bytes int) []byte {
		b := make([]byte, bytes)
		binary.NativeEndian.PutUint32(b, n)
		return b
	}
	for _, b := range [][]byte{nil, make([]byte, 7), put(1, 8), put(2, 8+2*regionSize-1), put(8, maxPayload-1)} {
		_, err := parseRegions(b)
		assert.ErrorIs(t, err, errSize, "%d bytes", len(b))
	}
	for _, n := range []uint32{9, 1 << 27, 1<<32 - 1} { // 2^27 regions of 32 bytes are 2^32 bytes
		_, err := parseRegions(put(n, maxPayload))
		assert.ErrorContains(t, err, "the limit is 8")
	}
}

func TestRequestNames(t *testing.T) {
	assert.Equal(t, "SET_VRING_KICK", reqSetVringKick.String())
	assert.Equal(t, "request 6", request(6).String(), "SET_LOG_BASE, which we do not serve")
}

// TestOffloads: a bit that needs another means nothing without it, and the two
// directions are not confused.
func TestOffloads(t *testing.T) {
	for _, test := range []struct {
		features  uint64
		to, from  []string
		headerLen int
	}{
		{0, []string{}, []string{}, 10},
		{featureMrgRxBuf, []string{}, []string{}, 12},
		{featureVersion1, []string{}, []string{}, 12},
		{featureGuestCSum, []string{"csum"}, []string{}, 10},
		{featureCSum, []string{}, []string{"csum"}, 10},
		{featureGuestTSO4 | featureHostTSO6, []string{}, []string{}, 10},
		{featureCSum | featureHostECN, []string{}, []string{"csum"}, 10},
		{featureCSum | featureHostTSO6 | featureHostECN, []string{}, []string{"csum", "tso6", "ecn"}, 10},
		{featureGuestCSum | featureGuestTSO4 | featureGuestECN, []string{"csum", "tso4", "ecn"}, []string{}, 10},
		{baseFeatures, []string{"csum", "tso4", "tso6", "ecn"}, []string{"csum", "tso4", "tso6", "ecn"}, 12},
	} {
		assert.Equal(t, test.to, toGuest(test.features).Names(), "%#x", test.features)
		assert.Equal(t, test.from, fromGuest(test.features).Names(), "%#x", test.features)
		assert.Equal(t, test.headerLen, headerForm(test.features), "%#x", test.features)
	}
}

// FuzzMessage: any bytes are a header within bounds or an error, and so are the
// payloads.
func FuzzMessage(f *testing.F) {
	f.Add([]byte{5, 0, 0, 0, 1, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3})
	f.Add(bytes.Repeat([]byte{0xff}, headerSize+maxPayload))
	f.Add(append([]byte{5, 0, 0, 0, 9, 0, 0, 0, 8, 1, 0, 0, 8}, make([]byte, maxPayload)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headerSize {
			return
		}
		h, err := parseHeader((*[headerSize]byte)(b))
		if err != nil {
			assert.Zero(t, h)
		} else {
			assert.LessOrEqual(t, h.size, uint32(maxPayload))
			assert.NotEmpty(t, h.request.String())
		}
		payload := b[headerSize:]
		payload = payload[:min(len(payload), maxPayload)]
		regions, err := parseRegions(payload)
		if err != nil {
			assert.Nil(t, regions)
		} else {
			assert.LessOrEqual(t, len(regions), maxTableRegions)
			assert.LessOrEqual(t, 8+len(regions)*regionSize, len(payload))
		}
	})
}
