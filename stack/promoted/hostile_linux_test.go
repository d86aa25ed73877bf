package promoted

import (
	"testing"

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
