// Package vm asks a VM's monitor, the VMM, how the VM is: whether it runs, is
// paused, was reset or is shut down. QMP does so for QEMU.
//
// It does not start, stop or change a VM, and does not judge what follows from
// what the VMM says: that is package reconcile's.
package vm

// A Kind is what an Event says.
type Kind uint8

// What a VMM says of its VM. Running, Paused and Shutdown are states, true until
// another of them is said; Reset is what happened to the guest and is no state.
const (
	// Lost: the VMM cannot be asked, so nothing is known; Detail says why. It is
	// said of the first try that fails too, and again when the reason changes.
	Lost Kind = iota + 1
	// Running: the guest's processors run.
	Running
	// Paused: they do not, for now; Detail is the VMM's word for why.
	Paused
	// Shutdown: the guest has ended, though the VMM may stay; Detail is the VMM's
	// word for why. It holds until another state is said.
	Shutdown
	// Reset: the guest was ended and begins anew, in the state that is said next
	// or else in the one that was; Detail is the VMM's word for why.
	Reset
)

// String returns "lost", "running", "paused", "shutdown" or "reset".
func (k Kind) String() string {
	switch k {
	case Lost:
		return "lost"
	case Running:
		return "running"
	case Paused:
		return "paused"
	case Shutdown:
		return "shutdown"
	case Reset:
		return "reset"
	}
	return "unknown"
}

// An Event is one thing that a VMM says, or that it cannot be asked.
type Event struct {
	Kind Kind
	// Detail is why: a sentence without a subject for Lost, else a word of the
	// VMM's ("guest-shutdown", "io-error"), short and of letters, digits and
	// hyphens. It may be empty.
	Detail string
}
