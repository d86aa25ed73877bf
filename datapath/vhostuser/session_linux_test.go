package vhostuser

import (
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/internal/eventfd"
)

// newSession makes a session without a socket.
func newSession(pairs int) *session {
	return &session{dev: newDevice("test", pairs, func() {}, func(error) {})}
}

// ask serves one request as frontend does, descriptors included.
func (s *session) ask(r request, flags uint32, payload []byte, fds ...int) ([]byte, error) {
	m := &message{header: header{r, version | flags, uint32(len(payload))}, payload: payload, fds: fds}
	reply, err := s.serve(nil, m)
	closeFDs(m.takeFDs())
	return reply, err
}

func mustEventfd(t testing.TB) int {
	t.Helper()
	fd, err := eventfd.New()
	require.NoError(t, err)
	return fd
}

// negotiated returns a session that has acknowledged everything.
func negotiated(t testing.TB, pairs int) *session {
	t.Helper()
	s := newSession(pairs)
	_, err := s.ask(reqSetProtocolFeatures, 0, u64s(protocolFeatures))
	require.NoError(t, err)
	_, err = s.ask(reqSetFeatures, 0, u64s(s.dev.features()))
	require.NoError(t, err)
	return s
}

func mustAsk(t testing.TB, s *session, r request, payload []byte, fds ...int) []byte {
	t.Helper()
	reply, err := s.ask(r, 0, payload, fds...)
	require.NoError(t, err)
	if len(reply) == 0 {
		return nil
	}
	return reply[headerSize:]
}

// TestAnswers: what each question is answered with.
func TestAnswers(t *testing.T) {
	for pairs, features := range map[int]uint64{1: baseFeatures, 4: baseFeatures | featureMQ} {
		s := negotiated(t, pairs)
		assert.Equal(t, u64s(features), mustAsk(t, s, reqGetFeatures, nil))
		assert.Equal(t, u64s(protocolFeatures), mustAsk(t, s, reqGetProtocolFeatures, nil))
		assert.Equal(t, u64s(uint64(pairs)), mustAsk(t, s, reqGetQueueNum, nil))
		assert.Equal(t, u64s(maxRegions), mustAsk(t, s, reqGetMaxMemSlots, nil))
		assert.Equal(t, u64s(0), mustAsk(t, s, reqGetStatus, nil))
		mustAsk(t, s, reqSetStatus, u64s(0x0b))
		assert.Equal(t, u64s(0x0b), mustAsk(t, s, reqGetStatus, nil))
		mustAsk(t, s, reqResetDevice, nil)
		assert.Equal(t, u64s(0), mustAsk(t, s, reqGetStatus, nil))
		mustAsk(t, s, reqSetOwner, nil)
		mustAsk(t, s, reqResetOwner, nil)
		mustAsk(t, s, reqNetSetMTU, u64s(9000))
	}
}

// TestReplyAck: a request without an answer of its own is answered where the
// front-end asks and has negotiated it, and only there; one with an answer is
// answered once.
func TestReplyAck(t *testing.T) {
	s := newSession(1)
	reply, err := s.ask(reqSetOwner, flagNeedReply, nil)
	require.NoError(t, err)
	assert.Empty(t, reply, "not negotiated")
	_, err = s.ask(reqSetProtocolFeatures, 0, u64s(protocolReplyAck))
	require.NoError(t, err)

	reply, err = s.ask(reqSetOwner, 0, nil)
	require.NoError(t, err)
	assert.Empty(t, reply, "not asked for")
	reply, err = s.ask(reqSetOwner, flagNeedReply, nil)
	require.NoError(t, err)
	assert.Equal(t, appendReply(nil, reqSetOwner, u64s(0)), reply)
	reply, err = s.ask(reqGetFeatures, flagNeedReply, nil)
	require.NoError(t, err)
	assert.Equal(t, appendReply(nil, reqGetFeatures, u64s(baseFeatures)), reply)

	reply, err = s.ask(reqSetFeatures, flagNeedReply, u64s(1<<63))
	require.ErrorIs(t, err, errNotOffered)
	assert.Equal(t, appendReply(nil, reqSetFeatures, u64s(1)), reply)
	reply, err = s.ask(99, flagNeedReply, nil)
	require.ErrorIs(t, err, errUnknown)
	assert.Equal(t, appendReply(nil, 99, u64s(1)), reply)
	reply, err = s.ask(reqSetFeatures, 0, u64s(1<<63))
	require.ErrorIs(t, err, errNotOffered)
	assert.Empty(t, reply)
}

