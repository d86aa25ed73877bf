package promoted

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// ack is a segment that says nothing else.
const ack = flagACK

func TestRefused(t *testing.T) {
	s := newScript(t)
	s.dial()
	s.irs = s.expect(1)[0].seq
	s.says(flagRST|flagACK, 0, 2, 0, "")
	require.Empty(t, s.done, "a reset of something else")
	s.expect(0)
	s.says(flagRST|flagACK, 0, 1, 0, "")
	require.ErrorIs(t, <-s.done, syscall.ECONNREFUSED)
	s.expect(0)
}

func TestUnreachable(t *testing.T) {
	s := newScript(t)
	s.dial()
	s.expect(1)
	s.find().Unreachable(syscall.EHOSTUNREACH)
	require.ErrorIs(t, <-s.done, syscall.EHOSTUNREACH)
}

// TestRemembered has the guest remember another flow on the same ports (RFC 9293, 3.5.3).
func TestRemembered(t *testing.T) {
	s := newScript(t)
	s.dial()
	s.irs = s.expect(1)[0].seq
	s.says(ack, 77, 4711, 100, "")
	p := s.expect(2)
	assert.EqualValues(t, flagRST, p[0].flags)
	assert.EqualValues(t, 4711, p[0].seq)
	assert.EqualValues(t, flagSYN, p[1].flags)
	s.says(flagSYN|flagACK, 0, 1, 65535, "", 1)
	require.NoError(t, <-s.done)
	s.expect(1)
}

// TestUnanswered has a guest that does not answer asked again, ever more rarely.
func TestUnanswered(t *testing.T) {
	s := newScript(t)
	s.dial()
	s.expect(1)
	s.pass(time.Second)
	s.expect(1)
	s.pass(2*time.Second - time.Millisecond)
	s.expect(0)
	s.pass(time.Millisecond)
	s.expect(1)
	s.pass(time.Hour)
	require.ErrorIs(t, <-s.done, syscall.ETIMEDOUT)
}

func TestCancelled(t *testing.T) {
	s := newScript(t)
	answer := make(chan error, 1)
	cancel := s.table.Start(guest, func(_ relay.GuestConn, err error) { answer <- err })
	cancel()
	cancel()
	require.ErrorIs(t, <-answer, net.ErrClosed)
	s.expect(1)
}

// TestFirstRequest has a client that waits with its request when the guest accepts: the
// handshake ends with a segment of its own, as a gVisor guest needs it.
func TestFirstRequest(t *testing.T) {
	s := newScript(t)
	s.accepted = func() {
		s.copy()
		s.clientSays("ask")
	}
	s.dial()
	s.irs = s.expect(1)[0].seq
	s.says(flagSYN|flagACK, 0, 1, 65535, "", 100)
	require.NoError(t, <-s.done)
	ps := s.expect(2)
	assert.Empty(t, ps[0].payload)
	assert.EqualValues(t, ack, ps[0].flags)
	assert.Equal(t, "ask", string(ps[1].payload))
}

// TestExchange passes requests and answers: the first are acknowledged at once, for a
// guest may wait for that with the rest of its answer, and once each is answered by one
// segment the next request carries it.
func TestExchange(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	seq, next := uint32(1), uint32(1)
	for i := range 10 {
		s.clientSays("ask")
		p := s.expect(1)[0]
		assert.Equal(t, "ask", string(p.payload))
		assert.Equal(t, seq, p.seq)
		assert.Equal(t, next, p.ack, "what came is acknowledged with it")
		seq += 3
		s.says(ack|flagPSH, next, seq, 500, "answer", 101)
		next += 6
		assert.Equal(t, "answer", s.clientReads(6))
		if i < calm {
			p = s.expect(1)[0]
			assert.Equal(t, next, p.ack)
			assert.Empty(t, p.payload)
		} else {
			s.expect(0)
		}
	}
	s.pass(ackDelay)
	p := s.expect(1)[0]
	assert.Equal(t, next, p.ack, "in time")
	assert.Zero(t, s.conn.flight())
	s.pass(time.Hour)
	s.expect(0)
}

