package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

const (
	// A node that has not answered yet is asked four times a second, so that a
	// VM is ready within 250 ms of its network; then now and then. A probe that
	// takes longer than a second is missed.
	probeFirst   = 250 * time.Millisecond
	probeTimeout = time.Second
	// With a connection the probe only tells ready from stalled: three missed
	// after one that passed end 3 × 2 s + 1 s = 7 s after it began, within the 10 s
	// that a passed probe is good for (C-25).
	probeConnected = 2 * time.Second
	// Without one it tells whether the VM is there (C-26): a VM that left right
	// after a passed probe is found after 1 s + 3 × 1 s = 4 s.
	probeConnectionless = time.Second
	missesAllowed       = 3
	// A connectionless peer that never answered is given up after this time, or
	// one that died while it booted would keep the place of its successor. Three
	// missed probes would be too few: a guest sends its first frames well before
	// it has its address.
	firstAnswerWithin = 30 * time.Second

	acceptBackoffMin = 250 * time.Millisecond
	acceptBackoffMax = 2 * time.Second
	// A peer that connects and closes as fast as it can gets ten lives a second.
	lifeEvery = 100 * time.Millisecond
)

// A VM is what VMs is told of one.
type VM struct {
	// Name is the VM's, as Target.VM of a spec has it.
	Name string
	// Attacher is used by this VM alone and closed with it.
	Attacher Attacher
	// Sources makes those that look at one life of the VM, when it first becomes
	// ready; nil means none. Their snapshots carry the VM's name and generation.
	// The link is closed without waiting for them: calls on it fail then.
	Sources func(generation uint64, link Link) []Source
}

// VMs follows virtual machines through their lives: one goroutine for each, so
// that a broken one never delays another (C-29). See the package's theory of
// operation. All methods are safe for concurrent use.
type VMs struct {
	loop   *Loop
	log    *slog.Logger
	ctx    context.Context // ends with Close; the VMs' contexts come from it
	cancel context.CancelFunc

	mu          sync.Mutex
	closed      bool
	vms         []*vm
	subscribers map[chan VMView]struct{}
}

// vm is a VM that is followed.
type vm struct {
	VM
	log    *slog.Logger
	cancel context.CancelFunc
	done   chan struct{} // closed when its goroutine has ended

	// Guarded by VMs.mu.
	view    VMView
	changed chan struct{} // closed, and made anew, when view.State changes
}

// NewVMs returns a VMs that follows none yet. Sources of VMs run in loop.
func NewVMs(loop *Loop, log *slog.Logger) *VMs {
	ctx, cancel := context.WithCancel(context.Background())
	return &VMs{loop: loop, log: log, ctx: ctx, cancel: cancel, subscribers: make(map[chan VMView]struct{})}
}

// Add begins to follow a VM. From then on its Attacher is closed by VMs, also
// when Add returns an error: the name is taken, or os.ErrClosed after Close.
func (s *VMs) Add(m VM) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := error(nil)
	switch {
	case s.closed:
		err = os.ErrClosed
	case s.find(m.Name) != nil:
		err = errors.New("name is taken")
	}
	if err != nil {
		return errors.Join(fmt.Errorf("add VM %q: %w", m.Name, err), m.Attacher.Close())
	}
	ctx, cancel := context.WithCancel(s.ctx)
	v := &vm{
		VM:      m,
		log:     s.log.With("vm", m.Name),
		cancel:  cancel,
		done:    make(chan struct{}),
		view:    VMView{Name: m.Name, State: VMWaiting, Detail: nothingYet, Since: time.Now()},
		changed: make(chan struct{}),
	}
	s.vms = append(s.vms, v)
	go func() {
		defer close(v.done)
		s.run(ctx, v)
	}()
	return nil
}

