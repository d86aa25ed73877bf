package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/datapath/virtqueue"
	"github.com/culvertnet/culvert/stack/netstack"
	"golang.org/x/sys/unix"
)

// A process of this binary plays a VMM and its guest, to be killed like one:
//
//	daemon ══ vhost-user ══ frontend ── a second stack ── echo on port 7
//	                        └──────── one process ────────────┘

// frontendSocket names the environment variable that makes the binary a front-end
// of the socket it holds.
const frontendSocket = "CULVERT_TEST_FRONTEND"

func TestMain(m *testing.M) {
	if path := os.Getenv(frontendSocket); path != "" {
		fmt.Fprintln(os.Stderr, "front-end:", playFrontend(path))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// playFrontend serves until the process is killed, or its standard input ends
// with whoever started it.
func playFrontend(path string) error {
	f, err := dialFrontend(path)
	if err != nil {
		return err
	}
	guest, err := netstack.New(f, netstack.Options{
		Node: netip.MustParseAddr("10.0.2.1"), Gateway: netip.MustParsePrefix("10.0.2.2/24"), MTU: 1500, Seed: "front-end",
	})
	if err != nil {
		return err
	}
	l, err := guest.ListenTCP(7)
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	fmt.Println("listening") // the VM may have been ready before
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, io.EOF)
}

// A frontend is one end of a vhost-user connection, and its guest's driver: to the
// guest's stack, an attachment.
type frontend struct {
	conn  *net.UnixConn
	memfd int
	rx    *datapathtest.RxQueue
	lines [2]line // RX and TX
	pairs []datapath.QueuePair
	stats datapath.Stats
	room  chan struct{}
	once  sync.Once

	mu sync.Mutex
	tx *datapathtest.TxQueue
}

// A line is a ring's kick, which we write, and call, which we read.
type line struct {
	kick, call     *os.File
	kickFD, callFD int // theirs: File.Fd would make them block
}

const (
	ringSize = 256
	// Requests of the protocol (QEMU, docs/interop/vhost-user).
	getFeatures  = 1
	setFeatures  = 2
	setOwner     = 3
	setMemTable  = 5
	setVringNum  = 8
	setVringAddr = 9
	setVringBase = 10
	setVringKick = 12
	setVringCall = 13

	// VERSION_1, EVENT_IDX, INDIRECT_DESC, MRG_RXBUF, and CSUM and TSO4 both ways
	// (virtio 1.3, 5.1.3 and 6). Without PROTOCOL_FEATURES rings run once kicked.
	frontendFeatures = 1<<32 | 1<<29 | 1<<28 | 1<<15 | 1<<11 | 1<<7 | 1<<1 | 1<<0
	// Where the front-end says it has the guest's memory mapped.
	frontendBase = 0x7f00_0000_0000
)

func dialFrontend(path string) (*frontend, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path})
	if err != nil {
		return nil, err
	}
	const size = 16 << 20
	memfd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err := unix.Ftruncate(memfd, size); err != nil {
		return nil, err
	}
	memory, err := unix.Mmap(memfd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	f := &frontend{conn: conn, memfd: memfd, room: make(chan struct{}, 1)}
	f.pairs = []datapath.QueuePair{f}
	for i := range f.lines {
		if f.lines[i], err = newLine(); err != nil {
			return nil, err
		}
	}
	mem := datapathtest.NewGuestMemory(datapathtest.Region{Bytes: memory})
	driver := func(i int) *datapathtest.Driver {
		d := datapathtest.NewDriver(mem, ringSize, virtqueue.Features{EventIdx: true, Indirect: true}, 0)
		d.Kick = func() { _, _ = f.lines[i].kick.Write(u64s(1)) }
		return d
	}
	f.rx = datapathtest.NewRxQueue(driver(0), ringSize, 2048, virtio.HdrSizeMrgBuf, 0, true)
	f.tx = datapathtest.NewTxQueue(driver(1), 64, datapath.MaxFrame, virtio.HdrSizeMrgBuf, 4096)
	f.tx.Layout = datapathtest.Indirect
	f.rx.Post(ringSize)
	if err := f.negotiate(memfd, size); err != nil {
		return nil, err
	}
	go f.watchRoom()
	return f, nil
}

func newLine() (l line, err error) {
	if l.kickFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return l, err
	}
	if l.callFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return l, err
	}
	l.kick, l.call = os.NewFile(uintptr(l.kickFD), "kick"), os.NewFile(uintptr(l.callFD), "call")
	return l, nil
}