// TestCrumbsFromGuest has a guest answer in two segments: the first is acknowledged.
func TestCrumbsFromGuest(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	seq, next := uint32(1), uint32(1)
	for range 10 {
		s.clientSays("ask")
		s.expect(1)
		seq += 3
		for range 2 {
			s.says(ack|flagPSH, next, seq, 500, "an", 101)
			next += 2
			assert.Equal(t, next, s.expect(1)[0].ack)
		}
		s.clientReads(4)
	}
}

// TestBulk sends more than the guest takes at first: super-frames of whole segments up to
// the window, and the rest as it opens; with losses in between, found by duplicate
// acknowledgements and by time.
func TestBulk(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	want := bytes.Repeat([]byte("0123456789abcdef"), 3<<10) // 48 KiB
	s.clientSays(string(want))
	got := make([]byte, len(want))
	take := func(ps []packet) (end uint32) {
		for _, p := range ps {
			copy(got[p.seq-1:], p.payload)
			end = max(end, p.seq-1+uint32(len(p.payload)))
		}
		return end
	}
	first := s.expect(1)[0] // the first window of ten segments
	assert.Len(t, first.payload, 14480)
	assert.EqualValues(t, 1448, first.gso)
	end := take([]packet{first})
	next := uint32(1)
	s.says(ack, next, 1+end, 65535, "", 101)
	s.mu.Lock()
	ps := s.sent
	s.sent = nil
	s.mu.Unlock()
	require.NotEmpty(t, ps)
	for i := range ps {
		ps[i].seq -= s.irs
	}
	lost := ps[0]
	end = take(ps)
	// The first of them is lost: three times the guest asks for it.
	for i := range 3 {
		s.says(ack, next, lost.seq, 65535, "", 102)
		if i < 2 {
			s.expect(0)
		}
	}
	again := s.expect(1)[0]
	assert.Equal(t, lost.seq, again.seq)
	assert.Len(t, again.payload, 1448)
	assert.Equal(t, lost.payload[:1448], again.payload)
	// The guest has everything, and then nothing comes of what follows: time tells.
	s.says(ack, next, 1+end, 65535, "", 103)
	s.mu.Lock()
	ps, s.sent = s.sent, nil
	s.mu.Unlock()
	require.NotEmpty(t, ps)
	for i := range ps {
		ps[i].seq -= s.irs
	}
	una := 1 + end
	take(ps)
	s.pass(time.Second)
	again = s.expect(1)[0]
	assert.Equal(t, una, again.seq)
	assert.Len(t, again.payload, 1448, "slowly")
	for una < uint32(len(want)) {
		una += uint32(len(again.payload))
		s.says(ack, next, una, 65535, "", 104)
		s.mu.Lock()
		ps, s.sent = s.sent, nil
		s.mu.Unlock()
		for i := range ps {
			ps[i].seq -= s.irs
		}
		if len(ps) == 0 {
			break
		}
		take(ps)
		again = ps[len(ps)-1]
		una = again.seq
	}
	assert.Equal(t, want, got)
	s.says(ack, next, uint32(len(want))+1, 65535, "", 105)
	assert.Zero(t, s.conn.flight())
	assert.NotZero(t, s.table.Stats().Retransmits)
	assert.NotZero(t, s.table.Stats().Timeouts)
}

// TestNoRoom has a guest close its window: it is asked for room by one byte, and what is
// to be sent goes when there is some, whole.
func TestNoRoom(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.says(ack, 1, 1, 0, "", 101)
	s.clientSays("hello")
	s.expect(0)
	s.pass(time.Second)
	p := s.expect(1)[0]
	assert.Equal(t, "h", string(p.payload))
	s.says(ack, 1, 1, 0, "", 102)
	s.expect(0)
	for range 30 { // alive, so not given up
		s.pass(maxRTO)
		s.mu.Lock()
		n := len(s.sent)
		s.sent = nil
		s.mu.Unlock()
		if n > 0 {
			s.says(ack, 1, 1, 0, "", 103)
		}
	}
	s.says(ack, 1, 1, 60_000, "", 104)
	ps := s.expect(2)
	assert.EqualValues(t, 1, ps[0].seq)
	assert.EqualValues(t, 2, ps[1].seq)
	assert.Equal(t, "hello", string(ps[0].payload)+string(ps[1].payload))
	s.says(ack, 1, 6, 60_000, "", 105)
	s.clientSays("world")
	assert.Equal(t, "world", string(s.expect(1)[0].payload))
}

