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
	"github.com/culvertnet/culvert/datapath/internal/eventfd"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// patience bounds what should happen at once.
const patience = 10 * time.Second

// A config is what a test's front-end and its driver are like.
type config struct {
	features   uint64 // acknowledged, besides PROTOCOL_FEATURES
	protocol   uint64
	pairs      int
	num        int  // descriptors of each ring
	rxSize     int  // bytes of each RX buffer
	slots      bool // memory by ADD_MEM_REG
	noKick     bool // no descriptor for kicks: we have to poll
	noProtocol bool // protocol features not negotiated at all
}

const everything = featureVersion1 | featureMrgRxBuf | featureEventIdx | featureIndirectDesc |
	featureCSum | featureGuestCSum | featureGuestTSO4 | featureGuestTSO6 | featureHostTSO4 | featureHostTSO6

func plain() config {
	return config{features: everything, protocol: protocolFeatures, pairs: 1, num: 256, rxSize: 1600}
}

// The test's guest has its memory in one file, of which the first half, the
// rings, lies at the start of its physical address space and the second, the
// buffers, above 4 GiB. The front-end's addresses of it are as good as any.
const (
	highGPA  = 1 << 32
	userBase = 0x7f00_0000_0000
	ringSpan = 1 << 18 // bytes for each ring: 32768 descriptors are not tried
)

// A vmm is a front-end and the guest's driver in one.
type vmm struct {
	conn   *net.UnixConn
	cfg    config
	memory []byte // mapped by itself, as another process would
	memfd  int
	half   uint64
	rings  []*ring

	leave sync.Once
	left  chan struct{}
	busy  sync.WaitGroup // Send and Recv under way
	mu    sync.Mutex     // guards entering busy against leaving
}

// A ring is the driver's end of one. Its methods are for one goroutine.
type ring struct {
	vmm               *vmm
	index             int
	num               int
	desc, avail, used []byte
	bufSize           int
	buffers           uint64 // offset of the first in memory; one a descriptor
	free              []uint16
	availIdx, usedIdx uint16
	kick, call        int
	calls             *eventfd.Kick
	kicks             int // written
}

func dial(path string, cfg config) (*vmm, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path})
	if err != nil {
		return nil, err
	}
	v := &vmm{conn: conn, cfg: cfg, left: make(chan struct{})}
	buffers := 0
	for i := range 2 * cfg.pairs {
		buffers += cfg.num * v.bufSize(i)
	}
	v.half = uint64(2 * cfg.pairs * ringSpan)
	size := v.half + uint64(buffers+4095)&^4095
	if v.memfd, err = unix.MemfdCreate("guest", unix.MFD_CLOEXEC); err != nil {
		return nil, err
	}
	if err := unix.Ftruncate(v.memfd, int64(size)); err != nil {
		return nil, err
	}
	if v.memory, err = unix.Mmap(v.memfd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	at := v.half
	for i := range 2 * cfg.pairs {
		r := &ring{vmm: v, index: i, num: cfg.num, bufSize: v.bufSize(i), buffers: at}
		at += uint64(r.num * r.bufSize)
		base := v.memory[i*ringSpan:]
		r.desc = base[:virtqueue.DescSize(uint16(r.num))]
		r.avail = base[1<<16:][:virtqueue.AvailSize(uint16(r.num))]
		r.used = base[1<<17:][:virtqueue.UsedSize(uint16(r.num))]
		if err := r.eventfds(); err != nil {
			return nil, err
		}
		r.reset()
		v.rings = append(v.rings, r)
	}
	return v, nil
}

func (v *vmm) bufSize(ring int) int {
	if ring%2 == 0 {
		return v.cfg.rxSize
	}
	return datapath.MaxFrame + 8192 // TX: longer than any frame
}

func (r *ring) eventfds() (err error) {
	if r.kick, err = eventfd.New(); err != nil {
		return err
	}
	if r.call, err = eventfd.New(); err != nil {
		return err
	}
	own, err := unix.FcntlInt(uintptr(r.call), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		r.calls, err = eventfd.NewKick(own)
	}
	return err
}

// reset makes the ring as a driver that has just started makes it.
func (r *ring) reset() {
	clear(r.desc)
	clear(r.avail)
	clear(r.used)
	r.availIdx, r.usedIdx = 0, 0
	r.free = r.free[:0]
	for i := r.num - 1; i >= 0; i-- {
		r.free = append(r.free, uint16(i))
	}
}

// gpa and user translate an offset in memory.
func (v *vmm) gpa(off uint64) uint64 {
	if off >= v.half {
		return highGPA + off - v.half
	}
	return off
}

func (v *vmm) user(off uint64) uint64 { return userBase + off }