func (f *frontend) negotiate(memfd int, size uint64) error {
	err := f.tell(getFeatures, nil)
	if err == nil {
		_, err = io.ReadFull(f.conn, make([]byte, 12+8))
	}
	for _, m := range []struct {
		request uint32
		payload []byte
		fds     []int
	}{
		{setOwner, nil, nil},
		{setFeatures, u64s(frontendFeatures), nil},
		{setMemTable, u64s(1, 0, size, frontendBase, 0), []int{memfd}},
	} {
		err = errors.Join(err, f.tell(m.request, m.payload, m.fds...))
	}
	for i, d := range []*datapathtest.Driver{f.rx.Driver, f.tx.Driver} {
		ring := uint64(i)
		desc, avail, used := d.Addrs()
		err = errors.Join(err,
			f.tell(setVringNum, u64s(ring|ringSize<<32)),
			f.tell(setVringBase, u64s(ring)),
			f.tell(setVringAddr, u64s(ring, frontendBase+desc, frontendBase+used, frontendBase+avail, 0)),
			f.tell(setVringCall, u64s(ring), f.lines[i].callFD),
			f.tell(setVringKick, u64s(ring), f.lines[i].kickFD),
		)
	}
	return err
}

// tell sends a request. Its numbers are in native order, little-endian here.
func (f *frontend) tell(request uint32, payload []byte, fds ...int) error {
	b := binary.LittleEndian.AppendUint32(nil, request)
	b = binary.LittleEndian.AppendUint32(b, 1) // version
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := f.conn.WriteMsgUnix(append(b, payload...), oob, nil)
	return err
}

func u64s(v ...uint64) (b []byte) {
	for _, v := range v {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func (f *frontend) Info() datapath.Info {
	offloads := virtio.OffloadCSum | virtio.OffloadTSO4
	return datapath.Info{Transport: "driver", ToGuest: offloads, FromGuest: offloads, Connected: true}
}
func (f *frontend) QueuePairs() []datapath.QueuePair { return f.pairs }
func (f *frontend) Stats() *datapath.Stats           { return &f.stats }
func (f *frontend) Room() <-chan struct{}            { return f.room }

// Close ends the connection as a kill does: nothing is said. The memory stays
// mapped: a driver may still be at it.
func (f *frontend) Close() (err error) {
	f.once.Do(func() {
		err = errors.Join(f.conn.Close(), unix.Close(f.memfd))
		for _, l := range f.lines {
			err = errors.Join(err, l.kick.Close(), l.call.Close())
		}
	})
	return err
}

// ReadBatch takes what the device put in RX.
func (f *frontend) ReadBatch(frames []datapath.Frame, get func(n int) [][]byte) (n int, err error) {
	for {
		for n < len(frames) {
			hdr, b, ok, err := f.rx.Take()
			if err != nil {
				return 0, errors.Join(datapath.ErrPeerGone, err)
			}
			if !ok {
				break
			}
			hdr.NumBuffers = 0
			frames[n] = datapath.Frame{Hdr: hdr, Segs: get(len(b)), N: len(b)}
			for _, s := range frames[n].Segs {
				b = b[copy(s, b):]
			}
			n++
		}
		if f.rx.Idle() > ringSize/4 {
			f.rx.Post(ringSize)
		}
		if n > 0 {
			return n, nil
		}
		if f.rx.EnableCalls() {
			continue
		}
		if _, err := f.lines[0].call.Read(make([]byte, 8)); err != nil {
			return 0, datapath.ErrPeerGone
		}
	}
}

// WriteBatch puts frames in TX.
func (f *frontend) WriteBatch(frames []datapath.Frame) (n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for ; n < len(frames); n++ {
		var b []byte
		for _, s := range frames[n].Segs {
			b = append(b, s...)
		}
		err := f.tx.Add(frames[n].Hdr, b[:frames[n].N])
		if errors.Is(err, datapathtest.ErrFull) && f.tx.EnableCalls() {
			err = f.tx.Add(frames[n].Hdr, b[:frames[n].N])
		}
		if errors.Is(err, datapathtest.ErrFull) {
			break
		}
		if err != nil {
			return 0, errors.Join(datapath.ErrPeerGone, err)
		}
	}
	f.tx.Publish()
	return n, nil
}

// watchRoom fires Room when the device has taken frames from TX.
func (f *frontend) watchRoom() {
	for {
		if _, err := f.lines[1].call.Read(make([]byte, 8)); err != nil {
			return
		}
		select {
		case f.room <- struct{}{}:
		default:
		}
	}
}