// TestEveryRequestIsChecked: for each request there is, a wrong size, too many
// descriptors and a missing feature are found, and no descriptor is leaked.
func TestEveryRequestIsChecked(t *testing.T) {
	datapathtest.Leaks(t)
	for r, rule := range rules {
		if rule.needs != 0 {
			s := newSession(2)
			_, err := s.ask(r, 0, make([]byte, max(rule.size, 0)))
			assert.ErrorIs(t, err, errNotOffered, r.String())
		}
		s := negotiated(t, 2)
		for _, size := range []int{0, 1, 7, 8, 9, 12, 16, 39, 40, 41, maxPayload} {
			if size == rule.size || rule.size < 0 && size >= 8 {
				continue
			}
			_, err := s.ask(r, 0, make([]byte, size))
			assert.ErrorIs(t, err, errSize, "%s of %d bytes", r, size)
			assert.ErrorContains(t, err, r.String())
		}
		var fds []int
		for range rule.fds + 1 {
			fds = append(fds, mustEventfd(t))
		}
		_, err := s.ask(r, 0, make([]byte, max(rule.size, 8)), fds...)
		if rule.size == 0 {
			_, err = s.ask(r, 0, nil, mustEventfd(t))
		}
		assert.Error(t, err, r.String())
		s.dev.close(datapath.ErrPeerGone)
	}
}

// TestRefused: each request that says something impossible.
func TestRefused(t *testing.T) {
	datapathtest.Leaks(t)
	memory := func(r region) []byte { return append(u64s(0), r.encode()...) }
	good := region{gpa: 0, size: 1 << 20, user: userBase}
	for name, test := range map[string]struct {
		request request
		payload []byte
		fds     func() []int
		want    error // nil: any
	}{
		"a feature not offered":           {reqSetFeatures, u64s(1 << 34), nil, errNotOffered}, // packed rings
		"LOG_ALL":                         {reqSetFeatures, u64s(1 << 26), nil, errNotOffered},
		"a protocol feature not offered":  {reqSetProtocolFeatures, u64s(1 << 14), nil, errNotOffered},
		"an MTU of nothing":               {reqNetSetMTU, u64s(67), nil, nil},
		"an MTU of everything":            {reqNetSetMTU, u64s(65536), nil, nil},
		"a status of 9 bits":              {reqSetStatus, u64s(256), nil, nil},
		"a table without descriptors":     {reqSetMemTable, append(u32s(1, 0), good.encode()...), nil, errFDs},
		"a descriptor without a region":   {reqSetMemTable, u32s(0, 0), func() []int { return []int{mustEventfd(t)} }, errFDs},
		"a region without a descriptor":   {reqAddMemReg, memory(good), nil, errFDs},
		"a region that is no memory":      {reqAddMemReg, memory(good), func() []int { return []int{mustEventfd(t)} }, errMemory},
		"removing what is not there":      {reqRemMemReg, memory(good), func() []int { return []int{mustEventfd(t)} }, errMemory},
		"ring 4 of 4: size":               {reqSetVringNum, u32s(4, 256), nil, errIndex},
		"ring 4 of 4: base":               {reqSetVringBase, u32s(4, 0), nil, errIndex},
		"ring 4 of 4: place":              {reqSetVringAddr, append(u32s(4, 0), u64s(0, 0, 0, 0)...), nil, errIndex},
		"ring 4 of 4: kick":               {reqSetVringKick, u64s(4), func() []int { return []int{mustEventfd(t)} }, errIndex},
		"ring 4 of 4: call":               {reqSetVringCall, u64s(4), func() []int { return []int{mustEventfd(t)} }, errIndex},
		"ring 4 of 4: err":                {reqSetVringErr, u64s(4), func() []int { return []int{mustEventfd(t)} }, errIndex},
		"ring 4 of 4: enable":             {reqSetVringEnable, u32s(4, 1), nil, errIndex},
		"ring 4 of 4: stop":               {reqGetVringBase, u32s(4, 0), nil, errIndex},
		"the last ring there can be":      {reqGetVringBase, u32s(1<<32-1, 0), nil, errIndex},
		"a ring of none":                  {reqSetVringNum, u32s(0, 0), nil, nil},
		"a ring of three":                 {reqSetVringNum, u32s(0, 3), nil, nil},
		"a ring of 65536":                 {reqSetVringNum, u32s(0, 1<<16), nil, nil},
		"a ring of 65537":                 {reqSetVringNum, u32s(0, 1<<16+1), nil, nil},
		"enabled by two":                  {reqSetVringEnable, u32s(0, 2), nil, nil},
		"a kick with none said and one":   {reqSetVringKick, u64s(vringNoFD), func() []int { return []int{mustEventfd(t)} }, errFDs},
		"a kick with one said and none":   {reqSetVringKick, u64s(0), nil, errFDs},
		"a kick for a ring without place": {reqSetVringKick, u64s(0), func() []int { return []int{mustEventfd(t)} }, nil},
		"a kick that is a file":           {reqSetVringKick, u64s(0), func() []int { return []int{mustMemfd(t, 1)} }, nil},
		"migration":                       {6, u64s(0, 0), nil, errUnknown},
		"request 0":                       {0, nil, nil, errUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			s := negotiated(t, 2)
			defer s.dev.close(datapath.ErrPeerGone)
			var fds []int
			if test.fds != nil {
				fds = test.fds()
			}
			_, err := s.ask(test.request, 0, test.payload, fds...)
			require.Error(t, err)
			if test.want != nil {
				assert.ErrorIs(t, err, test.want)
			}
			assert.ErrorContains(t, err, test.request.String())
		})
	}
}

