package virtio

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzParsePut: any bytes of either form parse and are written back the same.
func FuzzParsePut(f *testing.F) {
	f.Add(make([]byte, HdrSize))
	f.Add([]byte{1, 0x81, 54, 0, 0xa8, 5, 34, 0, 16, 0, 1, 0})
	f.Add(bytes.Repeat([]byte{0xff}, HdrSizeMrgBuf))
	f.Fuzz(func(t *testing.T, b []byte) {
		size := HdrSize
		if len(b) >= HdrSizeMrgBuf {
			size = HdrSizeMrgBuf
		}
		if len(b) < size {
			return
		}
		b = b[:size]
		var h NetHdr
		h.Parse(b)
		got := make([]byte, size)
		h.Put(got)
		if !bytes.Equal(b, got) {
			t.Errorf("%x came back as %x", b, got)
		}
	})
}

// FuzzCheck: what Check lets pass stays inside the frame and inside what was
// offered, and offering more never refuses it.
func FuzzCheck(f *testing.F) {
	f.Add([]byte{1, 0x81, 54, 0, 0xa8, 5, 34, 0, 16, 0}, uint16(65535), uint16(all))
	f.Add([]byte{1, 4, 74, 0, 0x94, 5, 54, 0, 16, 0}, uint16(2000), uint16(all))
	f.Add([]byte{1, 5, 42, 0, 0x78, 5, 34, 0, 6, 0}, uint16(2000), uint16(all))
	f.Add([]byte{1, 0, 0, 0, 0, 0, 34, 0, 6, 0}, uint16(60), uint16(OffloadCSum))
	f.Add(bytes.Repeat([]byte{0xff}, HdrSize), uint16(1514), uint16(0))
	f.Fuzz(func(t *testing.T, b []byte, n, offered uint16) {
		if len(b) < HdrSize {
			return
		}
		var h NetHdr
		h.Parse(b[:HdrSize])
		err := h.Check(int(n), Offloads(offered))
		if err != nil {
			if !errors.Is(err, ErrBadHeader) && !errors.Is(err, ErrNotOffered) {
				t.Errorf("%+v: %v", h, err)
			}
			return
		}
		if more := h.Check(int(n), Offloads(offered)|all); more != nil {
			t.Errorf("%+v: %v when more is offered", h, more)
		}
		partial := h.Flags&FlagNeedsCSum != 0
		// What the next layer does: it reads and writes the checksum in place.
		if partial {
			frame := make([]byte, n)
			_ = frame[h.CSumStart:][h.CSumOffset : int(h.CSumOffset)+2]
		}
		var uses Offloads
		if partial {
			uses |= OffloadCSum
		}
		switch h.GSOType {
		case GSONone:
		case GSOTCPv4:
			uses |= OffloadTSO4
		case GSOTCPv4 | GSOECN:
			uses |= OffloadTSO4 | OffloadECN
		case GSOTCPv6:
			uses |= OffloadTSO6
		case GSOTCPv6 | GSOECN:
			uses |= OffloadTSO6 | OffloadECN
		case GSOUDPL4:
			uses |= OffloadUSO4 | OffloadUSO6
		default:
			t.Errorf("%+v: a type that does not exist passed", h)
		}
		if !Offloads(offered).Has(uses) {
			t.Errorf("%+v: uses %v, offered %v", h, uses.Names(), Offloads(offered).Names())
		}
		if h.GSOType != GSONone && (h.GSOSize == 0 || !partial || int(h.HdrLen) > int(n)) {
			t.Errorf("%+v: cannot be cut up, but passed", h)
		}
	})
}