// find returns the VM of that name, nil when there is none. It runs with mu
// held.
func (s *VMs) find(name string) *vm {
	i := slices.IndexFunc(s.vms, func(v *vm) bool { return v.Name == name })
	if i < 0 {
		return nil
	}
	return s.vms[i]
}

// Remove ends a VM's life, forgets the VM and returns when nothing of it is
// left. An unknown name is no error.
func (s *VMs) Remove(name string) {
	s.mu.Lock()
	v := s.find(name)
	s.mu.Unlock()
	if v != nil {
		s.forget(v)
	}
}

// Close removes every VM; it returns when nothing of them is left. VMs that are
// attached are detached, which resets their flows: to let flows end first, shut
// the Publisher down before.
func (s *VMs) Close() {
	s.mu.Lock()
	s.closed = true
	vms := slices.Clone(s.vms)
	s.mu.Unlock()
	s.cancel() // all at once: nobody waits for another's end
	for _, v := range vms {
		s.forget(v)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.subscribers {
		s.unsubscribe(ch)
	}
}

// forget ends v, waits for it and takes it off the list.
func (s *VMs) forget(v *vm) {
	v.cancel()
	<-v.done
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.vms, v); i >= 0 {
		s.vms = slices.Delete(s.vms, i, i+1)
		close(v.changed)
	}
}

// nothingYet is why a VM is waiting, when nothing went wrong.
const nothingYet = "nothing has attached yet"

// run leads v through one life after the other until ctx ends.
func (s *VMs) run(ctx context.Context, v *vm) {
	why := nothingYet // of the present state, waiting or gone
	for {
		link := s.accept(ctx, v, why)
		if link == nil {
			break
		}
		began := time.Now()
		why = s.live(ctx, v, link)
		if !sleep(ctx, lifeEvery-time.Since(began)) {
			break
		}
	}
	if err := v.Attacher.Close(); err != nil {
		v.log.Warn("close of attacher failed", "err", err)
	}
}

// accept waits for the next life. It returns nil when ctx has ended.
func (s *VMs) accept(ctx context.Context, v *vm, why string) Link {
	retry := backoff{min: acceptBackoffMin, max: acceptBackoffMax}
	said := ""
	for {
		link, err := v.Attacher.Accept(ctx)
		if err == nil {
			return link
		}
		if ctx.Err() != nil {
			return nil
		}
		if text := err.Error(); text != said {
			said = text
			v.log.Warn("attach failed, trying on", "err", err)
			s.update(v, func(view *VMView) { view.Detail = why + "; last try: " + text })
		}
		if !sleep(ctx, retry.delay()) {
			return nil
		}
	}
}

// live is one life of v, from its attachment to the moment when nothing of it
// is left. It returns the reason of its end.
func (s *VMs) live(ctx context.Context, v *vm, link Link) (why string) {
	var generation uint64
	s.update(v, func(view *VMView) {
		view.Generation++
		generation = view.Generation
		view.State, view.Detail, view.Probe = VMStalled, noAnswerYet, Probe{}
	})
	probing, stop := context.WithCancel(ctx)
	results := make(chan result)
	var prober sync.WaitGroup
	prober.Go(func() { probe(probing, link, results) })

	why = s.watch(ctx, v, link, generation, results)

	// Listeners first: a client must not reach a port of a VM that is not there.
	// Gone is said when the ports are free, and before link.Close, which waits
	// for goroutines that may be in the middle of something.
	stop()
	v.Attacher.DetachVM()
	s.loop.DropVM(v.Name)
	s.update(v, func(view *VMView) { view.State, view.Detail, view.Probe.OK = VMGone, why, false })
	s.loop.Resync()
	if err := link.Close(); err != nil {
		v.log.Warn("close of link failed", "err", err)
	}
	prober.Wait()
	return why
}

// noAnswerYet and noAnswer are why an attached VM is not ready.
const (
	noAnswerYet = "attached, the node has not answered yet"
	noAnswer    = "the node does not answer"
)

