package vhostuser

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/internal/eventfd"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// patience bounds what should happen at once.
const patience = 10 * time.Second

// A config is what a test's front-end and its driver are like.
type config struct {
	features   uint64 // acknowledged, besides PROTOCOL_FEATURES
	protocol   uint64
	pairs      int
	num        uint16 // descriptors of each ring
	rxSize     int    // bytes of each RX buffer
	slots      bool   // memory by ADD_MEM_REG
	noKick     bool   // no descriptor for kicks: we have to poll
	noProtocol bool   // protocol features not negotiated at all
}

const everything = featureVersion1 | featureMrgRxBuf | featureEventIdx | featureIndirectDesc |
	featureCSum | featureGuestCSum | featureGuestTSO4 | featureGuestTSO6 | featureHostTSO4 | featureHostTSO6

func plain() config {
	return config{features: everything, protocol: protocolFeatures, pairs: 1, num: 256, rxSize: 1600}
}

// queueFeatures are those that its driver knows of.
func (c config) queueFeatures() virtqueue.Features {
	return virtqueue.Features{
		EventIdx: c.features&featureEventIdx != 0,
		Indirect: c.features&featureIndirectDesc != 0,
	}
}

// The test's guest has its memory in one file, of which the first half lies at
// the start of its physical address space and the second above 4 GiB. The
// front-end's addresses of it are as good as any.
const (
	lowSize  = 256 << 10 // rings, and some of the buffers
	highGPA  = 1 << 32
	userBase = 0x7f00_0000_0000
	txBufs   = 64
	txSize   = datapath.MaxFrame + 8192 // longer than any frame
)

// A vmm is a front-end and the guest's drivers in one.
type vmm struct {
	conn   *net.UnixConn
	cfg    config
	memory []byte // mapped by itself, as another process would
	memfd  int
	rx     []*datapathtest.RxQueue
	tx     []*datapathtest.TxQueue
	lines  []*line // one a ring: RX and TX in turn

	leave sync.Once
	left  chan struct{}
	busy  sync.WaitGroup // Send and Recv under way
	mu    sync.Mutex     // guards entering busy against leaving
}

// A line is a ring's two descriptors.
type line struct {
	kick, call int
	calls      *eventfd.Kick // call, as the driver waits for it
}

func newLine() (l *line, err error) {
	l = &line{kick: -1, call: -1}
	if l.kick, err = eventfd.New(); err != nil {
		return l, err
	}
	if l.call, err = eventfd.New(); err != nil {
		return l, err
	}
	own, err := unix.FcntlInt(uintptr(l.call), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		l.calls, err = eventfd.NewKick(own)
	}
	return l, err
}

func (l *line) ring() { _, _ = unix.Write(l.kick, u64s(1)) }

func dial(path string, cfg config) (*vmm, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path})
	if err != nil {
		return nil, err
	}
	v := &vmm{conn: conn, cfg: cfg, left: make(chan struct{})}
	size := lowSize + cfg.pairs*(int(cfg.num)*cfg.rxSize+txBufs*(txSize+12)) + 2<<20
	if v.memfd, err = unix.MemfdCreate("guest", unix.MFD_CLOEXEC); err != nil {
		return nil, err
	}
	size = (size + 4095) &^ 4095
	if err := unix.Ftruncate(v.memfd, int64(size)); err != nil {
		return nil, err
	}
	if v.memory, err = unix.Mmap(v.memfd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	for range 2 * cfg.pairs {
		l, err := newLine()
		if err != nil {
			return nil, err
		}
		v.lines = append(v.lines, l)
	}
	v.boot(0)
	return v, nil
}

// boot puts new drivers in the place of those that were there, as a reboot does,
// with RX filled. base is where their rings begin.
func (v *vmm) boot(base uint16) {
	mem := datapathtest.NewGuestMemory(
		datapathtest.Region{GPA: 0, Bytes: v.memory[:lowSize]},
		datapathtest.Region{GPA: highGPA, Bytes: v.memory[lowSize:]},
	)
	v.rx, v.tx = nil, nil
	form, mergeable := headerForm(v.cfg.features), v.cfg.features&featureMrgRxBuf != 0
	for i := range v.cfg.pairs {
		rx := datapathtest.NewDriver(mem, v.cfg.num, v.cfg.queueFeatures(), base)
		tx := datapathtest.NewDriver(mem, v.cfg.num, v.cfg.queueFeatures(), base)
		rx.Kick, tx.Kick = v.lines[2*i].ring, v.lines[2*i+1].ring
		v.rx = append(v.rx, datapathtest.NewRxQueue(rx, int(v.cfg.num), v.cfg.rxSize, form, 0, mergeable))
		v.tx = append(v.tx, datapathtest.NewTxQueue(tx, txBufs, txSize, form, 1500))
		v.rx[i].Post(int(v.cfg.num))
	}
}