// TestRingOrder: a ring starts when all has been said of it, is not changed while
// it runs, and remembers what it was between two starts.
func TestRingOrder(t *testing.T) {
	datapathtest.Leaks(t)
	s := negotiated(t, 1)
	defer s.dev.close(datapath.ErrPeerGone)
	addr := func(desc, used, avail uint64) []byte {
		return append(u32s(0, 0), u64s(userBase+desc, userBase+used, userBase+avail, 0)...)
	}
	kick := func() ([]byte, error) { return s.ask(reqSetVringKick, 0, u64s(0), mustEventfd(t)) }
	mustAsk(t, s, reqSetVringNum, u32s(0, 256))
	mustAsk(t, s, reqSetVringAddr, addr(0, 0x4000, 0x8000))
	_, err := kick()
	require.ErrorIs(t, err, errMemory, "no memory yet")
	mustAsk(t, s, reqAddMemReg, append(u64s(0), region{size: 1 << 20, user: userBase}.encode()...), mustMemfd(t, 1<<20))

	for _, bad := range [][]byte{
		addr(8, 0x4000, 0x8000),          // descriptors not aligned to 16
		addr(0, 0x4002, 0x8000),          // used ring not aligned to 4
		addr(0, 0x4000, 0x8001),          // available ring not aligned to 2
		addr(1<<20-4080, 0x4000, 0x8000), // a descriptor table that ends outside
		addr(0, 1<<20, 0x8000),
		addr(0, 0x4000, 1<<40),
	} {
		mustAsk(t, s, reqSetVringAddr, bad)
		_, err := kick()
		require.Error(t, err)
		assert.False(t, s.dev.rings[0].started)
	}

	mustAsk(t, s, reqSetVringAddr, addr(0, 0x4000, 0x8000))
	mustAsk(t, s, reqSetVringBase, u32s(0, 7))
	_, err = kick()
	require.NoError(t, err)
	mustAsk(t, s, reqSetVringNum, u32s(0, 256))
	mustAsk(t, s, reqSetVringAddr, addr(0, 0x4000, 0x8000))
	_, err = s.ask(reqSetVringNum, 0, u32s(0, 128))
	require.ErrorIs(t, err, errRunning)
	_, err = s.ask(reqSetVringBase, 0, u32s(0, 0))
	require.ErrorIs(t, err, errRunning)
	_, err = s.ask(reqSetVringAddr, 0, addr(0, 0x4000, 0xc000))
	require.ErrorIs(t, err, errRunning)
	_, err = kick()
	require.NoError(t, err, "another kick")

	assert.Equal(t, u32s(0, 0), mustAsk(t, s, reqGetVringBase, u32s(0, 0)), "the used index holds, not what was said")
	assert.Equal(t, u32s(0, 0), mustAsk(t, s, reqGetVringBase, u32s(0, 0)), "stopped twice")
	mustAsk(t, s, reqSetVringBase, u32s(0, 9))
	assert.Equal(t, u32s(0, 9), mustAsk(t, s, reqGetVringBase, u32s(0, 0)), "never started")
	_, err = kick()
	require.NoError(t, err, "started again as it was")
	mustAsk(t, s, reqSetStatus, u64s(0))
	_, err = kick()
	require.Error(t, err, "a reset forgets")
}

