package reconcile

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// A VMState says whether traffic gets through to a VM (C-25): in VMReady it
// does, in no other.
type VMState uint8

// The states of a VM, in the words of `culvert vms`.
const (
	// VMWaiting: nothing has attached yet.
	VMWaiting VMState = iota + 1
	// VMReady: attached, listeners open, and the last probes passed.
	VMReady
	// VMStalled: attached, but the node does not answer; from the attachment to
	// the first answer too. Listeners are open if it was ready in this life.
	VMStalled
	// VMPaused: its VMM says so. Listeners are open if it was ready in this life,
	// and nothing is asked of the node.
	VMPaused
	// VMGone: it was there and left, or its VMM says that it has shut down.
	// Nothing of it is open.
	VMGone
)

// String returns "waiting", "ready", "stalled", "paused" or "gone".
func (s VMState) String() string {
	switch s {
	case VMWaiting:
		return "waiting"
	case VMReady:
		return "ready"
	case VMStalled:
		return "stalled"
	case VMPaused:
		return "paused"
	case VMGone:
		return "gone"
	}
	return "unknown"
}

// A VMView is what is known of a VM at one moment.
type VMView struct {
	Name  string
	State VMState
	// Detail is the sentence for people that says why; empty when ready.
	Detail string
	// Generation counts the lives of the VM: 0 before the first attachment, 1
	// from then on, one more with each further one and with each reset.
	Generation uint64
	// Since is when State was entered.
	Since time.Time
	Probe Probe
	// VMM is what the VMM last said ("running", "paused (io-error)"), "lost" and
	// why where it cannot be asked; empty where nobody asks one, and before the
	// first word.
	VMM string
}

// A Probe is what became of the probes of a VM's present, or last, life.
type Probe struct {
	OK  bool          // the last one passed
	At  time.Time     // when the last one ended; zero before the first has
	RTT time.Duration // round-trip time of the last that passed
}

// stateBuffer is how many changes of state a subscriber may fall behind. A VM
// changes state a few times a second at most, so this is many seconds.
const stateBuffer = 64

// ErrNoSuchVM says that no VM has the name.
var ErrNoSuchVM = errors.New("no such VM")

// Views returns all VMs in the order they were added.
func (s *VMs) Views() []VMView {
	s.mu.Lock()
	defer s.mu.Unlock()
	views := make([]VMView, len(s.vms))
	for i, v := range s.vms {
		views[i] = v.view
	}
	return views
}

// View returns the VM of that name and whether there is one.
func (s *VMs) View(name string) (VMView, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.find(name); v != nil {
		return v.view, true
	}
	return VMView{}, false
}

// Subscribe returns a channel that gets each change of a VM's state from now
// on, of every VM, in order. The channel is closed after cancel, after Close,
// and when its reader has fallen 64 changes behind: it begins anew then, with
// Subscribe and Views, and nobody had to wait for it.
func (s *VMs) Subscribe() (changes <-chan VMView, cancel func()) {
	ch := make(chan VMView, stateBuffer)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		close(ch)
		return ch, func() {}
	}
	s.subscribers[ch] = struct{}{}
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.unsubscribe(ch)
	}
}

// unsubscribe forgets ch. It runs with mu held, once or more.
func (s *VMs) unsubscribe(ch chan VMView) {
	if _, there := s.subscribers[ch]; there {
		delete(s.subscribers, ch)
		close(ch)
	}
}

// tell lets waiters and subscribers know of a change of v. It runs with mu held
// and waits for nobody.
func (s *VMs) tell(v *vm) {
	close(v.changed)
	v.changed = make(chan struct{})
	for ch := range s.subscribers {
		select {
		case ch <- v.view:
		default:
			s.unsubscribe(ch)
		}
	}
}

// Wait returns nil when the VM is in state want, or ctx's error with a sentence
// that says what is waited for. VMGone is met by what `kubectl wait
// --for=delete` would take: the life that was there at the call has ended, or
// there is none (state waiting or gone), or the VM is removed meanwhile. A name
// that was never there is ErrNoSuchVM.
func (s *VMs) Wait(ctx context.Context, name string, want VMState) error {
	var life uint64
	for first := true; ; first = false {
		s.mu.Lock()
		v := s.find(name)
		if v == nil {
			s.mu.Unlock()
			if want == VMGone && !first {
				return nil
			}
			return fmt.Errorf("wait for VM %q: %w", name, ErrNoSuchVM)
		}
		view, changed := v.view, v.changed
		s.mu.Unlock()
		if first {
			life = view.Generation
		}
		switch {
		case view.State == want:
			return nil
		case want == VMGone && (view.State == VMWaiting || view.Generation != life):
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return s.waitError(ctx, name, want)
		}
	}
}

// waitError says what Wait waited for: the detail as it is now, which may have
// changed without the state.
func (s *VMs) waitError(ctx context.Context, name string, want VMState) error {
	now, _ := s.View(name)
	why := ""
	if now.Detail != "" {
		why = " (" + now.Detail + ")"
	}
	return fmt.Errorf("wait for VM %q to be %s: it is %s%s: %w", name, want, now.State, why, ctx.Err())
}
