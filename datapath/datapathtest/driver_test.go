package datapathtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// These tests set the driver and the device side of package virtqueue against
// each other. Everything happens in this process's memory; package vhostuser
// does the same over a shared mapping.

// testMemory is two regions that touch, so that what lies across their border is
// contiguous for the guest and not for us, and a third one elsewhere.
func testMemory() *GuestMemory {
	const size = 1 << 20
	return NewGuestMemory(
		Region{GPA: 1 << 20, Bytes: make([]byte, size)},
		Region{GPA: 2 << 20, Bytes: make([]byte, size)},
		Region{GPA: 1 << 32, Bytes: make([]byte, 16*size)},
	)
}

// border is where testMemory's first two regions touch.
const border = 2 << 20

func mustQueue(tb testing.TB, d *Driver) *virtqueue.Queue {
	tb.Helper()
	q, err := virtqueue.New(d.mem, d.Vring(), d.features, d.usedIdx)
	require.NoError(tb, err)
	return q
}

var features = []virtqueue.Features{
	{}, {EventIdx: true}, {Indirect: true}, {EventIdx: true, Indirect: true},
}

func name(f virtqueue.Features) string {
	return fmt.Sprintf("event=%t,indirect=%t", f.EventIdx, f.Indirect)
}

// TestDriverProperty: whatever a polite driver does in whatever order, each chain
// comes out as it went in, once, in order, and comes back as it was returned.
// The indexes wrap, the chains cross regions, the ring runs full and empty.
func TestDriverProperty(t *testing.T) {
	for _, f := range features {
		for _, num := range []uint16{1, 2, 16, 256} {
			for _, skew := range []int{0, 2} {
				t.Run(fmt.Sprintf("%s/num=%d/skew=%d", name(f), num, skew), func(t *testing.T) {
					t.Parallel()
					for seed := range uint64(2) {
						property(t, rand.New(rand.NewPCG(seed, uint64(num))), f, num, skew)
					}
				})
			}
		}
	}
}

// An offer is a chain as the test knows it.
type offer struct {
	head               uint16
	readable, writable []Span
}

func length(spans []Span) (n int) {
	for _, s := range spans {
		n += int(s.Len)
	}
	return n
}

// collect returns the bytes of spans as the guest sees them.
func collect(mem *GuestMemory, spans []Span) []byte {
	var b []byte
	for _, s := range spans {
		if s.GPA < border && s.GPA+uint64(s.Len) > border {
			k := int(border - s.GPA)
			b = append(b, mem.Bytes(s.GPA, k)...)
			b = append(b, mem.Bytes(border, int(s.Len)-k)...)
		} else if s.Len > 0 {
			b = append(b, mem.Bytes(s.GPA, int(s.Len))...)
		}
	}
	return b
}

// randomSpans returns up to n spans: across the border, and in a place of their
// own elsewhere. Chains overlap at the border, as pending ones should not: what
// they hold is compared at once, before the next one is written.
func randomSpans(rng *rand.Rand, n int) (spans []Span) {
	for i := range rng.IntN(n + 1) {
		if i == 0 && rng.IntN(2) == 0 {
			spans = append(spans, Span{border - uint64(rng.IntN(40)), uint32(rng.IntN(60))})
		} else {
			spans = append(spans, Span{1<<32 + 8<<20 + uint64(i)<<12 + uint64(rng.IntN(2000)), uint32(rng.IntN(2000))})
		}
	}
	return spans
}