// TestIdleWithoutRoom: a guest without room for nothing is left alone.
func TestIdleWithoutRoom(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.says(ack, 1, 1, 0, "", 101)
	s.pass(time.Hour)
	s.expect(0)
	assert.False(t, s.conn.Gone())
}

// TestLinkFullForEver has a guest take no more frames, once with some under way and once
// with none: the flow ends as one that is not answered, and not one that the guest is
// still heard of.
func TestLinkFullForEver(t *testing.T) {
	for _, under := range []bool{true, false} {
		s := newScript(t)
		s.connect(100)
		s.copy()
		if under {
			s.clientSays("hello")
			s.expect(1)
		}
		s.noRoom = true
		s.clientSays("again")
		for range 60 {
			s.pass(time.Minute)
			s.says(ack, 1, 1, 500, "", 101)
		}
		assert.False(t, s.conn.Gone())
		s.pass(5 * time.Minute)
		assert.False(t, s.conn.Gone())
		s.pass(35 * time.Minute) // 15 times 2 min, by then
		assert.ErrorIs(t, <-s.ended[relay.HalfClient], syscall.ETIMEDOUT)
		assert.ErrorIs(t, <-s.ended[relay.HalfGuest], syscall.ETIMEDOUT)
		assert.Zero(t, s.table.Stats().Timeouts)
		s.conn.Abort()
	}
}

// TestLinkFullOnce has the link be full for a while: the flow goes on, and what is lost
// then is sent again as soon as ever.
func TestLinkFullOnce(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.noRoom = true
	s.clientSays("hello")
	s.pass(10 * time.Minute)
	s.noRoom = false
	s.waiter.Room()
	assert.Equal(t, "hello", string(s.expect(1)[0].payload))
	s.pass(firstRTO)
	assert.Equal(t, "hello", string(s.expect(1)[0].payload))
	assert.EqualValues(t, 1, s.table.Stats().Timeouts)
	s.says(ack, 1, 6, 500, "", 101)
	congestion := s.conn.congestion
	s.pass(time.Hour)
	s.expect(0)
	assert.Equal(t, congestion, s.conn.congestion)
}

// TestLinkFull has the link take nothing for a while.
func TestLinkFull(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.noRoom = true
	s.clientSays("hello")
	s.expect(0)
	s.noRoom = false
	require.NotNil(t, s.waiter)
	s.waiter.Room()
	assert.Equal(t, "hello", string(s.expect(1)[0].payload))
	s.says(ack|flagPSH, 1, 6, 100, "answer", 101)
	s.expect(1)
	s.noRoom = true
	s.says(ack|flagPSH, 7, 6, 100, "more", 102)
	s.noRoom = false
	s.waiter.Room()
	assert.EqualValues(t, 11, s.expect(1)[0].ack)
	assert.EqualValues(t, 5, s.conn.towards.Bytes())
}

