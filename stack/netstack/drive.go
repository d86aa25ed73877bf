package netstack

import (
	"github.com/culvertnet/culvert/datapath"
)

const (
	// longFrame is from where on a batch is of bulk: what is more than a usual answer.
	longFrame = 16 << 10
	// bulkBatch is how many frames of bulk are read at once. A promoted flow gives them
	// to its client and lets them go, so a few pieces of memory that stay in the
	// processor's cache do for all of them: 4 x 64 KiB. Two would do as well, but for the
	// client, whom each batch wakes.
	bulkBatch = 4
	// driveTurn is how many bytes are read before others have their turn.
	driveTurn = 256 << 10
)

// A driven is an inbound whose frames the loop of promoted flows waits for, on its own
// goroutine. Its methods are the loop's to call.
type driven struct {
	*inbound
	pollable datapath.Pollable
	get      func(n int) [][]byte
	batch    int // how many frames to read at once
	ended    bool
}

// drive has the loop of promoted flows read in's frames, if that can be. There is one
// loop, and it serves one queue pair.
func (in *inbound) drive() bool {
	p, ok := in.qp.(datapath.Pollable)
	if !ok || in.promoted == nil || len(in.link.out) > 1 {
		return false
	}
	d := &driven{inbound: in, pollable: p, get: in.lend, batch: readBatch}
	if in.link.promoted.Drive(d) != nil {
		return false
	}
	in.link.driven = d
	p.OnEnd(in.link.promoted.End)
	in.link.promoted.End() // it may have been before
	return true
}

// Control implements promoted.Source.
func (d *driven) Control(f func(fd uintptr)) error { return d.pollable.Control(f) }

// Read implements promoted.Source.
func (d *driven) Read() bool {
	for read := 0; read < driveTurn; {
		d.lent = 0
		n, err := d.pollable.TryReadBatch(d.frames[:d.batch], d.get)
		if err != nil {
			d.end(err)
			return false
		}
		if n == 0 {
			return true
		}
		bytes := 0
		for i := range n {
			bytes += d.frames[i].N
		}
		read += bytes
		d.takeBatch(n)
		// One frame is read at once where the last wait has brought no more: a second
		// try, which would find nothing, costs as much as the first.
		full, one := n == d.batch, d.batch == 1
		switch {
		case bytes > n*longFrame:
			d.batch = bulkBatch
		case full:
			d.batch = readBatch
		case n <= 1:
			d.batch = 1
		}
		if !full || one {
			break // what there is beside one frame shows by itself
		}
	}
	// What traces the link may have waited for us to be done with the last batch.
	_, _ = d.pollable.TryReadBatch(nil, d.get)
	return true
}

// end says that the attachment has ended.
func (d *driven) end(err error) {
	d.stop()
	d.link.end(err)
}

// stop frees what d has. The loop calls no more.
func (d *driven) stop() {
	if !d.ended {
		d.ended = true
		d.release()
	}
}