// driver returns the driver of a ring.
func (v *vmm) driver(ring int) *datapathtest.Driver {
	if ring%2 == 0 {
		return v.rx[ring/2].Driver
	}
	return v.tx[ring/2].Driver
}

// user translates a guest-physical address.
func (v *vmm) user(gpa uint64) uint64 {
	if gpa >= highGPA {
		return userBase + lowSize + gpa - highGPA
	}
	return userBase + gpa
}

func (v *vmm) regions() []region {
	return []region{
		{gpa: highGPA, size: uint64(len(v.memory)) - lowSize, user: v.user(highGPA), offset: lowSize},
		{gpa: 0, size: lowSize, user: v.user(0)},
	}
}

// close frees what the front-end holds, and so leaves.
func (v *vmm) close() {
	v.leave.Do(func() {
		_ = v.conn.Close()
		v.mu.Lock()
		close(v.left)
		v.mu.Unlock()
		for _, l := range v.lines {
			_ = l.calls.Close()
		}
		v.busy.Wait()
		for _, l := range v.lines {
			closeFDs([]int{l.kick, l.call})
		}
		_ = unix.Close(v.memfd)
		_ = unix.Munmap(v.memory)
	})
}

// The protocol.

func encode(r request, flags uint32, payload []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(r))
	b = binary.NativeEndian.AppendUint32(b, version|flags)
	b = binary.NativeEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