// TestOutOfPlace holds what RFC 9293 and RFC 5961 say of segments that are not what is
// due: none of them reaches the client, and none ends the flow.
func TestOutOfPlace(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.says(ack|flagPSH, 1, 1, 500, "one", 101)
	assert.EqualValues(t, 4, s.expect(1)[0].ack)
	for name, say := range map[string]func(){
		"again":             func() { s.says(ack|flagPSH, 1, 1, 500, "one", 101) },
		"too early":         func() { s.says(ack|flagPSH, 10, 1, 500, "xxx", 101) },
		"beyond the window": func() { s.says(ack|flagPSH, 100<<20, 1, 500, "xxx", 101) },
		"a reset inside":    func() { s.says(flagRST, 5, 1, 0, "", 101) },
		"a first segment":   func() { s.says(flagSYN|flagACK, 4, 1, 500, "", 101) },
		"of the past":       func() { s.says(ack|flagPSH, 4, 1, 500, "xxx", 99) },
		"of the future":     func() { s.says(ack|flagPSH, 4, 100, 500, "xxx", 101) },
		"a probe":           func() { s.says(ack, 3, 1, 500, "", 101) },
	} {
		say()
		p := s.expect(1)[0]
		assert.EqualValues(t, 4, p.ack, name)
		assert.EqualValues(t, 1, p.seq, name)
	}
	for name, say := range map[string]func(){
		"a reset outside": func() { s.says(flagRST, 100<<20, 1, 0, "", 101) },
		"no flags":        func() { s.says(0, 4, 1, 500, "xxx", 101) },
	} {
		say()
		s.expect(0)
		assert.False(t, s.conn.Gone(), name)
	}
	// What overlaps is cut.
	s.says(ack|flagPSH, 1, 1, 500, "onetwo", 101)
	assert.EqualValues(t, 7, s.expect(1)[0].ack)
	assert.Equal(t, "onetwo", s.clientReads(6))
	s.says(flagRST, 7, 1, 0, "", 101)
	assert.ErrorIs(t, <-s.ended[relay.HalfClient], syscall.ECONNRESET)
	assert.ErrorIs(t, <-s.ended[relay.HalfGuest], syscall.ECONNRESET)
	assert.True(t, s.conn.Gone())
	s.conn.Abort()
}

// TestClientFirst ends the client's stream first, and the guest's long after.
func TestClientFirst(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.clientSays("bye")
	s.expect(1)
	require.NoError(t, s.client.CloseWrite())
	assert.Eventually(t, func() bool {
		s.ours.ready(relay.ReadyRead | relay.ReadyEnd)
		return len(s.ended[relay.HalfClient]) == 1
	}, 5*time.Second, time.Millisecond)
	require.NoError(t, <-s.ended[relay.HalfClient])
	s.expect(0)
	require.NoError(t, s.conn.CloseWrite())
	p := s.expect(1)[0]
	assert.EqualValues(t, flagFIN|flagACK, p.flags)
	assert.EqualValues(t, 4, p.seq)
	s.says(ack|flagPSH, 1, 4, 500, "later", 101)
	assert.Equal(t, "later", s.clientReads(5))
	s.expect(1)
	s.pass(time.Second)
	assert.EqualValues(t, flagFIN|flagACK, s.expect(1)[0].flags, "again")
	s.says(ack, 6, 5, 500, "", 102)
	s.says(ack|flagFIN, 6, 5, 500, "", 103)
	require.NoError(t, <-s.ended[relay.HalfGuest])
	require.NoError(t, s.conn.Close())
	assert.EqualValues(t, 7, s.expect(1)[0].ack)
	// The guest has not heard, and says so again.
	s.says(ack|flagFIN, 6, 5, 500, "", 103)
	assert.EqualValues(t, 7, s.expect(1)[0].ack)
	assert.Equal(t, 1, s.table.Stats().Flows)
	s.pass(timeWait)
	assert.Zero(t, s.table.Stats().Flows)
	s.expect(0)
}

// TestGuestFirst ends the guest's stream first: it is answered by the client's end.
func TestGuestFirst(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.says(ack|flagFIN|flagPSH, 1, 1, 500, "bye", 101)
	require.NoError(t, <-s.ended[relay.HalfGuest])
	assert.Equal(t, "bye", s.clientReads(3))
	assert.EqualValues(t, 5, s.expect(1)[0].ack)
	s.clientSays("so long")
	assert.EqualValues(t, 5, s.expect(1)[0].ack)
	require.NoError(t, s.client.Close())
	assert.Eventually(t, func() bool {
		s.ours.ready(relay.ReadyRead | relay.ReadyEnd)
		return len(s.ended[relay.HalfClient]) == 1
	}, 5*time.Second, time.Millisecond)
	require.NoError(t, s.conn.Close())
	p := s.expect(1)[0]
	assert.EqualValues(t, flagFIN|flagACK, p.flags)
	assert.EqualValues(t, 8, p.seq)
	s.says(ack, 5, 9, 500, "", 102)
	assert.Zero(t, s.table.Stats().Flows, "there is nothing to wait for")
}