func property(t *testing.T, rng *rand.Rand, f virtqueue.Features, num uint16, skew int) {
	mem := testMemory()
	base := uint16(65536 - rng.IntN(600))
	d := newDriver(mem, num, f, base, skew)
	q := mustQueue(t, d)

	var (
		added    []offer            // by the driver, not published
		offered  []offer            // published, not popped
		taken    []offer            // popped, not pushed
		pushed   []offer            // not flushed
		flushed  []offer            // not taken back by the driver
		written  = map[uint16]int{} // by head, bytes
		chains   []*virtqueue.Chain // those of taken
		finished int
	)
	for range 2000 {
		switch rng.IntN(7) {
		case 0, 1: // the driver adds a chain
			d.Layout = Direct
			if f.Indirect {
				d.Layout = Layout(rng.IntN(3))
			}
			o := offer{readable: randomSpans(rng, 3), writable: randomSpans(rng, 3)}
			if length(o.readable)+length(o.writable) == 0 {
				continue
			}
			var err error
			if o.head, err = d.Add(o.readable, o.writable); err == nil {
				added = append(added, o)
			} else {
				require.ErrorIs(t, err, ErrFull)
			}
		case 2: // the driver publishes
			d.Publish()
			offered, added = append(offered, added...), nil
		case 3, 4: // the device pops, and may give back
			n := 0
			for rng.IntN(4) > 0 {
				c := new(virtqueue.Chain)
				ok, err := q.Pop(c)
				require.NoError(t, err)
				require.Equal(t, len(offered) > 0, ok)
				if !ok {
					break
				}
				o := offered[0]
				require.Equal(t, o.head, c.Head, "chains come in order")
				want := collect(mem, o.readable)
				got := make([]byte, len(want)+7)
				require.Equal(t, len(want), c.ReadableLen)
				require.Equal(t, length(o.writable), c.WritableLen)
				require.Equal(t, len(want), c.CopyOut([][]byte{got[:5], nil, got[5:]}, 0))
				require.True(t, bytes.Equal(want, got[:len(want)]))
				offered, taken, chains = offered[1:], append(taken, o), append(chains, c)
				n++
			}
			if n > 0 && rng.IntN(3) == 0 {
				keep := len(taken) - 1 - rng.IntN(n)
				q.Unpop(len(taken) - keep)
				offered = append(append([]offer(nil), taken[keep:]...), offered...)
				taken, chains = taken[:keep:keep], chains[:keep:keep]
			}
			require.Equal(t, len(offered), q.Avail())
		case 5: // the device pushes some, in any order, and may flush
			for len(taken) > 0 && rng.IntN(5) > 0 {
				i := rng.IntN(len(taken))
				o, c := taken[i], chains[i]
				taken, chains = slices.Delete(taken, i, i+1), slices.Delete(chains, i, i+1)
				data := make([]byte, rng.IntN(c.WritableLen+1))
				for j := range data {
					data[j] = byte(rng.Uint32())
				}
				cut := rng.IntN(len(data) + 1)
				require.Equal(t, cut, c.CopyIn([][]byte{data[:cut]}, 0, 0))
				require.Equal(t, len(data)-cut, c.CopyIn([][]byte{nil, data}, cut, cut))
				require.True(t, bytes.Equal(data, collect(mem, o.writable)[:len(data)]))
				q.Push(o.head, uint32(len(data)))
				written[o.head] = len(data)
				pushed = append(pushed, o)
			}
			if rng.IntN(2) == 0 {
				q.Flush()
				flushed, pushed = append(flushed, pushed...), nil
			}
		case 6: // the driver takes back
			for _, o := range flushed {
				head, n, ok, err := d.TakeUsed()
				require.NoError(t, err)
				require.True(t, ok)
				require.Equal(t, o.head, head)
				require.Equal(t, written[head], int(n))
				finished++
			}
			flushed = nil
			_, _, ok, err := d.TakeUsed()
			require.NoError(t, err)
			require.False(t, ok, "what was not flushed is not seen")
			require.Equal(t, len(added)+len(offered)+len(taken)+len(pushed), d.Pending())
		}
	}
	require.Equal(t, base+uint16(finished+len(flushed)+len(pushed)+len(taken)), q.Next())
	require.Greater(t, finished, 20)
}

// An echo is a device that gives every frame of a transmit queue to a receive
// queue, for tests of the driver's network queues.
func echo(t *testing.T, tx, rx *virtqueue.Queue, hdrSize int, mergeable bool) (dropped int) {
	var in virtqueue.Chain
	var out [64]virtqueue.Chain
	for {
		ok, err := tx.Pop(&in)
		require.NoError(t, err)
		if !ok {
			return dropped
		}
		b := make([]byte, in.ReadableLen)
		in.CopyOut([][]byte{b}, 0)
		n, off := 0, 0
		for room := 0; room < len(b) && n < len(out) && (mergeable || n == 0); n++ {
			ok, err := rx.Pop(&out[n])
			require.NoError(t, err)
			if !ok {
				break
			}
			room += out[n].WritableLen
		}
		for i := range n {
			off += out[i].CopyIn([][]byte{b}, off, 0)
		}
		if off < len(b) {
			rx.Unpop(n)
			dropped++
		} else {
			if hdrSize == virtio.HdrSizeMrgBuf {
				out[0].CopyIn([][]byte{{byte(n), byte(n >> 8)}}, 0, 10)
			}
			for i, off := 0, 0; i < n; i++ {
				k := min(len(b)-off, out[i].WritableLen)
				rx.Push(out[i].Head, uint32(k))
				off += k
			}
		}
		tx.Push(in.Head, 0)
		rx.Flush()
		tx.Flush()
	}
}

