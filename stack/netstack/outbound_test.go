package netstack

import (
	"slices"
	"testing"

	"github.com/culvertnet/culvert/datapath"
	"github.com/stretchr/testify/assert"
)

// A narrow is a QueuePair that takes as many frames as it has room for.
type narrow struct {
	datapath.QueuePair
	room, tries int
}

func (n *narrow) WriteBatch(frames []datapath.Frame) (int, error) {
	n.tries++
	taken := min(n.room, len(frames))
	n.room -= taken
	return taken, nil
}

// A sending is somebody with frames to send, in order.
type sending struct {
	out  *outbound
	left int
	over bool
	sent *[]*sending
}

func (s *sending) Room() {
	for s.left > 0 && s.out.sendOrWait(make([]datapath.Frame, 1), s) == 1 {
		s.left--
		*s.sent = append(*s.sent, s)
	}
}

func (s *sending) Over() bool { return s.over }

// TestWaitersThatGiveUp has a guest take nothing while flows come and give up: those that
// wait on keep their order, the others are forgotten.
func TestWaitersThatGiveUp(t *testing.T) {
	link := &narrow{}
	out := newOutbound(link, nil)
	var sent, patient []*sending
	for i := range 100_000 {
		s := &sending{out: out, left: 1, sent: &sent}
		s.Room()
		if i%1000 == 0 {
			patient = append(patient, s)
		} else {
			s.over = true
		}
		assert.LessOrEqual(t, len(out.waiters), 8*len(patient)+16)
	}
	link.room = 1 << 20
	out.tellWaiters()
	assert.Equal(t, patient, slices.DeleteFunc(sent, (*sending).Over))
	assert.Empty(t, out.waiters)
}

// TestWaitersTakeTurns has many wait for a guest that takes one frame at a time: each frame
// costs a few tries, not one of everybody, and everybody has a turn.
func TestWaitersTakeTurns(t *testing.T) {
	const all = 100
	link := &narrow{}
	out := newOutbound(link, nil)
	var sent []*sending
	for range all {
		(&sending{out: out, left: 3, sent: &sent}).Room()
	}
	for range 3 * all {
		assert.NotZero(t, out.stuck.Load(), "a guest that takes nothing shows (Stalled)")
		link.room, link.tries = 1, 0
		out.tellWaiters()
		assert.LessOrEqual(t, link.tries, 2)
	}
	turns := make(map[*sending]int)
	for i, s := range sent {
		turns[s]++
		assert.Equal(t, i/all+1, turns[s], "frame %d", i)
	}
	assert.Len(t, sent, 3*all)
	assert.Empty(t, out.waiters)
	assert.Zero(t, out.stuck.Load())
}
