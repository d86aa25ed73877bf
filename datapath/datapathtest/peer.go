package datapathtest

import "time"

// A Peer is the guest's end of a transport under test: it sends and receives
// raw Ethernet frames. Conformance calls Send and Recv from one goroutine each,
// at the same time.
//
// A Peer may have two more methods that tell Conformance about the transport:
//
//	MaxFrame() int   // the longest frame it carries, in bytes; 1514 without it
//	NeverFull() bool // it takes every frame at once: WriteBatch is never short
type Peer interface {
	// Send sends one frame to our end. It may wait for our end to read, and
	// returns when the peer leaves. An error means that the transport cannot
	// carry this frame.
	Send(frame []byte) error
	// Recv returns the next frame our end sent, in memory the caller may keep.
	// Nothing but Recv reads from the transport: a peer that does not call it is
	// a guest that takes no frames. An error means that none came within timeout.
	Recv(timeout time.Duration) ([]byte, error)
	// Leave makes the guest's side go away, as when its process dies, and frees
	// what the peer holds. It may be called while Send and Recv are under way,
	// and after our end has closed. Leaving again does nothing and returns nil.
	Leave() error
}

func maxFrame(p Peer) int {
	if m, ok := p.(interface{ MaxFrame() int }); ok {
		return m.MaxFrame()
	}
	return 1514 // Ethernet header 14 + MTU 1500
}

func neverFull(p Peer) bool {
	f, ok := p.(interface{ NeverFull() bool })
	return ok && f.NeverFull()
}
