package promoted

import (
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestSegmentBeforeOurs has the guest guess the next flow's ports: a segment of its own
// comes before our first.
func TestSegmentBeforeOurs(t *testing.T) {
	for name, seg := range map[string]Segment{
		"an acknowledgement":    {ack: 4711, flags: flagACK, scale: -1},
		"an acceptance":         {ack: 1, flags: flagSYN | flagACK, scale: -1, window: 1000},
		"a refusal":             {ack: 1, flags: flagRST | flagACK, scale: -1},
		"one of nothing at all": {scale: -1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t)
			s.begun = func() { s.batch.Take(s.find(), &seg); s.batch.End() }
			s.dial()
			require.Empty(t, s.done)
			s.mu.Lock()
			syn := s.sent[len(s.sent)-1]
			s.sent = nil
			s.mu.Unlock()
			s.irs = syn.seq
			assert.EqualValues(t, flagSYN, syn.flags)
			s.says(flagSYN|flagACK, 0, 1, 65535, "", 1)
			require.NoError(t, <-s.done)
			assert.EqualValues(t, 1, s.expect(1)[0].seq)
		})
	}
}

// TestRememberedWithoutRoom has a guest take no frames and say again and again that it
// remembers another flow: what is kept to answer it does not grow.
func TestRememberedWithoutRoom(t *testing.T) {
	s := newScript(t)
	s.dial()
	s.irs = s.expect(1)[0].seq
	s.noRoom = true
	for range 100 {
		s.says(ack, 77, 4711, 100, "")
	}
	assert.LessOrEqual(t, s.waits, 1)
	s.noRoom = false
	s.waiter.Room()
	assert.EqualValues(t, flagSYN, s.expect(1)[0].flags)
}

// closing returns a flow that both sides have ended and that was closed; the guest has not
// acknowledged our end, which is at 4.
func closing(t *testing.T) *script {
	t.Helper()
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
	require.NoError(t, s.conn.CloseWrite())
	s.expect(1)
	s.says(ack|flagFIN, 1, 4, 500, "", 101)
	s.expect(1)
	require.NoError(t, <-s.ended[relay.HalfGuest])
	require.NoError(t, s.conn.Close())
	return s
}

// TestEndAcknowledgedByAnOldSegment: the guest, which has not heard that its own end has
// come, says so again, and with it that ours has.
func TestEndAcknowledgedByAnOldSegment(t *testing.T) {
	s := closing(t)
	s.says(ack|flagFIN, 1, 5, 500, "", 102)
	assert.EqualValues(t, 2, s.expect(1)[0].ack)
	s.pass(timeWait)
	assert.Zero(t, s.table.Stats().Flows)
}

// TestGuestThatNeverHasAll has a guest answer whatever it is sent, and never acknowledge
// the end of a flow that is closed: it is given up.
func TestGuestThatNeverHasAll(t *testing.T) {
	s := closing(t)
	for range 1000 {
		s.pass(time.Second)
		if s.table.Stats().Flows == 0 {
			break
		}
		s.says(ack, 2, 4, 0, "", 102)
	}
	assert.Zero(t, s.table.Stats().Flows)
}

// TestRoomAfterAll has the link take nothing of what is to be sent again, which the guest
// then turns out to have: its window is not passed.
func TestRoomAfterAll(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.clientSays(strings.Repeat("x", 14480+10_000))
	s.expect(1)
	s.noRoom = true
	for range dupThreshold {
		s.says(ack, 1, 1, 65535, "", 101)
	}
	require.True(t, s.conn.missing)
	s.says(ack, 1, 14481, 0, "", 102)
	s.noRoom = false
	s.waiter.Room()
	for _, p := range s.expect(0) {
		assert.Empty(t, p.payload)
	}
}

// TestTableClosedWhileClientReads closes the Table while a client has not read what came
// before the guest's reset.
func TestTableClosedWhileClientReads(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	chunk := strings.Repeat("y", 32<<10)
	sent := uint32(0)
	for s.conn.pending.size == 0 {
		s.says(ack|flagPSH, 1+sent, 1, 500, chunk, 101)
		sent += uint32(len(chunk))
	}
	s.says(flagRST, 1+sent, 1, 0, "", 101)
	require.Empty(t, s.ended[relay.HalfGuest], "the client has not read all")
	s.table.Close()
	select {
	case <-s.ended[relay.HalfGuest]:
	case <-time.After(5 * time.Second):
		t.Fatal("the flow has not ended")
	}
}

// TestClientGoneWithoutRoom has a client reset its connection while a guest that has taken
// its window back is asked for room: the flow ends.
func TestClientGoneWithoutRoom(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	s.clientSays(strings.Repeat("x", 10_000))
	s.expect(1)
	s.says(ack, 1, 1, 0, "", 101)
	s.pass(time.Second)
	require.Len(t, s.expect(1)[0].payload, 1)
	s.says(ack, 1, 1, 0, "", 102)
	require.NoError(t, s.client.SetLinger(0))
	require.NoError(t, s.client.Close())
	assert.Eventually(t, func() bool {
		s.ours.ready(relay.ReadyRead | relay.ReadyWrite | relay.ReadyEnd)
		return len(s.ended[relay.HalfClient]) == 1
	}, 2*time.Second, time.Millisecond)
}

// TestGuestThatIsNeverDone has a guest send for ever what belongs to a flow that both sides
// have ended: it is forgotten in time all the same.
func TestGuestThatIsNeverDone(t *testing.T) {
	s := closing(t)
	s.says(ack, 2, 5, 500, "", 102)
	for range 10 {
		if s.pass(timeWait / 2); s.table.Stats().Flows == 0 {
			return
		}
		s.says(ack|flagFIN, 1, 5, 500, "", 103)
	}
	assert.Fail(t, "the flow is still there")
}
