package vhostuser

import (
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// What a ring counts costs its users nothing but the additions: they hold the
// device's lock for reading and take turns at a ring, so the numbers are plain
// ones, and who reads them holds the lock for writing, for longer than no batch.

// count counts a frame that passed the ring, by what its header leaves undone.
func (r *vring) count(hdr *virtio.NetHdr) {
	switch {
	case hdr.GSOType != virtio.GSONone:
		r.counts.Super++
	case hdr.Flags&virtio.FlagNeedsCSum != 0:
		r.counts.Partial++
	}
}

// flush shows the driver everything pushed and calls it, if it wants that. pushed
// says that there is something to show.
func (r *vring) flush(pushed bool) {
	switch {
	case r.queue.Flush() && r.call != nil:
		r.call.Signal()
		r.counts.Calls++
	case pushed:
		r.counts.Quiet++
	}
}

// A wake is what had a ring looked at.
type wake uint8

const (
	atOnce wake = iota // somebody came to look, and it was not empty
	byPoll             // it was looked at again
	byKick
)

// found counts how it was found that there was something in the ring.
func (r *vring) found(by wake) {
	switch by {
	case byPoll:
		r.counts.Polls++
	case byKick:
		r.counts.Kicks++
	}
}

// counted reads what the attachment's rings have counted.
func (a *attachment) counted() []datapath.Queue {
	a.dev.mu.Lock()
	defer a.dev.mu.Unlock()
	if a.dev.att != a {
		return nil // they are another's, or nobody's
	}
	var all []datapath.Queue
	for i, q := range a.queues {
		for _, r := range []*vring{q.rx, q.tx} {
			c := r.counts
			c.Pair, c.ToGuest = i, r.receives()
			all = append(all, c)
		}
	}
	return all
}