// TestCloseBeforeAcknowledged closes a flow whose guest has not acknowledged what its
// client has sent, which is given to it all the same.
func TestCloseBeforeAcknowledged(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	want := strings.Repeat("x", 40_000)
	s.clientSays(want)
	first := s.expect(1)[0]
	s.says(ack|flagFIN, 1, 1+uint32(len(first.payload)), 65535, "", 101)
	require.NoError(t, <-s.ended[relay.HalfGuest])
	require.NoError(t, s.client.Close())
	assert.Eventually(t, func() bool {
		s.ours.ready(relay.ReadyRead | relay.ReadyEnd)
		return len(s.ended[relay.HalfClient]) == 1
	}, 5*time.Second, time.Millisecond)
	s.mu.Lock()
	s.sent = nil // all is lost
	s.mu.Unlock()
	require.NoError(t, s.conn.Close())
	s.ours.File.Close()
	s.expect(1) // the end of the stream
	una := 1 + uint32(len(first.payload))
	got := len(first.payload)
	for range 100 {
		s.pass(time.Second)
		s.mu.Lock()
		ps := s.sent
		s.sent = nil
		s.mu.Unlock()
		for _, p := range ps {
			if p.seq-s.irs == una {
				got += len(p.payload)
				una += uint32(len(p.payload))
			}
		}
		s.says(ack, 2, una, 65535, "", 102)
		if got == len(want) {
			break
		}
	}
	assert.Equal(t, len(want), got)
	s.says(ack, 2, una+1, 65535, "", 103)
	assert.Zero(t, s.table.Stats().Flows)
}

// TestSlowClient has a client that reads nothing: the guest is held up by its window,
// and goes on when the client does.
func TestSlowClient(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	chunk := strings.Repeat("y", 32<<10)
	sent, room := uint32(0), 0
	for range 1000 {
		s.says(ack|flagPSH, 1+sent, 1, 500, chunk, 101)
		p := s.expect(1)[0]
		if p.ack == 1+sent {
			break
		}
		sent = p.ack - 1
		if room = int(p.window) << ownScale; room == 0 {
			break
		}
	}
	require.Zero(t, room, "the guest was never told to stop")
	assert.LessOrEqual(t, s.conn.pending.size, s.window)
	s.says(ack|flagPSH, 1+sent, 1, 500, "z", 101) // a probe
	assert.EqualValues(t, 1+sent, s.expect(1)[0].ack)
	got := s.clientReads(int(sent) - s.conn.pending.size)
	s.ours.ready(relay.ReadyWrite)
	p := s.expect(1)[0]
	assert.NotZero(t, p.window, "there is room again, and the guest is told")
	for len(got) < int(sent) {
		got += s.clientReads(min(64<<10, int(sent)-s.conn.pending.size-len(got)))
		s.ours.ready(relay.ReadyWrite)
	}
	assert.Equal(t, strings.Repeat("y", int(sent)), got)
	assert.Zero(t, s.conn.pending.size)
}

