package vhostuser

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// What a frame costs us each way, beside a guest that costs nothing: it offers
// the same chains again as soon as they are used. No kick, no call, no wake-up.

func benchOpen(b *testing.B) (datapath.Attachment, *vmm) {
	b.Helper()
	l, err := Listen(filepath.Join(b.TempDir(), "s"), Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = l.Close() })
	v, err := dial(l.path, plain())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(v.close)
	if err := v.do(v.steps()...); err != nil {
		b.Fatal(err)
	}
	a, err := l.Accept(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = a.Close() })
	return a, v
}

func BenchmarkToGuest(b *testing.B) {
	for _, size := range []int{64, 1514, 65160} {
		for _, batch := range []int{1, 32} {
			if size*batch > 256*1588 { // more than the ring holds
				batch = 4
			}
			b.Run(fmt.Sprintf("size=%d/batch=%d", size, batch), func(b *testing.B) {
				a, v := benchOpen(b)
				rx, qp := v.rx[0], a.QueuePairs()[0]
				rx.Kick = nil
				frames := make([]datapath.Frame, batch)
				for i := range frames {
					frames[i] = datapath.Frame{Segs: [][]byte{make([]byte, min(size, 54)), make([]byte, size-min(size, 54))}, N: size}
				}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for n := 0; n < b.N; n += batch {
					if k, err := qp.WriteBatch(frames); k != batch || err != nil {
						b.Fatal(k, err)
					}
					rx.SetAvailIndex(rx.Vring().UsedIndex() + rx.Num())
				}
			})
		}
	}
}

func BenchmarkFromGuest(b *testing.B) {
	for _, size := range []int{64, 1514, 65160} {
		for _, batch := range []int{1, 32} {
			if batch*(size/1500+2) > 256 { // more than the ring's descriptors
				batch = 4
			}
			b.Run(fmt.Sprintf("size=%d/batch=%d", size, batch), func(b *testing.B) {
				a, v := benchOpen(b)
				tx, qp := v.tx[0], a.QueuePairs()[0]
				tx.Kick = nil
				for range batch {
					if err := tx.Add(virtio.NetHdr{}, make([]byte, size)); err != nil {
						b.Fatal(err)
					}
				}
				heads := tx.Vring().Avail[4:]
				for i := range tx.Num() { // every entry offers one of them
					tx.SetAvail(i, binary.LittleEndian.Uint16(heads[2*(i%uint16(batch)):]))
				}
				memory := [][]byte{make([]byte, 128), make([]byte, size)}
				frames := make([]datapath.Frame, batch)
				get := func(int) [][]byte { return memory }
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for n := 0; n < b.N; n += batch {
					tx.SetAvailIndex(tx.Vring().UsedIndex() + uint16(batch))
					if k, err := qp.ReadBatch(frames, get); k != batch || err != nil {
						b.Fatal(k, err)
					}
				}
			})
		}
	}
}