func (v *vmm) regions() []region {
	return []region{
		{gpa: highGPA, size: uint64(len(v.memory)) - v.half, user: v.user(v.half), offset: v.half},
		{gpa: 0, size: v.half, user: v.user(0)},
	}
}

// close frees what the front-end holds, and so leaves.
func (v *vmm) close() {
	v.leave.Do(func() {
		_ = v.conn.Close()
		v.mu.Lock()
		close(v.left)
		v.mu.Unlock()
		for _, r := range v.rings {
			_ = r.calls.Close()
		}
		v.busy.Wait()
		for _, r := range v.rings {
			closeFDs([]int{r.kick, r.call})
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
	for i, r := range v.rings {
		tell(reqSetVringCall, u64s(uint64(i)), r.call)
	}
	tell(reqSetFeatures, u64s(features))
	if v.cfg.slots {
		for _, r := range v.regions() {
			tell(reqAddMemReg, append(u64s(0), r.encode()...), v.memfd)
		}
	} else {
		table := u32s(uint32(len(v.regions())), 0)
		for _, r := range v.regions() {
			table = append(table, r.encode()...)
		}
		tell(reqSetMemTable, table, v.memfd, v.memfd)
	}
	for i, r := range v.rings {
		all = append(all, r.startSteps(0)...)
		if !v.cfg.noProtocol {
			tell(reqSetVringEnable, u32s(uint32(i), 1))
		}
	}
	return all
}

func (r *ring) startSteps(base uint16) []step {
	i := uint32(r.index)
	at := r.vmm.user(uint64(r.index) * ringSpan)
	kick := step{reqSetVringKick, u64s(uint64(i)), []int{r.kick}, false}
	if r.vmm.cfg.noKick {
		kick = step{request: reqSetVringKick, payload: u64s(uint64(i) | vringNoFD)}
	}
	return []step{
		{reqSetVringNum, u32s(i, uint32(r.num)), nil, false},
		{reqSetVringBase, u32s(i, uint32(base)), nil, false},
		{reqSetVringAddr, append(u32s(i, 0), u64s(at, at+1<<17, at+1<<16, 0)...), nil, false},
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
func (r *ring) stop() (uint16, error) {
	b, err := r.vmm.ask(reqGetVringBase, u32s(uint32(r.index), 0))
	if err != nil {
		return 0, err
	}
	return uint16(parseVringState(b).num), nil
}

// The driver.

// add makes a chain available that begins at head.
func (r *ring) add(head uint16) {
	binary.LittleEndian.PutUint16(r.avail[4+2*(int(r.availIdx)%r.num):], head)
	r.availIdx++
}

// publish shows what was added and kicks if that is wanted.
func (r *ring) publish() {
	_, before := loadPair(r.avail)
	flags := uint16(0)
	storePair(r.avail, flags, r.availIdx)
	fence()
	if r.vmm.cfg.features&featureEventIdx != 0 {
		event := binary.LittleEndian.Uint16(r.used[4+8*r.num:])
		if event-before >= r.availIdx-before {
			return
		}
	} else if f, _ := loadPair(r.used); f&1 != 0 {
		return
	}
	r.notify()
}

func (r *ring) notify() {
	r.kicks++
	_, _ = unix.Write(r.kick, u64s(1))
}

func (r *ring) setDesc(i uint16, gpa uint64, n int, flags, next uint16) {
	putDesc(r.desc[16*int(i):], gpa, n, flags, next)
}

func putDesc(b []byte, gpa uint64, n int, flags, next uint16) {
	binary.LittleEndian.PutUint64(b, gpa)
	binary.LittleEndian.PutUint32(b[8:], uint32(n))
	binary.LittleEndian.PutUint16(b[12:], flags)
	binary.LittleEndian.PutUint16(b[14:], next)
}

// buffer returns descriptor i's buffer and its guest-physical address.
func (r *ring) buffer(i uint16) ([]byte, uint64) {
	off := r.buffers + uint64(i)*uint64(r.bufSize)
	return r.vmm.memory[off:][:r.bufSize], r.vmm.gpa(off)
}

// next returns the next used chain, if there is one.
func (r *ring) next() (head uint16, written int, ok bool) {
	_, idx := loadPair(r.used)
	if idx == r.usedIdx {
		return 0, 0, false
	}
	e := r.used[4+8*(int(r.usedIdx)%r.num):]
	r.usedIdx++
	return uint16(binary.LittleEndian.Uint32(e)), int(binary.LittleEndian.Uint32(e[4:])), true
}

// await waits for a used chain.
func (r *ring) await(deadline time.Time) bool {
	late := time.AfterFunc(time.Until(deadline), r.calls.Interrupt)
	defer late.Stop()
	for {
		err := r.calls.Wait(func() bool {
			binary.LittleEndian.PutUint16(r.avail[4+2*r.num:], r.usedIdx) // used_event
			fence()
			_, idx := loadPair(r.used)
			return idx != r.usedIdx
		})
		_, idx := loadPair(r.used)
		if idx != r.usedIdx {
			return true
		}
		if err != nil || !time.Now().Before(deadline) {
			return false
		}
	}
}

// fill gives all free buffers to RX.
func (r *ring) fill() {
	for _, i := range r.free {
		_, gpa := r.buffer(i)
		r.setDesc(i, gpa, r.bufSize, 2, 0) // WRITE
		r.add(i)
	}
	r.free = r.free[:0]
	r.publish()
}

// receive takes a whole frame with its header, if there is one.
func (r *ring) receive() (frame []byte, ok bool, err error) {
	form := headerForm(r.vmm.cfg.features)
	for left := 1; left > 0; left-- {
		head, n, any := r.next()
		switch {
		case !any && frame == nil:
			return nil, false, nil
		case !any:
			return nil, false, errors.New("used chains of half a frame")
		case int(head) >= r.num || n > r.bufSize:
			return nil, false, errors.New("impossible used entry")
		}
		b, _ := r.buffer(head)
		r.free = append(r.free, head)
		if frame == nil {
			if n < form {
				return nil, false, errors.New("a used chain without a header")
			}
			if form == 12 {
				left = int(binary.LittleEndian.Uint16(b[10:]))
			}
		}
		frame = append(frame, b[:n]...)
	}
	return frame, true, nil
}

// send puts a frame in TX: header and frame in two descriptors, in one, or in an
// indirect table, in turn.
func (r *ring) send(frame []byte) bool {
	r.reclaim()
	if len(r.free) < 2 {
		return false
	}
	form := headerForm(r.vmm.cfg.features)
	i, j := r.free[len(r.free)-1], r.free[len(r.free)-2]
	b, gpa := r.buffer(i)
	clear(b[:form])
	copy(b[form:], frame)
	n := form + len(frame)
	switch way := int(r.availIdx) % 3; {
	case way == 0:
		r.setDesc(i, gpa, n, 0, 0)
		r.free = r.free[:len(r.free)-1]
	case way == 1 && r.vmm.cfg.features&featureIndirectDesc != 0:
		table, at := b[r.bufSize-64:], gpa+uint64(r.bufSize)-64
		putDesc(table, gpa, form, 1, 1)
		putDesc(table[16:], gpa+uint64(form), len(frame)/2, 1, 2)
		putDesc(table[32:], gpa+uint64(form+len(frame)/2), len(frame)-len(frame)/2, 0, 0)
		r.setDesc(i, at, 48, 4, 0)
		r.free = r.free[:len(r.free)-1]
	default:
		r.setDesc(i, gpa, form, 1, j)
		r.setDesc(j, gpa+uint64(form), len(frame), 0, 0)
		r.free = r.free[:len(r.free)-2]
	}
	r.add(i)
	r.publish()
	return true
}

// reclaim takes back what TX is done with.
func (r *ring) reclaim() {
	for {
		head, _, ok := r.next()
		if !ok {
			return
		}
		d := r.desc[16*int(head):]
		r.free = append(r.free, head)
		if binary.LittleEndian.Uint16(d[12:])&1 != 0 {
			r.free = append(r.free, binary.LittleEndian.Uint16(d[14:]))
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
type peer struct {
	*vmm
	filled bool
}

func (p *peer) MaxFrame() int { return datapath.MaxFrame }

func (p *peer) Send(frame []byte) error {
	if !p.enter() {
		return errLeft
	}
	defer p.busy.Done()
	tx := p.rings[1]
	if len(frame)+12 > tx.bufSize {
		return errors.New("longer than the driver's buffers")
	}
	for !tx.send(frame) {
		select {
		case <-p.left:
			return errLeft
		default:
			tx.await(time.Now().Add(10 * time.Millisecond))
		}
	}
	return nil
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
		for i := 0; i < len(p.rings); i += 2 {
			rx := p.rings[i]
			frame, ok, err := rx.receive()
			if err != nil {
				return nil, err
			}
			if len(rx.free) > rx.num/4 || len(rx.free) > 0 && !ok {
				rx.fill()
			}
			if ok {
				return frame[headerForm(p.cfg.features):], nil
			}
			if !rx.await(time.Now().Add(wait)) && !time.Now().Before(deadline) {
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

// mustConnect connects a front-end and takes it as far as its driver being ready,
// with RX filled.
func mustConnect(t *testing.T, path string, cfg config) *vmm {
	t.Helper()
	v, err := dial(path, cfg)
	require.NoError(t, err)
	t.Cleanup(v.close)
	for i := range v.rings {
		if i%2 == 0 {
			v.rings[i].fill()
		}
	}
	require.NoError(t, v.do(v.steps()...))
	return v
}
