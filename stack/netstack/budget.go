package netstack

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// sendTotal is what all flows together have under way to guests before each
	// gets less than its share, and leastSend what it gets then at least. A flow
	// alone moves more with much under way, for a guest that is not scheduled for
	// a millisecond still has work; 64 flows with 8 MiB each had half a gigabyte
	// under way, all of it out of the caches, and cost four times the processor
	// time a byte that they cost with half a mebibyte each.
	sendTotal = 64 << 20
	leastSend = 512 << 10
)

// A Budget bounds the memory of all TCP flows together, over every VM (C-17).
// Each direction of each flow may buffer an equal share of Total, never more
// than Flow, and towards the guest of sendTotal. The share follows the number of
// flows in powers of two; a flow whose buffer has already grown beyond a new
// share keeps it. Safe for concurrent use.
type Budget struct {
	flow, total int

	receiveShare atomic.Int64 // share.receive, for who reads it often

	mu     sync.Mutex
	flows  int
	share  shares
	stacks map[*stack.Stack]struct{}
}

// shares is what a flow may buffer towards the guest and from it, in bytes.
type shares struct{ send, receive int }

// NewBudget returns a Budget of at most flow bytes for each direction of a
// flow and about total bytes together. Zero means 8 MiB and 1 GiB.
func NewBudget(flow, total int) *Budget {
	if flow == 0 {
		flow = 8 << 20
	}
	if total == 0 {
		total = 1 << 30
	}
	b := &Budget{flow: flow, total: total, share: shares{flow, flow}, stacks: make(map[*stack.Stack]struct{})}
	b.receiveShare.Store(int64(flow))
	return b
}

// receive returns what a flow may buffer from the guest, in bytes.
func (b *Budget) receive() int { return int(b.receiveShare.Load()) }

// join makes s follow the budget.
func (b *Budget) join(s *stack.Stack) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stacks[s] = struct{}{}
	return tuneTCP(s, b.share)
}

// leave ends what join began.
func (b *Budget) leave(s *stack.Stack) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.stacks, s)
}

// add counts n flows more (or fewer), and shares anew when their number has
// crossed a power of two.
func (b *Budget) add(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.flows += n
	share := shares{b.flow, b.flow}
	if b.flows > 0 {
		power := bits.Len(uint(b.flows))                                // the next power of two flows
		share.receive = max(minBuffer, min(b.flow, b.total>>(power+1))) // half of it each way
		share.send = min(share.receive, max(leastSend, sendTotal>>power))
	}
	if share == b.share {
		return
	}
	b.share = share
	b.receiveShare.Store(int64(share.receive))
	for s := range b.stacks {
		// The range was valid when the stack joined; only its top changes.
		_ = setBuffers(s, share)
	}
}