// TestSetFeaturesNeverDisables: SET_FEATURES comes again for each pair of queues,
// while the first may carry frames already.
func TestSetFeaturesNeverDisables(t *testing.T) {
	s := newSession(2)
	mustAsk(t, s, reqSetVringEnable, u32s(0, 1)) // QEMU: before the driver is there
	mustAsk(t, s, reqSetFeatures, u64s(baseFeatures))
	mustAsk(t, s, reqSetFeatures, u64s(baseFeatures))
	assert.True(t, s.dev.rings[0].enabled)
	assert.False(t, s.dev.rings[1].enabled)
	mustAsk(t, s, reqSetFeatures, u64s(0))
	for _, r := range s.dev.rings {
		assert.True(t, r.enabled, "without PROTOCOL_FEATURES nobody could enable it")
	}
	mustAsk(t, s, reqSetProtocolFeatures, u64s(protocolFeatures))
	mustAsk(t, s, reqResetDevice, nil)
	assert.False(t, s.dev.rings[0].enabled)
}

// FuzzSession: any requests in any order, with whatever descriptors, and frames
// in between, end with nothing left behind.
func FuzzSession(f *testing.F) {
	// One byte chooses the request, one its descriptors, then comes the payload.
	start := func(ring byte) (b []byte) {
		for _, m := range []struct {
			r       request
			fds     byte
			payload []byte
		}{
			{reqSetVringNum, 0, u32s(uint32(ring), 8)},
			{reqSetVringAddr, 0, append(u32s(uint32(ring), 0), u64s(userBase, userBase+0x1000, userBase+0x2000, 0)...)},
			{reqSetVringCall, 1, u64s(uint64(ring))},
			{reqSetVringKick, 1, u64s(uint64(ring))},
			{reqSetVringEnable, 0, u32s(uint32(ring), 1)},
		} {
			b = append(append(b, byte(m.r), m.fds), m.payload...)
		}
		return b
	}
	memory := append([]byte{byte(reqAddMemReg), 2}, append(u64s(0), region{size: 1 << 16, user: userBase}.encode()...)...)
	both := append([]byte{byte(reqSetProtocolFeatures), 0}, u64s(protocolFeatures)...)
	both = append(append(both, byte(reqSetFeatures), 0), u64s(everything|featureProtocolFeatures)...)
	both = append(append(append(both, memory...), start(0)...), start(1)...)
	f.Add(both)
	f.Add(append(both, 200, 0, byte(reqGetVringBase), 0, 1, 0, 0, 0, 0, 0, 0, 0, 200, 0, byte(reqResetDevice), 0, 200, 0))
	f.Add(append(both, append([]byte{byte(reqRemMemReg), 0}, append(memory[2:], 200, 0)...)...))
	f.Add([]byte{byte(reqSetMemTable), 0x22, 2, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		before := countFDs(t)
		s := newSession(2)
		for steps := 0; len(b) >= 2 && steps < 64; steps++ {
			r, kind := request(b[0]), b[1]
			b = b[2:]
			if r == 200 { // frames both ways
				useAttachment(t, s)
				continue
			}
			size := rules[r].size
			if size < 0 {
				size = 8 + 2*regionSize
			}
			size = min(size, len(b))
			payload := b[:size]
			b = b[size:]
			var fds []int
			for ; kind&3 != 0; kind >>= 2 {
				switch kind & 3 {
				case 1:
					fds = append(fds, mustEventfd(t))
				case 2:
					fds = append(fds, mustGuest(t))
				case 3:
					fds = append(fds, mustMemfd(t, 100))
				}
			}
			_, _ = s.ask(r, flagNeedReply, payload, fds...)
		}
		useAttachment(t, s)
		s.dev.close(datapath.ErrPeerGone)
		require.Equal(t, before, countFDs(t), "descriptors")
	})
}

// mustGuest makes a file of guest memory with a ring of 8 descriptors, buffers to
// read and to write in turn, four of which are available.
func mustGuest(t *testing.T) int {
	fd := mustMemfd(t, 1<<16)
	var table []byte
	for i := range 8 {
		d := append(u64s(0x8000+0x400*uint64(i)), u32s(0x400)...)
		d = binary.LittleEndian.AppendUint16(d, 2*uint16(i%2)) // WRITE
		table = append(table, binary.LittleEndian.AppendUint16(d, 0)...)
	}
	_, err := unix.Pwrite(fd, table, 0)
	require.NoError(t, err)
	_, err = unix.Pwrite(fd, []byte{0, 0, 4, 0, 0, 0, 1, 0, 2, 0, 3, 0}, 0x2000)
	require.NoError(t, err)
	return fd
}

