package reconcile

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// A life is one life of a VM: one guest on one link.
type life struct {
	vms        *VMs
	vm         *vm
	link       Link
	generation uint64
	word       word // the VMM's, as it was last looked at

	attached bool      // listeners are open
	proven   bool      // a probe has passed since the attachment or the last pause
	missed   int       // probes in a row
	since    time.Time // of the attachment, or of the end of the last pause
}

// An ending is why a life is over. Again says that the next may begin on the
// same link: the VMM has ended the guest, not the connection.
type ending struct {
	why   string
	again bool
}

// live is a life from its beginning to the moment when nothing of it is left but
// its link, and the probe that prober waits for.
func (l *life) live(ctx context.Context, prober *sync.WaitGroup) ending {
	l.update(func(view *VMView) {
		view.Generation++
		l.generation = view.Generation
		view.State, view.Detail, view.Probe = VMStalled, noAnswerYet, Probe{}
		if l.word.paused {
			view.State, view.Detail = VMPaused, l.word.whyPaused()
		}
	})
	l.link.SetPaused(l.word.paused)
	probing, stop := context.WithCancel(ctx)
	results := make(chan *result)
	prober.Go(func() { probe(probing, l.link, l.vm.words, results) })

	end := l.watch(ctx, results)

	// Listeners first: a client must not reach a port of a VM that is not there.
	// Gone is said when the ports are free, and before the link's end, which
	// waits for goroutines that may be in the middle of something.
	stop()
	l.vm.Attacher.DetachVM()
	l.link.SetPaused(false) // what is left of its flows may end
	l.vms.loop.DropVM(l.vm.Name)
	l.update(func(view *VMView) { view.State, view.Detail, view.Probe.OK = VMGone, end.why, false })
	l.vms.loop.Resync()
	return end
}

// noAnswerYet, noAnswerSince and noAnswer are why an attached VM is not ready.
const (
	noAnswerYet   = "attached, the node has not answered yet"
	noAnswerSince = "its VMM resumed it, the node has not answered yet"
	noAnswer      = "the node does not answer"
)

// watch turns what happens to the link and what the VMM says into states of the
// VM, until the life is over.
func (l *life) watch(ctx context.Context, results <-chan *result) ending {
	var r *result
	for {
		w, changed := l.vm.words.now()
		if end, over := l.ended(ctx, w); over {
			return end
		}
		if w != l.word {
			l.heard(w)
		}
		// A probe that was under way when a pause began or ended says nothing.
		if r != nil && !w.paused && w.stirs == r.stirs {
			if r.err == nil {
				l.passed(ctx, r)
			} else if end, over := l.missedOne(r); over {
				return end
			}
		}
		r = nil
		select {
		case <-ctx.Done():
		case <-l.link.Done():
		case <-changed:
		case <-l.vm.refollow:
			if l.attached {
				l.follow()
			}
		case r = <-results:
		}
	}
}

// update changes the VM's view.
func (l *life) update(change func(*VMView)) { l.vms.update(l.vm, change) }

// unfollowed is why a VM is gone that was removed from VMs.
const unfollowed = "culvert no longer follows it"

// ended says whether the life is over, the VMM's word being w, and why.
func (l *life) ended(ctx context.Context, w word) (ending, bool) {
	linkOver := false
	select {
	case <-l.link.Done():
		linkOver = true
	default:
	}
	switch {
	case ctx.Err() != nil && !linkOver:
		return ending{why: unfollowed}, true
	case w.ends != l.word.ends: // says more than a connection that was closed
		return ending{w.end, !linkOver}, true
	case !linkOver:
		return ending{}, false
	}
	if err := l.link.Err(); err != nil {
		return ending{why: err.Error()}, true
	}
	return ending{why: "the datapath ended"}, true
}