// TestFB128_DriverFrames: frames of every size pass from the transmit to the
// receive queue whole, in buffers of every kind, and one that does not fit leaves
// the queue as it was.
func TestFB128_DriverFrames(t *testing.T) {
	for _, test := range []struct {
		name          string
		hdrSize       int
		txSeg         int
		rxBufs, rxBuf int
		rxSeg         int
		mergeable     bool
		layout        Layout
	}{
		{"legacy", virtio.HdrSize, 0, 8, 1524, 0, false, Direct},
		{"modern", virtio.HdrSizeMrgBuf, 0, 8, 1526, 0, false, Direct},
		{"big", virtio.HdrSizeMrgBuf, 4096, 4, 65562, 4096, false, Indirect},
		{"mergeable", virtio.HdrSizeMrgBuf, 4096, 40, 1536, 0, true, Direct},
		{"mergeable-crumbs", virtio.HdrSizeMrgBuf, 4096, 128, 64, 0, true, Mixed},
	} {
		t.Run(test.name, func(t *testing.T) {
			mem := testMemory()
			f := virtqueue.Features{EventIdx: true, Indirect: true}
			td, rd := NewDriver(mem, 256, f, 65500), NewDriver(mem, 128, f, 65500)
			td.Layout, rd.Layout = test.layout, test.layout
			tx := NewTxQueue(td, 2, 66000, test.hdrSize, test.txSeg)
			rx := NewRxQueue(rd, test.rxBufs, test.rxBuf, test.hdrSize, test.rxSeg, test.mergeable)
			tq, rq := mustQueue(t, td), mustQueue(t, rd)
			room := test.rxBuf
			if test.mergeable {
				room = min(64, test.rxBufs) * test.rxBuf // echo holds 64
			}
			for i := range 300 {
				n := []int{minFrame, 60, 1514, 9000, 65535, room - test.hdrSize, room - test.hdrSize + 1}[i%7]
				frame := makeFrame(0, uint32(i), n)
				rx.Post(1000)
				require.Zero(t, rx.Idle())
				h := virtio.NetHdr{GSOType: virtio.GSOTCPv4, GSOSize: uint16(i), HdrLen: 54}
				require.NoError(t, tx.Add(h, frame))
				tx.Publish()
				dropped := echo(t, tq, rq, test.hdrSize, test.mergeable)
				got, b, ok, err := rx.Take()
				require.NoError(t, err)
				if n+test.hdrSize > room {
					require.Equal(t, 1, dropped)
					require.False(t, ok)
					require.Zero(t, rx.Idle(), "what was looked at is still the device's")
					continue
				}
				require.True(t, ok, "%d bytes", n)
				require.True(t, bytes.Equal(frame, b))
				got.NumBuffers = 0
				require.Equal(t, h, got)
			}
			require.NoError(t, tx.Reclaim())
			require.Zero(t, tx.Pending())
			require.Len(t, tx.bufs, 2)
		})
	}
}