// useAttachment moves frames through the rings as they are, without waiting.
func useAttachment(t *testing.T, s *session) {
	a := s.dev.attach(func() {})
	if a == nil {
		return
	}
	var frames [4]datapath.Frame
	get := func(n int) [][]byte { return [][]byte{make([]byte, n)} }
	for _, q := range a.queues {
		for range 4 {
			n, err := q.take(frames[:], get)
			if err != nil {
				require.ErrorIs(t, err, datapath.ErrPeerGone)
			}
			for _, f := range frames[:n] {
				require.LessOrEqual(t, f.N, datapath.MaxFrame)
				require.GreaterOrEqual(t, f.N, etherHeader)
			}
			_, err = q.WriteBatch([]datapath.Frame{{Segs: [][]byte{make([]byte, 2000)}, N: 2000}, {Segs: [][]byte{make([]byte, 60)}, N: 60}})
			if err != nil {
				require.ErrorIs(t, err, datapath.ErrPeerGone)
			}
		}
	}
	require.NoError(t, a.Close())
}

func countFDs(t *testing.T) int {
	d, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(d)
}

// TestReaderBounds: what a front-end can send that is no request: too many
// descriptors, some for bytes that none belong to, a size beyond all bounds.
func TestReaderBounds(t *testing.T) {
	datapathtest.Leaks(t)
	for name, test := range map[string]struct {
		send func(v *vmm) error
		want string
	}{
		"nine descriptors":              {func(v *vmm) error { return v.write(encode(reqSetOwner, 0, nil), eventfds(t, 9)...) }, "more than 8"},
		"two hundred":                   {func(v *vmm) error { return v.write(encode(reqSetOwner, 0, nil), eventfds(t, 200)...) }, "more than 8"},
		"one for a request of none":     {func(v *vmm) error { return v.write(encode(reqSetOwner, 0, nil), eventfds(t, 1)...) }, "SET_OWNER: wrong number of descriptors"},
		"some with every byte":          {func(v *vmm) error { return v.trickle(encode(reqSetOwner, 0, nil), 1) }, "more than 8"},
		"a payload of 4 GiB":            {func(v *vmm) error { return v.write(append(u32s(5, version), 0xff, 0xff, 0xff, 0xff)) }, "SET_MEM_TABLE of 4294967295 bytes"},
		"version 2":                     {func(v *vmm) error { return v.write(u32s(1, 2, 0)) }, "not a message of version 1"},
		"another protocol altogether":   {func(v *vmm) error { return v.write([]byte("GET / HTTP/1.1\r\n\r\n")) }, "not a message of version 1"},
		"a request that does not exist": {func(v *vmm) error { return v.write(encode(1000, 0, nil)) }, "request 1000"},
		"half a header":                 {func(v *vmm) error { return v.write(encode(reqSetOwner, 0, nil)[:5]) }, "read header: unexpected EOF"},
		"half a payload":                {func(v *vmm) error { return v.write(encode(reqSetFeatures, 0, u64s(0))[:15]) }, "read payload of SET_FEATURES: unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			log := &logBuffer{}
			l := mustListen(t, Options{Log: log.logger()})
			v, err := dial(l.path, plain())
			require.NoError(t, err)
			defer v.close()
			_ = test.send(v) // it may be cut off
			require.NoError(t, v.conn.CloseWrite())
			_, err = v.conn.Read(make([]byte, 1))
			require.Error(t, err, "the connection is closed")
			require.NoError(t, l.Close())
			assert.Contains(t, log.String(), test.want)
			assert.Equal(t, 1, log.lines(), log.String())
		})
	}
}

func eventfds(t *testing.T, n int) (fds []int) {
	for range n {
		fds = append(fds, mustEventfd(t))
	}
	t.Cleanup(func() { closeFDs(fds) })
	return fds
}

// trickle sends b byte by byte, with n descriptors beside each.
func (v *vmm) trickle(b []byte, n int) error {
	for i := range b {
		var fds []int
		for range n {
			fds = append(fds, v.memfd)
		}
		if err := v.write(b[i:i+1], fds...); err != nil {
			return err
		}
	}
	return nil
}

// TestFDBesidePayload: a descriptor where none belongs is closed by the kernel.
func TestFDBesidePayload(t *testing.T) {
	datapathtest.Leaks(t)
	l := mustListen(t, Options{})
	v, err := dial(l.path, plain())
	require.NoError(t, err)
	defer v.close()
	b := encode(reqSetFeatures, 0, u64s(everything))
	require.NoError(t, v.write(b[:headerSize]))
	require.NoError(t, v.write(b[headerSize:], v.memfd))
	answer, err := v.ask(reqGetFeatures, nil)
	require.NoError(t, err)
	assert.EqualValues(t, baseFeatures, binary.NativeEndian.Uint64(answer))
}