// heard takes another word of the VMM's, by which the life goes on.
func (l *life) heard(w word) {
	was := l.word
	l.word = w
	l.link.SetPaused(w.paused)
	switch {
	case w.paused:
		l.update(func(view *VMView) { view.State, view.Detail = VMPaused, w.whyPaused() })
	case w.stirs != was.stirs: // it was paused, also when nobody looked meanwhile
		l.proven, l.missed, l.since = false, 0, time.Now()
		l.update(func(view *VMView) { view.State, view.Detail = VMStalled, l.unproven() })
	}
}

// unproven is why the VM is not ready before a probe has passed.
func (l *life) unproven() string {
	if l.attached {
		return noAnswerSince
	}
	return noAnswerYet
}

// passed takes a probe that passed; the life's first opens the listeners.
func (l *life) passed(ctx context.Context, r *result) {
	l.missed, l.proven = 0, true
	if l.attached {
		l.update(r.passed)
		return
	}
	l.attached = true
	l.vm.Attacher.AttachVM(l.link)
	w, _ := l.vm.words.now() // it may have taken its time
	if _, over := l.ended(ctx, w); over {
		return
	}
	l.follow()
	if !w.paused {
		l.update(r.passed)
	}
	l.vms.loop.Resync()
}

// follow makes the sources of what runs in the VM.
func (l *life) follow() {
	if l.vm.Sources != nil {
		l.vms.loop.Follow(l.vm.Name, l.generation, l.vm.Sources(l.generation, l.link)...)
	}
}

// missedOne takes a probe that did not pass and says whether the life is over.
func (l *life) missedOne(r *result) (ending, bool) {
	l.missed++
	connected := l.link.Connected()
	switch {
	case !l.attached && !connected && time.Since(l.since) >= firstAnswerWithin:
		return ending{why: fmt.Sprintf("the node has not answered within %s", firstAnswerWithin)}, true
	case l.attached && !connected && l.missed >= missesAllowed:
		return ending{why: fmt.Sprintf("the node missed %d probes of %s", missesAllowed, probeTimeout)}, true
	case !l.proven:
		l.update(r.missed(VMStalled, l.unproven()))
	case l.missed >= missesAllowed:
		l.update(r.missed(VMStalled, noAnswer))
	default:
		l.update(r.missed(VMReady, ""))
	}
	return ending{}, false
}

// A result is what became of one probe.
type result struct {
	at    time.Time
	rtt   time.Duration
	err   error
	stirs uint64 // the word's when it began
}

// passed makes view that of a VM that answers.
func (r *result) passed(view *VMView) {
	view.State, view.Detail = VMReady, ""
	view.Probe = Probe{OK: true, At: r.at, RTT: r.rtt}
}

// missed returns what makes a view that of a VM in state, because it did not
// answer.
func (r *result) missed(state VMState, detail string) func(*VMView) {
	// A deadline is what "does not answer" means; any other error says more.
	if detail != "" && !errors.Is(r.err, context.DeadlineExceeded) {
		detail += ": " + r.err.Error()
	}
	return func(view *VMView) {
		view.State, view.Detail = state, detail
		view.Probe.OK, view.Probe.At = false, r.at
	}
}

// probe asks link again and again until ctx ends, but for the time in which the
// VMM says that the VM is paused. It has a goroutine of its own, so that no probe
// holds up the end of a life.
func probe(ctx context.Context, link Link, words *words, results chan<- *result) {
	every := probeFirst
	for {
		w, changed := words.now()
		if w.paused {
			every = probeFirst
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return
			}
		}
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, probeTimeout)
		rtt, err := link.Probe(limited)
		cancel()
		select {
		case results <- &result{time.Now(), rtt, err, w.stirs}:
		case <-ctx.Done():
			return
		}
		switch {
		case err != nil:
		case link.Connected():
			every = probeConnected
		default:
			every = probeConnectionless
		}
		next := time.NewTimer(every - time.Since(began))
		select {
		case <-next.C:
		case <-ctx.Done():
		case <-changed: // what the VMM says is worth a look, four times a second
			sleep(ctx, probeFirst-time.Since(began))
		}
		next.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}