// TestFB146_Attacks: each attack is found for what it is. A bad chain comes back
// with nothing written and the queue goes on; a bad ring stays stopped.
func TestFB146_Attacks(t *testing.T) {
	for _, f := range features {
		for _, a := range Attacks(f) {
			t.Run(name(f)+"/"+a.Name, func(t *testing.T) {
				d := NewDriver(testMemory(), 8, f, 65530)
				q := mustQueue(t, d)
				var c virtqueue.Chain
				for range 20 { // more than the ring holds: nothing is lost on the way
					a.Run(d)
					ok, err := q.Pop(&c)
					if a.Want == virtqueue.ErrCorrupt {
						assert.False(t, ok)
						require.ErrorIs(t, err, virtqueue.ErrCorrupt)
						_, again := q.Pop(&c)
						assert.Equal(t, err, again)
						return
					}
					require.True(t, ok)
					if a.Want == nil {
						require.NoError(t, err)
					} else {
						require.ErrorIs(t, err, a.Want)
						assert.Empty(t, c.Readable)
						assert.Empty(t, c.Writable)
						assert.Zero(t, c.ReadableLen+c.WritableLen)
					}
					q.Push(c.Head, 0)
					q.Flush()
					_, n, ok, err := d.TakeUsed()
					require.NoError(t, err)
					require.True(t, ok)
					assert.Zero(t, n)
				}
				// A good chain after all that.
				gpa := d.scratch(64)
				_, err := d.Add([]Span{{gpa, 64}}, nil)
				require.NoError(t, err)
				d.Publish()
				ok, err := q.Pop(&c)
				require.NoError(t, err)
				require.True(t, ok)
				assert.Equal(t, 64, c.ReadableLen)
			})
		}
	}
}

// TestScribble: a driver that rewrites what it has handed over, while the device
// walks it, gets chains or errors and never a byte outside of its memory.
func TestScribble(t *testing.T) {
	f := virtqueue.Features{EventIdx: true, Indirect: true}
	mem := testMemory()
	d := NewDriver(mem, 256, f, 0)
	q := mustQueue(t, d)
	inside := func(b []byte) bool {
		for _, r := range mem.regions {
			if within(b, r.Bytes) {
				return true
			}
		}
		return false
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		rng := rand.New(rand.NewPCG(1, 2))
		for {
			select {
			case <-stop:
				return
			default:
				d.Scribble(rng, 16)
			}
		}
	}()
	defer func() { close(stop); <-done }()
	var c virtqueue.Chain
	outcomes := map[string]int{}
	// A machine with no core to spare lets the driver write only now and then.
	deadline := time.Now().Add(time.Minute)
	for i := 0; i < 20000 || len(outcomes) <= 3 && time.Now().Before(deadline); i++ {
		storeAvail(d.avail, 0, uint16(i+1))
		ok, err := q.Pop(&c)
		if errors.Is(err, virtqueue.ErrCorrupt) {
			outcomes["corrupt"]++
			var errNew error
			q, errNew = virtqueue.New(mem, d.Vring(), f, uint16(i+1))
			require.NoError(t, errNew)
			continue
		}
		require.True(t, ok)
		outcomes[fmt.Sprint(err)]++
		total := 0
		for _, b := range append(c.Readable[:len(c.Readable):len(c.Readable)], c.Writable...) {
			require.NotEmpty(t, b)
			require.True(t, inside(b))
			total += len(b)
		}
		require.Equal(t, c.ReadableLen+c.WritableLen, total)
		q.Push(c.Head, 0)
		q.Flush()
	}
	t.Log(outcomes)
	assert.Greater(t, len(outcomes), 3, "the driver was hostile enough to be seen")
}

// TestMove: what was pending is found in the ring's new place, by a device that
// was told; one that goes on in the old place finds it corrupt.
func TestMove(t *testing.T) {
	for _, f := range features {
		t.Run(name(f), func(t *testing.T) {
			d := newDriver(testMemory(), 16, f, 65530, 2)
			q := mustQueue(t, d)
			gpa := d.mem.Alloc(64, 1)
			for range 10 {
				_, err := d.Add([]Span{{gpa, 64}}, nil)
				require.NoError(t, err)
			}
			d.Publish()
			var c virtqueue.Chain
			for range 4 {
				ok, err := q.Pop(&c)
				require.NoError(t, err)
				require.True(t, ok)
				q.Push(c.Head, 0)
			}
			q.Flush()
			before := d.Vring()
			d.Move()
			assert.NotSame(t, &before.Used[0], &d.Vring().Used[0])

			moved, err := virtqueue.New(d.mem, d.Vring(), f, q.Next())
			require.NoError(t, err)
			for range 6 {
				ok, err := moved.Pop(&c)
				require.NoError(t, err)
				require.True(t, ok)
				require.Equal(t, 64, c.ReadableLen)
				moved.Push(c.Head, 0)
			}
			moved.Flush()
			for range 10 {
				_, _, ok, err := d.TakeUsed()
				require.NoError(t, err)
				require.True(t, ok)
			}
			assert.Zero(t, d.Pending())
			assert.EqualValues(t, 16, d.Free())

			var errOld error
			for ok := true; ok; { // it may still know of chains, all of them bad
				ok, errOld = q.Pop(&c)
				require.Error(t, errOld)
			}
			assert.ErrorIs(t, errOld, virtqueue.ErrCorrupt)
		})
	}
}