// watch turns what happens to link into states of v, until link's life is over.
// It returns the reason of that.
func (s *VMs) watch(ctx context.Context, v *vm, link Link, generation uint64, results <-chan result) (why string) {
	began := time.Now()
	attached, missed := false, 0
	for {
		var r result
		select {
		case <-ctx.Done():
		case <-link.Done():
		case r = <-results:
		}
		if why, over := ended(ctx, link); over {
			return why
		}
		if r.err != nil {
			missed++
		} else {
			missed = 0
		}
		lost := missed >= missesAllowed
		switch {
		case r.err == nil && !attached:
			attached = true
			v.Attacher.AttachVM(link)
			if why, over := ended(ctx, link); over {
				return why
			}
			if v.Sources != nil {
				for _, src := range v.Sources(generation, link) {
					s.loop.AddSource(v.Name, generation, src)
				}
			}
			s.update(v, r.passed)
			s.loop.Resync()
		case r.err == nil:
			s.update(v, r.passed)
		case !attached && !link.Connected() && time.Since(began) >= firstAnswerWithin:
			return fmt.Sprintf("the node has not answered within %s", firstAnswerWithin)
		case !attached:
			s.update(v, r.missed(VMStalled, noAnswerYet))
		case lost && !link.Connected():
			return fmt.Sprintf("the node missed %d probes of %s", missesAllowed, probeTimeout)
		case lost:
			s.update(v, r.missed(VMStalled, noAnswer))
		default:
			s.update(v, r.missed(VMReady, ""))
		}
	}
}

// unfollowed is why a VM is gone that was removed from VMs.
const unfollowed = "culvert no longer follows it"

// ended says whether the life of link is over, and why.
func ended(ctx context.Context, link Link) (why string, over bool) {
	select {
	case <-link.Done():
		if err := link.Err(); err != nil {
			return err.Error(), true
		}
		return "the datapath ended", true
	default:
	}
	if ctx.Err() != nil {
		return unfollowed, true
	}
	return "", false
}

// update changes v's view and lets those know who wait for another state.
func (s *VMs) update(v *vm, change func(*VMView)) {
	s.mu.Lock()
	was := v.view.State
	change(&v.view)
	is := v.view
	if is.State != was {
		is.Since = time.Now()
		v.view.Since = is.Since
		s.tell(v)
	}
	s.mu.Unlock()
	if is.State == was {
		return
	}
	level := slog.LevelInfo
	if was == VMReady && is.Detail != unfollowed {
		level = slog.LevelWarn
	}
	v.log.Log(context.Background(), level, "vm state", "state", is.State.String(), "detail", is.Detail, "generation", is.Generation)
}

// A result is what became of one probe.
type result struct {
	at  time.Time
	rtt time.Duration
	err error
}

// passed makes view that of a VM that answers.
func (r result) passed(view *VMView) {
	view.State, view.Detail = VMReady, ""
	view.Probe = Probe{OK: true, At: r.at, RTT: r.rtt}
}

// missed returns what makes a view that of a VM in state, because it did not
// answer.
func (r result) missed(state VMState, detail string) func(*VMView) {
	// A deadline is what "does not answer" means; any other error says more.
	if detail != "" && !errors.Is(r.err, context.DeadlineExceeded) {
		detail += ": " + r.err.Error()
	}
	return func(view *VMView) {
		view.State, view.Detail = state, detail
		view.Probe.OK, view.Probe.At = false, r.at
	}
}

// probe asks link again and again until ctx ends. It has a goroutine of its
// own, so that no probe holds up the end of a life.
func probe(ctx context.Context, link Link, results chan<- result) {
	every := probeFirst
	for {
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, probeTimeout)
		rtt, err := link.Probe(limited)
		cancel()
		select {
		case results <- result{time.Now(), rtt, err}:
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
		if !sleep(ctx, every-time.Since(began)) {
			return
		}
	}
}
