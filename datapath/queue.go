package datapath

// A Queue is a reading of what one queue towards the guest, or from it, has
// counted since the attachment began. Frames and bytes are in Stats.
type Queue struct {
	Pair    int  // the queue pair's index
	ToGuest bool // which of the pair's two
	// Kicks and Polls count how it was found that the driver had put something into
	// an empty queue: it woke us, or we were looking.
	Kicks, Polls uint64
	// Calls and Quiet count how often the driver was shown what we had put into the
	// queue, or done with: it had asked to be woken by that, or not to be.
	Calls, Quiet uint64
	// Super counts super-frames, Partial the other frames that came without their
	// checksum. (A super-frame has none either.)
	Super, Partial uint64
}

// SetQueues has Queues answer with read from now on. A transport calls it before
// anybody has the attachment.
func (s *Stats) SetQueues(read func() []Queue) { s.queues = read }

// Queues reads what each queue has counted, in no order: nil where the transport
// does not count it, and once the attachment has been closed. It may hold up
// the traffic for as long as reading a few numbers takes.
func (s *Stats) Queues() []Queue {
	if s.queues == nil {
		return nil
	}
	return s.queues()
}