// TestBatch has a batch bring many segments, and whatever else may happen to the flow
// before it ends: the client has what came before, in order.
func TestBatch(t *testing.T) {
	const segments = 3*maxGathered + 1
	want := ""
	for i := range segments {
		want += fmt.Sprintf("segment %02d ", i)
	}
	size := uint32(len(want) / segments)
	for name, tc := range map[string]struct {
		then  func(s *script)
		ended map[relay.Half]error
	}{
		"nothing else": {then: func(*script) {}},
		"the guest's end": {
			func(s *script) { s.brings(ack|flagFIN, 1+segments*size, 1, 500, "", 101) },
			map[relay.Half]error{relay.HalfGuest: nil},
		},
		"a reset": {
			func(s *script) { s.brings(flagRST, 1+segments*size, 1, 0, "", 101) },
			map[relay.Half]error{relay.HalfGuest: syscall.ECONNRESET, relay.HalfClient: syscall.ECONNRESET},
		},
		"the client's end": {
			func(s *script) {
				require.NoError(s.t, s.client.CloseWrite())
				require.Eventually(s.t, func() bool { s.ours.ready(relay.ReadyRead); return len(s.ended[relay.HalfClient]) == 1 }, 5*time.Second, time.Millisecond)
			},
			map[relay.Half]error{relay.HalfClient: nil},
		},
		"a close": {
			func(s *script) { require.NoError(s.t, s.conn.Close()) },
			map[relay.Half]error{relay.HalfGuest: net.ErrClosed, relay.HalfClient: net.ErrClosed},
		},
		"an abort": {
			func(s *script) { s.conn.Abort() },
			map[relay.Half]error{relay.HalfGuest: net.ErrClosed, relay.HalfClient: net.ErrClosed},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t)
			s.connect(100)
			s.copy()
			for i := range uint32(segments) {
				s.brings(ack|flagPSH, 1+i*size, 1, 500, want[i*size:(i+1)*size], 101)
			}
			tc.then(s)
			s.end()
			assert.Equal(t, want, s.clientReads(len(want)))
			for half, err := range tc.ended {
				assert.ErrorIs(t, <-s.ended[half], err)
			}
			assert.Zero(t, s.conn.gathered)
			s.conn.Abort()
		})
	}
}

// TestTwoBatches has two readers bring segments of one flow: the frames of one are gone
// before the other's batch ends.
func TestTwoBatches(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	first, second := s.batch, s.table.NewBatch()
	s.brings(ack|flagPSH, 1, 1, 500, "one ", 101)
	framesOfFirst := s.frames
	s.batch, s.frames = second, nil
	s.brings(ack|flagPSH, 5, 1, 500, "two ", 101)
	s.end()
	s.expect(0)
	s.brings(ack|flagPSH, 9, 1, 500, "three ", 101)
	s.end()
	s.batch, s.frames = first, framesOfFirst
	s.brings(ack|flagPSH, 15, 1, 500, "four", 101)
	s.end()
	assert.EqualValues(t, 19, s.expect(1)[0].ack)
	assert.Equal(t, "one two three four", s.clientReads(18))
}

// TestSlowClientBatches has a client whose socket fills up amid a batch: what it has no
// room for is kept, though the frames are gone.
func TestSlowClientBatches(t *testing.T) {
	s := newScript(t)
	s.window = 4 << 20
	s.connect(100)
	s.copy()
	var want strings.Builder
	for batch := 0; s.conn.pending.size < 1<<20; batch++ {
		require.Less(t, batch, 1000, "the client's socket never filled up")
		for i := range maxGathered - 1 {
			chunk := strings.Repeat(string(rune('a'+(batch+i)%26)), 32<<10)
			s.brings(ack|flagPSH, 1+uint32(want.Len()), 1, 500, chunk, 101)
			want.WriteString(chunk)
		}
		s.end()
		p := s.expect(1)[0]
		require.EqualValues(t, 1+want.Len(), p.ack)
		require.Equal(t, s.conn.pending.size > 0, s.conn.full, "nobody else would say that there is room again")
	}
	got := ""
	for len(got) < want.Len() {
		got += s.clientReads(min(64<<10, want.Len()-s.conn.pending.size-len(got)))
		s.ours.ready(relay.ReadyWrite)
	}
	assert.True(t, want.String() == got, "the client has what the guest has sent")
}

// TestKeepAlive has a silent guest probed, and given up within 90 s (C-14).
func TestKeepAlive(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	require.NoError(t, s.conn.KeepAlive())
	s.pass(keepAliveIdle)
	p := s.expect(1)[0]
	assert.EqualValues(t, 0, p.seq, "from before what it has")
	s.says(ack, 1, 1, 500, "", 101)
	s.pass(74 * time.Second)
	s.expect(4)
	assert.False(t, s.conn.Gone())
	s.pass(16 * time.Second)
	assert.True(t, s.conn.Gone())
	assert.ErrorIs(t, <-s.ended[relay.HalfGuest], syscall.ETIMEDOUT)
	s.conn.Abort()
}

