package reconcile

import (
	"context"
	"time"
)

// An Attacher joins one VM's datapath to the forwarder. The daemon's wiring is
// one. Its methods are called one at a time, by the VM's goroutine.
type Attacher interface {
	// Accept waits until the VM's transport is connected and returns its link,
	// not yet serving. Errors of one try (a peer that vanished, an interface
	// that could not be made yet) come back as errors: the caller waits and
	// tries again. It returns soon after ctx has ended.
	Accept(ctx context.Context) (Link, error)
	// AttachVM opens the VM's listeners over link: called once per life of the
	// VM, when it first becomes ready. A guest that was reset is another life on
	// the same link.
	AttachVM(link Link)
	// DetachVM retires all of the VM's state at once: listeners closed, flows
	// reset, ports free when it returns (C-26). Detaching what is not attached
	// does nothing.
	DetachVM()
	// Close stops listening for the VM's transport.
	Close() error
}

// A Link is one life of a VM's datapath: its attachment and the stack on it. Guests
// come and go on it where a VMM tells of that, one after the other.
type Link interface {
	// Probe asks the node through the datapath and returns the round-trip time;
	// an error is a sentence without a subject ("no answer from 10.0.2.2"). It
	// returns soon after ctx has ended. One is under way at a time.
	Probe(ctx context.Context) (rtt time.Duration, err error)
	// SetPaused says that the VMM has paused the VM, or no longer: meanwhile
	// nothing may end because the node does not answer (C-28). It returns at once
	// and may repeat itself.
	SetPaused(paused bool)
	// Connected says whether Done tells of a peer that left. Where it is false
	// three missed probes mean that the VM is gone (C-26).
	Connected() bool
	// Done is closed when the datapath has ended.
	Done() <-chan struct{}
	// Err says why, once Done is closed: it is shown to people ("QEMU closed
	// the connection"). Nil where there is nothing to say, and before Done.
	Err() error
	// Close retires the stack and the attachment and waits for both. It ends a
	// Probe that is under way.
	Close() error
}