// TestDriverKicks: the driver kicks when it is asked to, and only then; and, when
// told to misbehave, as often as it is told, or never.
func TestDriverKicks(t *testing.T) {
	for _, f := range features {
		t.Run(name(f), func(t *testing.T) {
			d := NewDriver(testMemory(), 16, f, 65534)
			q := mustQueue(t, d)
			kicks := 0
			d.Kick = func() { kicks++ }
			gpa := d.mem.Alloc(64, 1)
			add := func(n int) bool {
				for range n {
					_, err := d.Add([]Span{{gpa, 64}}, nil)
					require.NoError(t, err)
				}
				return d.Publish()
			}
			var c virtqueue.Chain
			drain := func() {
				for {
					ok, err := q.Pop(&c)
					require.NoError(t, err)
					if !ok {
						break
					}
					q.Push(c.Head, 0)
				}
				q.Flush()
				for {
					_, _, ok, err := d.TakeUsed()
					require.NoError(t, err)
					if !ok {
						break
					}
				}
			}
			for range 5 {
				require.False(t, q.EnableKicks())
				assert.False(t, d.Publish(), "nothing to tell")
				assert.True(t, add(3))
				q.DisableKicks()
				assert.False(t, add(2))
				drain()
			}
			assert.Equal(t, 5, kicks)

			d.KickStorm(1000)
			assert.Equal(t, 1005, kicks)
			require.False(t, q.EnableKicks(), "a kick is no chain")

			d.Kick = nil
			assert.False(t, add(1))
			assert.True(t, q.EnableKicks(), "it is there, all the same")
			drain()

			// And the other way round.
			d.DisableCalls()
			add(2)
			ok, err := q.Pop(&c)
			require.NoError(t, err)
			require.True(t, ok)
			q.Push(c.Head, 0)
			assert.False(t, q.Flush())
			assert.True(t, d.EnableCalls(), "there is one")
			drain()
			assert.False(t, d.EnableCalls())
			add(1)
			_, _ = q.Pop(&c)
			q.Push(c.Head, 0)
			assert.True(t, q.Flush())
		})
	}
}

// TestDriverNotices: what a device must not do, the driver reports.
func TestDriverNotices(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(q *virtqueue.Queue, head uint16)
		want string
	}{
		{"not a head", func(q *virtqueue.Queue, head uint16) { q.Push(head^1, 0) }, "is not a head"},
		{"no descriptor", func(q *virtqueue.Queue, _ uint16) { q.Push(0xffff, 0) }, "is not a head"},
		{"twice", func(q *virtqueue.Queue, head uint16) { q.Push(head, 0); q.Push(head, 0) }, "is 2 ahead"},
		{"too many bytes", func(q *virtqueue.Queue, head uint16) { q.Push(head, 9) }, "9 bytes written to a chain of 8"},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := NewDriver(testMemory(), 16, virtqueue.Features{}, 0)
			q := mustQueue(t, d)
			gpa := d.mem.Alloc(8, 1)
			head, err := d.Add(nil, []Span{{gpa, 8}})
			require.NoError(t, err)
			d.Publish()
			test.do(q, head)
			q.Flush()
			_, _, ok, err := d.TakeUsed()
			assert.False(t, ok)
			assert.ErrorContains(t, err, test.want)
		})
	}
}