// TestAbort resets the guest's end.
func TestAbort(t *testing.T) {
	s := newScript(t)
	s.connect(0)
	s.copy()
	s.clientSays("hello")
	s.expect(1)
	s.conn.Abort()
	s.conn.Abort()
	p := s.expect(1)[0]
	assert.EqualValues(t, flagRST|flagACK, p.flags)
	assert.EqualValues(t, 6, p.seq)
	assert.ErrorIs(t, <-s.ended[relay.HalfClient], net.ErrClosed)
	assert.ErrorIs(t, <-s.ended[relay.HalfGuest], net.ErrClosed)
	assert.Zero(t, s.table.Stats().Flows)
}

// TestPlainGuest has a guest that knows no option: windows are not scaled, segments are
// of 536 bytes at most, and round trips are not measured.
func TestPlainGuest(t *testing.T) {
	s := newScript(t)
	s.dial()
	s.irs = s.expect(1)[0].seq
	s.batch.Take(s.find(), &Segment{seq: s.iss, ack: s.irs + 1, flags: flagSYN | flagACK, window: 1000, scale: -1})
	s.batch.End()
	require.NoError(t, <-s.done)
	s.expect(1)
	s.copy()
	s.clientSays(strings.Repeat("x", 1200))
	p := s.expect(1)[0]
	assert.Len(t, p.payload, 536, "the window's one whole segment")
	assert.False(t, p.stamped)
	assert.LessOrEqual(t, int(p.window), 65535)
	s.says(ack, 1, 537, 2000, "")
	assert.Len(t, s.expect(1)[0].payload, 664)
}

func TestPorts(t *testing.T) {
	s := newScript(t)
	s.table.opts.LastPort = 2050
	for range 3 {
		s.dial()
	}
	s.dial()
	require.ErrorIs(t, <-s.done, syscall.EADDRNOTAVAIL)
	s.expect(3)
}

// TestCloseLeavesNothing closes a flow whose guest has acknowledged a part of a bulk: the
// client's socket holds nothing then, or its end would become a reset.
func TestCloseLeavesNothing(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.clientSays(strings.Repeat("x", 48<<10))
	s.says(ack, 1, 14481, 65535, "", 101)
	s.says(ack|flagFIN, 1, 20001, 65535, "", 101)
	require.NoError(t, s.client.CloseWrite())
	assert.Eventually(t, func() bool {
		s.ours.ready(relay.ReadyRead | relay.ReadyEnd)
		s.says(ack, 2, 14481+uint32(s.conn.flight())/2, 65535, "", 101)
		return len(s.ended[relay.HalfClient]) == 1
	}, 5*time.Second, time.Millisecond)
	require.NoError(t, s.conn.Close())
	left, err := unix.IoctlGetInt(s.ours.fd, unix.TIOCINQ)
	require.NoError(t, err)
	assert.Zero(t, left)
	s.mu.Lock()
	s.sent = nil
	s.mu.Unlock()
	s.says(ack, 2, 1+48<<10+1, 65535, "", 102)
	assert.Zero(t, s.table.Stats().Flows)
}

// TestLossOverLinkThatFills has a guest that sends, and a link that is full now and then
// or nearly always: what was lost is sent again all the same, however often the flow, which
// has to acknowledge, is told of room.
func TestLossOverLinkThatFills(t *testing.T) {
	for _, full := range []time.Duration{100 * time.Millisecond, 700 * time.Millisecond} {
		s := newScript(t)
		s.connect(100)
		s.copy()
		s.clientSays("hello")
		s.expect(1) // lost
		again := 0
		for i := range uint32(15) {
			s.noRoom = true
			s.says(ack|flagPSH, 1+4*i, 1, 500, "data", 101)
			s.pass(full)
			s.noRoom = false
			s.waiter.Room()
			s.pass(700*time.Millisecond - full)
			s.mu.Lock()
			for _, p := range s.sent {
				if string(p.payload) == "hello" {
					again++
				}
			}
			s.sent = nil
			s.mu.Unlock()
		}
		assert.NotZero(t, again, full)
		assert.Equal(t, strings.Repeat("data", 15), s.clientReads(60))
		// Once it has come it is not sent any more.
		s.says(ack, 61, 6, 500, "", 101)
		s.noRoom = true
		s.says(ack|flagPSH, 61, 6, 500, "data", 101)
		s.clientSays("more")
		s.noRoom = false
		s.waiter.Room()
		assert.Equal(t, "more", string(s.expect(1)[0].payload))
	}
}

