package reconcile

import (
	"context"
	"sync"

	vmm "github.com/culvertnet/culvert/guest/vm"
)

// A VMM says how its VM is, as a *vm.QMP does.
type VMM interface {
	// Follow tells say what the VMM says, and when it cannot be asked, until ctx
	// ends; then it returns soon. It calls say one at a time, and say returns at
	// once.
	Follow(ctx context.Context, say func(vmm.Event))
}

// A word is what a VMM last said of its VM; the zero value is that of one that
// was never heard of.
type word struct {
	running bool
	paused  bool   // its processors stand still, for now
	shut    bool   // the guest has ended and none has begun
	lost    bool   // the VMM cannot be asked: paused is over, shut is not
	why     string // it is paused, in the VMM's words
	text    string // all of it: a Kind's word, and why in brackets

	// ends counts guests that ended, by a reset or a shutdown, and end is why the
	// last did: a guest may end and the next begin between two looks.
	ends uint64
	end  string
	// stirs counts beginnings and ends of pauses, for the same reason.
	stirs uint64
}

// after returns the word that w is after an event.
func (w word) after(e vmm.Event) word {
	was := w.paused
	w.running = e.Kind == vmm.Running || e.Kind == vmm.Reset && w.running
	w.text = withReason(e.Kind.String(), e.Detail)
	switch e.Kind {
	case vmm.Lost:
		// A guest that has shut down is not back because its VMM went as well.
		w.lost, w.paused = true, false
	case vmm.Running:
		w.lost, w.shut, w.paused = false, false, false
	case vmm.Paused:
		w.lost, w.shut, w.paused = false, false, true
		w.why = e.Detail
	case vmm.Shutdown:
		if !w.shut || w.lost { // not what it said before, on the same connection
			w.ends++
			w.end = withReason("the guest has shut down", e.Detail)
		}
		w.lost, w.shut, w.paused = false, true, false
	case vmm.Reset:
		w.ends++
		w.end = withReason("the guest was reset", e.Detail)
		w.lost, w.shut = false, false
	}
	if w.paused != was {
		w.stirs++
	}
	return w
}

// whyPaused is the detail of a VM that is paused. "Paused" is what QEMU calls it
// when somebody asked for it, and no news.
func (w word) whyPaused() string {
	if w.why == "paused" {
		return "its VMM paused it"
	}
	return withReason("its VMM paused it", w.why)
}

func withReason(what, reason string) string {
	if reason == "" {
		return what
	}
	return what + " (" + reason + ")"
}

// words is where what a VMM says is left for those who follow its VM: the last
// word alone, so that a VMM that speaks without end makes nothing grow.
type words struct {
	mu      sync.Mutex
	last    word
	changed chan struct{} // closed, and made anew, when last changes
}

func newWords() *words { return &words{changed: make(chan struct{})} }

// now returns the last word and a channel that is closed when there is another.
func (ws *words) now() (word, <-chan struct{}) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return ws.last, ws.changed
}

// hear takes an event and returns the word it makes.
func (ws *words) hear(e vmm.Event) word {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w := ws.last.after(e)
	if w != ws.last {
		ws.last = w
		close(ws.changed)
		ws.changed = make(chan struct{})
	}
	return w
}