func u32s(v ...uint32) (b []byte) {
	for _, v := range v {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

func u64s(v ...uint64) (b []byte) {
	for _, v := range v {
		b = binary.NativeEndian.AppendUint64(b, v)
	}
	return b
}

func (r region) encode() []byte { return u64s(r.gpa, r.size, r.user, r.offset) }

func (v *vmm) write(b []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := v.conn.WriteMsgUnix(b, oob, nil)
	return err
}

// tell sends a request and, where that has been negotiated, makes sure that it
// has been served.
func (v *vmm) tell(r request, payload []byte, fds ...int) error {
	if v.cfg.protocol&protocolReplyAck == 0 || v.cfg.noProtocol {
		return v.write(encode(r, 0, payload), fds...)
	}
	if err := v.write(encode(r, flagNeedReply, payload), fds...); err != nil {
		return err
	}
	answer, err := v.answer(r)
	if err == nil && (len(answer) != 8 || binary.NativeEndian.Uint64(answer) != 0) {
		err = errors.New(r.String() + " was refused")
	}
	return err
}

// ask sends a request that has an answer and returns that.
func (v *vmm) ask(r request, payload []byte) ([]byte, error) {
	if err := v.write(encode(r, 0, payload)); err != nil {
		return nil, err
	}
	return v.answer(r)
}

func (v *vmm) answer(r request) ([]byte, error) {
	var head [headerSize]byte
	if _, err := io.ReadFull(v.conn, head[:]); err != nil {
		return nil, err
	}
	if got := request(binary.NativeEndian.Uint32(head[:])); got != r {
		return nil, errors.New(r.String() + " was answered with " + got.String())
	}
	if f := binary.NativeEndian.Uint32(head[4:]); f != version|flagReply {
		return nil, errors.New("flags of the answer")
	}
	b := make([]byte, binary.NativeEndian.Uint32(head[8:]))
	_, err := io.ReadFull(v.conn, b)
	return b, err
}

// A step is one request of a negotiation.
type step struct {
	request request
	payload []byte
	fds     []int
	asks    bool
}

// steps returns what a front-end sends until its guest's driver is ready, in
// QEMU's order.
func (v *vmm) steps() []step {
	var all []step
	tell := func(r request, payload []byte, fds ...int) { all = append(all, step{r, payload, fds, false}) }
	ask := func(r request, payload []byte) { all = append(all, step{r, payload, nil, true}) }
	ask(reqGetFeatures, nil)
	features := v.cfg.features
	if !v.cfg.noProtocol {
		features |= featureProtocolFeatures
		ask(reqGetProtocolFeatures, nil)
		// Not through tell: it says itself whether it may ask for an answer.
		all = append(all, step{request: reqSetProtocolFeatures, payload: u64s(v.cfg.protocol)})
		if v.cfg.protocol&protocolMQ != 0 {
			ask(reqGetQueueNum, nil)
		}
		if v.cfg.protocol&protocolConfigureMemSlots != 0 {
			ask(reqGetMaxMemSlots, nil)
		}
	}
	tell(reqSetOwner, nil)
	for i, l := range v.lines {
		tell(reqSetVringCall, u64s(uint64(i)), l.call)
	}
	tell(reqSetFeatures, u64s(features))
	if v.cfg.slots {
		for _, r := range v.regions() {
			tell(reqAddMemReg, append(u64s(0), r.encode()...), v.memfd)
		}
	} else {
		tell(reqSetMemTable, v.table(), v.memfd, v.memfd)
	}
	for i := range v.lines {
		all = append(all, v.startSteps(i, 0)...)
		if !v.cfg.noProtocol {
			tell(reqSetVringEnable, u32s(uint32(i), 1))
		}
	}
	return all
}

// table is the payload of SET_MEM_TABLE.
func (v *vmm) table() []byte {
	b := u32s(uint32(len(v.regions())), 0)
	for _, r := range v.regions() {
		b = append(b, r.encode()...)
	}
	return b
}

// startSteps start a ring.
func (v *vmm) startSteps(ring int, base uint16) []step {
	i := uint32(ring)
	desc, avail, used := v.driver(ring).Addrs()
	kick := step{reqSetVringKick, u64s(uint64(i)), []int{v.lines[ring].kick}, false}
	if v.cfg.noKick {
		kick = step{request: reqSetVringKick, payload: u64s(uint64(i) | vringNoFD)}
	}
	return []step{
		{reqSetVringNum, u32s(i, uint32(v.cfg.num)), nil, false},
		{reqSetVringBase, u32s(i, uint32(base)), nil, false},
		{reqSetVringAddr, append(u32s(i, 0), u64s(v.user(desc), v.user(used), v.user(avail), 0)...), nil, false},
		kick,
	}
}

func (v *vmm) do(steps ...step) error {
	for _, s := range steps {
		var err error
		switch {
		case s.asks:
			_, err = v.ask(s.request, s.payload)
		case s.request == reqSetProtocolFeatures:
			err = v.write(encode(s.request, 0, s.payload))
		default:
			err = v.tell(s.request, s.payload, s.fds...)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// stop stops a ring and returns the base it is to be started with again.
func (v *vmm) stop(ring int) (uint16, error) {
	b, err := v.ask(reqGetVringBase, u32s(uint32(ring), 0))
	if err != nil {
		return 0, err
	}
	return uint16(parseVringState(b).num), nil
}

// await waits until the device has returned a chain of a ring.
func (v *vmm) await(ring int, deadline time.Time) bool {
	d, calls := v.driver(ring), v.lines[ring].calls
	late := time.AfterFunc(time.Until(deadline), calls.Interrupt)
	defer late.Stop()
	for {
		err := calls.Wait(d.EnableCalls)
		if d.EnableCalls() {
			return true
		}
		if err != nil || !time.Now().Before(deadline) {
			return false
		}
	}
}

// enter holds off close until exit.
func (v *vmm) enter() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	select {
	case <-v.left:
		return false
	default:
		v.busy.Add(1)
		return true
	}
}

var errLeft = errors.New("the front-end has left")

// A peer is a vmm as datapathtest wants it: the first pair carries frames.
type peer struct{ *vmm }

func (p *peer) MaxFrame() int { return datapath.MaxFrame }

func (p *peer) Send(frame []byte) error {
	if !p.enter() {
		return errLeft
	}
	defer p.busy.Done()
	tx := p.tx[0]
	if p.cfg.queueFeatures().Indirect {
		tx.Layout = (tx.Layout + 1) % 3
	}
	for {
		err := tx.Add(virtio.NetHdr{}, frame)
		if err == nil {
			tx.Publish()
			return nil
		}
		if !errors.Is(err, datapathtest.ErrFull) {
			return err
		}
		p.await(1, time.Now().Add(10*time.Millisecond))
		select {
		case <-p.left:
			return errLeft
		default:
		}
	}
}

// Recv takes from every RX ring.
func (p *peer) Recv(timeout time.Duration) ([]byte, error) {
	if !p.enter() {
		return nil, errLeft
	}
	defer p.busy.Done()
	wait := timeout
	if p.cfg.pairs > 1 {
		wait = time.Millisecond // on each ring in turn
	}
	for deadline := time.Now().Add(timeout); ; {
		for i, rx := range p.rx {
			_, frame, ok, err := rx.Take()
			if err != nil {
				return nil, err
			}
			if !ok || rx.Idle() > int(p.cfg.num)/4 {
				rx.Post(int(p.cfg.num))
			}
			if ok {
				return frame, nil
			}
			if !p.await(2*i, time.Now().Add(wait)) && !time.Now().Before(deadline) {
				return nil, errors.New("no frame for the guest")
			}
			select {
			case <-p.left:
				return nil, errLeft
			default:
			}
		}
	}
}

func (p *peer) Leave() error {
	p.close()
	return nil
}

// mustConnect connects a front-end and takes it as far as its drivers being ready.
func mustConnect(t *testing.T, path string, cfg config) *vmm {
	t.Helper()
	v, err := dial(path, cfg)
	require.NoError(t, err)
	t.Cleanup(v.close)
	require.NoError(t, v.do(v.steps()...))
	return v
}
