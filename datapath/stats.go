package datapath

import "sync/atomic"

// Stats counts what passed an Attachment. Every field is safe for concurrent
// use and only ever rises. Reading needs no lock; the fields are not a
// consistent cut.
type Stats struct {
	ToGuest   Direction
	FromGuest Direction

	drops  [numDropReasons]atomic.Uint64
	watch  atomic.Pointer[func(DropReason)]
	queues func() []Queue // nil where the transport counts nothing of them
}

// Direction counts one direction's frames and their bytes, virtio-net headers
// not included. A GSO super-frame is one frame.
type Direction struct {
	Frames atomic.Uint64
	Bytes  atomic.Uint64
}

// A DropReason says why our own layers dropped a frame.
type DropReason uint8

// The reasons, with the words that users see in String.
const (
	DropTooLong     DropReason = iota // longer than MaxFrame or the peer's buffers
	DropTooShort                      // shorter than an Ethernet header, or cut short on the wire
	DropBadHeader                     // virtio-net header impossible for this frame
	DropNotOffered                    // uses an offload that was not negotiated
	DropBadChecksum                   // checksum wrong and not marked partial
	DropForeign                       // source address is not the guest's to use
	DropSpoofed                       // claims an address of the gateway
	DropUnwanted                      // broadcast, multicast or protocol nobody here serves
	DropQueueFull                     // bounded queue towards the guest overflowed
	DropLinkDown                      // the guest's interface is down
	DropNoMemory                      // out of memory or buffers
	DropRejected                      // transport refused the frame
	numDropReasons
)

var dropNames = [numDropReasons]string{
	"too-long", "too-short", "bad-header", "not-offered", "bad-checksum", "foreign-source",
	"spoofed-source", "unwanted", "queue-full", "link-down", "no-memory", "rejected",
}

// DropReasons returns all reasons there are.
func DropReasons() []DropReason {
	all := make([]DropReason, numDropReasons)
	for i := range all {
		all[i] = DropReason(i)
	}
	return all
}

// String returns the reason's name, as in `culvert vms` and the metrics.
func (r DropReason) String() string {
	if r >= numDropReasons {
		return "unknown"
	}
	return dropNames[r]
}

// Drop counts one dropped frame.
func (s *Stats) Drop(r DropReason) {
	s.DropShown(r)
	if watch := s.watch.Load(); watch != nil {
		(*watch)(r)
	}
}

// DropShown counts one dropped frame that a DropObserver was shown.
func (s *Stats) DropShown(r DropReason) { s.drops[r].Add(1) }

// Watch has f called for every Drop from now on, in its caller's goroutine: f
// does not wait. There is one f.
func (s *Stats) Watch(f func(DropReason)) { s.watch.Store(&f) }

// Drops returns the number of frames dropped for reason r.
func (s *Stats) Drops(r DropReason) uint64 { return s.drops[r].Load() }

// AllDrops returns the reasons that have counted anything, by name.
func (s *Stats) AllDrops() map[string]uint64 {
	m := make(map[string]uint64)
	for r := range numDropReasons {
		if n := s.drops[r].Load(); n > 0 {
			m[r.String()] = n
		}
	}
	return m
}
