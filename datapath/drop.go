package datapath

// A DropObserver is a QueuePair that wants to see the frames that its user drops:
// package trace's, whose records then say why. What it is shown is counted with
// Stats.DropShown.
type DropObserver interface {
	// DroppedFromGuest is told of a frame of the last ReadBatch's, by the goroutine
	// that reads and before it reads again.
	DroppedFromGuest(f *Frame, why DropReason)
	// DroppedToGuest is told of a frame that no WriteBatch took.
	DroppedToGuest(f *Frame, why DropReason)
}
