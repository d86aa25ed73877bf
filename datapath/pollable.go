package datapath

// A Pollable is a QueuePair whose reader may wait by itself, together with what else
// it waits for. It calls TryReadBatch in ReadBatch's place, from one goroutine.
type Pollable interface {
	QueuePair
	// Control calls f with a descriptor that is readable while there are frames, and
	// closed with the attachment. f does not keep it, except in an epoll set.
	Control(f func(fd uintptr)) error
	// TryReadBatch is ReadBatch that does not wait: n is 0 when there is no frame, or no
	// room for one in frames.
	TryReadBatch(frames []Frame, get func(n int) [][]byte) (n int, err error)
	// OnEnd has ended called, soon and once, when TryReadBatch has begun to fail, which
	// the descriptor may not show. It is called before the first TryReadBatch.
	OnEnd(ended func())
}