// TestWindowAmidBatch sends again amid a batch: the window that goes with it leaves room for
// what the client has not been given yet.
func TestWindowAmidBatch(t *testing.T) {
	s := newScript(t)
	s.window = 30_000
	s.connect(100)
	s.copy()
	s.clientSays(strings.Repeat("x", 14480))
	s.expect(1)
	s.brings(ack|flagPSH, 1, 1, 65535, strings.Repeat("y", 10_000), 101)
	for range dupThreshold {
		s.brings(ack, 10_001, 1, 65535, "", 101)
	}
	p := s.expect(1)[0]
	assert.Len(t, p.payload, 1448)
	assert.EqualValues(t, 10_001, p.ack)
	assert.EqualValues(t, s.window-10_000, p.window)
	s.end()
}

// TestTurns has a flow in bulk have events while another waits for its turn: it waits behind
// it, and what has become of it meanwhile is seen to then.
func TestTurns(t *testing.T) {
	for name, tc := range map[string]struct {
		then func(s *script)
		all  bool // is sent
		err  error
	}{
		"nothing else":     {func(*script) {}, true, nil},
		"the client's end": {func(s *script) { require.NoError(s.t, s.client.CloseWrite()) }, true, nil},
		"an abort":         {func(s *script) { s.conn.Abort(); s.expect(1) }, false, net.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t)
			s.table.queue.wake = func() {} // as with a loop, which is this test
			s.connect(100)
			s.copy()
			const size = 48 << 10
			s.clientSays(strings.Repeat("x", size))
			sent := len(s.expect(1)[0].payload)
			s.table.queue.add(newConn(s.table, guest, nil))
			s.brings(ack, 1, 1+uint32(sent)/2, 65535, "", 101)
			if name != "nothing else" { // then the end of the batch is the first event
				s.ours.ready(relay.ReadyRead)
			}
			s.end()
			s.ours.ready(relay.ReadyRead)
			require.Empty(t, s.take())
			tc.then(s)
			for range 100 {
				s.table.queue.round()
				for _, p := range s.take() {
					sent = int(p.seq-s.irs) - 1 + len(p.payload)
				}
				if s.conn.Gone() || sent >= size {
					break
				}
				s.says(ack, 1, 1+uint32(sent), 65535, "", 101)
			}
			assert.Equal(t, tc.all, sent == size)
			if name != "nothing else" {
				require.Eventually(t, func() bool {
					s.ours.ready(relay.ReadyRead | relay.ReadyEnd)
					s.table.queue.round()
					return len(s.ended[relay.HalfClient]) == 1
				}, 5*time.Second, time.Millisecond)
				assert.ErrorIs(t, <-s.ended[relay.HalfClient], tc.err)
			}
			assert.False(t, s.table.queue.waiting())
		})
	}
}

// TestLinkFullForEverUnheld has a guest take no more frames of a flow of which nothing is
// under way, nor kept: of a client that has sent, and of one that has ended its stream.
func TestLinkFullForEverUnheld(t *testing.T) {
	for name, then := range map[string]func(s *script){
		"bytes": func(s *script) {
			s.table.held.Add(maxHeld)
			s.t.Cleanup(func() { s.table.held.Add(-maxHeld) })
			s.clientSays("hello")
		},
		"an end": func(s *script) { require.NoError(s.t, s.conn.CloseWrite()) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t)
			s.connect(100)
			s.copy()
			s.noRoom = true
			then(s)
			require.Equal(t, s.conn.una, s.conn.max)
			s.pass(time.Minute)
			assert.False(t, s.conn.Gone())
			s.pass(time.Hour)
			assert.ErrorIs(t, <-s.ended[relay.HalfGuest], syscall.ETIMEDOUT)
			s.conn.Abort()
		})
	}
}