// TestFB125_Stress: driver and device in two goroutines, both asleep whenever
// they find nothing, woken only by the kicks and calls that the rules ask for.
// One lost wake-up and both sleep for ever. Each chain carries its number, which
// the device copies back, so that the race detector watches the order of data
// and indexes too; it does not watch the event indexes, which race by design.
func TestFB125_Stress(t *testing.T) {
	for _, f := range features {
		for _, num := range []uint16{2, 64} {
			for _, skew := range []int{0, 2} {
				t.Run(fmt.Sprintf("%s/num=%d/skew=%d", name(f), num, skew), func(t *testing.T) {
					total := 5000 * uint32(bits.Len16(num)) // the larger, the fewer sleeps each
					if testing.Short() {
						total /= 10
					}
					stress(t, f, num, skew, total)
				})
			}
		}
	}
}

// An event is what an eventfd is: a wake-up that stays until it is taken.
type event chan struct{}

func (e event) signal() {
	select {
	case e <- struct{}{}:
	default:
	}
}

func (e event) wait(what string, stop <-chan struct{}) error {
	timeout := time.NewTimer(20 * time.Second)
	defer timeout.Stop()
	select {
	case <-e:
		return nil
	case <-stop:
		return errors.New("stopped")
	case <-timeout.C:
		return fmt.Errorf("%s was not woken", what)
	}
}

func stress(t *testing.T, f virtqueue.Features, num uint16, skew int, total uint32) {
	d := newDriver(testMemory(), num, f, 65000, skew)
	q := mustQueue(t, d)
	kick, call, stop := make(event, 1), make(event, 1), make(chan struct{})
	kicks := 0
	d.Kick = func() { kicks++; kick.signal() }

	device := make(chan error, 1)
	var sleeps, calls int
	go func() {
		var c virtqueue.Chain
		var b [4]byte
		bufs := [][]byte{b[:]}
		for done := uint32(0); done < total; {
			q.DisableKicks()
			for {
				ok, err := q.Pop(&c)
				if err != nil {
					device <- err
					return
				}
				if !ok {
					break
				}
				if c.CopyOut(bufs, 0) != 4 || c.CopyIn(bufs, 0, 0) != 4 {
					device <- errors.New("chain is too short")
					return
				}
				q.Push(c.Head, 4)
				done++
				if done%3 != 0 { // batches of every length
					if q.Flush() {
						calls++
						call.signal()
					}
				}
			}
			if q.Flush() {
				calls++
				call.signal()
			}
			if q.EnableKicks() {
				continue
			}
			if done == total {
				break
			}
			sleeps++
			if err := kick.wait("device", stop); err != nil {
				device <- err
				return
			}
		}
		device <- nil
	}()
	type slot struct{ r, w uint64 } // what the device reads and writes
	var slots []slot
	for range num {
		slots = append(slots, slot{d.mem.Alloc(4, 4), d.mem.Alloc(4, 4)})
	}
	pending, number := map[uint16]slot{}, map[uint16]uint32{}
	if f.Indirect {
		d.Layout = Indirect
	}
	next, back, driverSleeps := uint32(0), uint32(0), 0
	drive := func() error {
		for {
			for next < total && len(slots) > 0 {
				s := slots[len(slots)-1]
				binary.LittleEndian.PutUint32(d.mem.Bytes(s.r, 4), next)
				head, err := d.Add([]Span{{s.r, 4}}, []Span{{s.w, 4}})
				if errors.Is(err, ErrFull) {
					break
				}
				slots = slots[:len(slots)-1]
				pending[head], number[head] = s, next
				if next++; next%5 == 0 {
					d.Publish()
				}
			}
			d.Publish()
			d.DisableCalls()
			before := back
			for {
				head, n, ok, err := d.TakeUsed()
				if err != nil {
					return err
				}
				if !ok {
					break
				}
				s := pending[head]
				if got := binary.LittleEndian.Uint32(d.mem.Bytes(s.w, 4)); n != 4 || got != number[head] {
					return fmt.Errorf("chain %d came back with %d, %d bytes", number[head], got, n)
				}
				slots = append(slots, s)
				back++
			}
			if back == total {
				return nil
			}
			if back != before || d.EnableCalls() {
				continue
			}
			driverSleeps++
			if err := call.wait("driver", nil); err != nil {
				return err
			}
		}
	}
	assert.NoError(t, drive())
	close(stop)
	assert.NoError(t, <-device)
	t.Logf("%d chains, %d kicks, %d calls, device slept %d times, driver %d", total, kicks, calls, sleeps, driverSleeps)
}
