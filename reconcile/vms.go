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

	vmm "github.com/culvertnet/culvert/guest/vm"
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
	// A VMM that reconnects does so within a second or two; QEMU's vhost-user and
	// newer stream netdevs do when they are told to.
	reconnectWithin = 5 * time.Second
	// A peer that connects and closes as fast as it can gets ten lives a second,
	// and so does a guest that resets itself.
	lifeEvery = 100 * time.Millisecond
)

// A VM is what VMs is told of one.
type VM struct {
	// Name is the VM's, as Target.VM of a spec has it.
	Name string
	// Attacher is used by this VM alone and closed with it.
	Attacher Attacher
	// VMM says whether the VM is paused, reset or shut down; nil where nobody
	// asks one. It is used by this VM alone.
	VMM VMM
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
	words  *words        // its VMM's
	// refollow holds one while Refollow waits to be heard.
	refollow chan struct{}

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
		VM:       m,
		log:      s.log.With("vm", m.Name),
		cancel:   cancel,
		done:     make(chan struct{}),
		words:    newWords(),
		refollow: make(chan struct{}, 1),
		view:     VMView{Name: m.Name, State: VMWaiting, Detail: nothingYet, Since: time.Now()},
		changed:  make(chan struct{}),
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

// Refollow makes the sources of a VM anew, as when what Sources gives is another
// now. It returns at once; an unknown name is no error.
func (s *VMs) Refollow(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.find(name); v != nil {
		select {
		case v.refollow <- struct{}{}:
		default:
		}
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

// run leads v from one link to the next until ctx ends.
func (s *VMs) run(ctx context.Context, v *vm) {
	var hearing sync.WaitGroup
	if v.VMM != nil {
		hearing.Go(func() { v.VMM.Follow(ctx, func(e vmm.Event) { s.hear(v, e) }) })
	}
	why := nothingYet // of the present state, waiting or gone
	for {
		link := s.accept(ctx, v, why)
		if link == nil {
			break
		}
		began := time.Now()
		why = s.lives(ctx, v, link)
		if !sleep(ctx, lifeEvery-time.Since(began)) {
			break
		}
	}
	if err := v.Attacher.Close(); err != nil {
		v.log.Warn("close of attacher failed", "err", err)
	}
	hearing.Wait()
}

// hear takes what v's VMM says.
func (s *VMs) hear(v *vm, e vmm.Event) {
	w := v.words.hear(e)
	s.update(v, func(view *VMView) { view.VMM = w.text })
	level := slog.LevelDebug
	if e.Kind == vmm.Lost {
		level = slog.LevelWarn // its resets and shutdowns go unnoticed
	}
	v.log.Log(context.Background(), level, "vmm", "says", w.text)
}

// accept waits for the next life. It returns nil when ctx has ended.
func (s *VMs) accept(ctx context.Context, v *vm, why string) Link {
	accepting, accepted := context.WithCancel(ctx)
	var missing sync.WaitGroup
	missing.Go(func() { s.missing(accepting, v, why) })
	defer missing.Wait()
	defer accepted()
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

// mustRestart is what a VM that runs without its link may need.
const mustRestart = "; its VMM says that it runs: if that does not connect again by itself, as QEMU before 8.0 does not, the VM must be restarted"

// missing says until ctx ends when the VMM runs the VM and no link comes, which
// is so for ever where it connects only once.
func (s *VMs) missing(ctx context.Context, v *vm, why string) {
	for detail := why; ; {
		w, changed := v.words.now()
		var late <-chan time.Time
		if w.running {
			late = time.After(reconnectWithin)
		}
		if !w.running && detail != why {
			detail = why
			s.update(v, func(view *VMView) { view.Detail = why })
		}
		select {
		case <-late:
			detail = why + mustRestart
			s.update(v, func(view *VMView) { view.Detail = detail })
			select {
			case <-changed:
			case <-ctx.Done():
			}
		case <-changed:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// lives leads v through its lives on link, of which there are several when its
// VMM resets the guest or boots it again, and closes link. It returns why v is
// gone.
func (s *VMs) lives(ctx context.Context, v *vm, link Link) (why string) {
	var prober sync.WaitGroup
	defer func() {
		if err := link.Close(); err != nil {
			v.log.Warn("close of link failed", "err", err)
		}
		prober.Wait()
	}()
	for lived := false; ; lived = true {
		w, over := s.hold(ctx, v, link, lived)
		if over {
			return w.end
		}
		l := &life{vms: s, vm: v, link: link, word: w, since: time.Now()}
		end := l.live(ctx, &prober)
		if !end.again {
			return end.why
		}
		// What the earlier guest sent and nobody has read yet must not pass for an
		// answer of the next: it is read in this time, while nothing is asked.
		prober.Wait()
		if !sleep(ctx, lifeEvery) {
			return end.why
		}
	}
}

// hold waits while the VMM says that the guest has shut down: what is attached
// then is a VMM without a guest. The link is kept, since QEMU 7.2 does not
// connect a second time. It is over when it ends meanwhile and, where a link does
// not tell, when the VMM is gone that had it; lived says that it had a guest.
func (s *VMs) hold(ctx context.Context, v *vm, link Link, lived bool) (w word, over bool) {
	for {
		w, changed := v.words.now()
		switch {
		case !w.shut, w.lost && !lived: // it is another VMM's than the one that said so
			return w, false
		case w.lost && !link.Connected():
			return w, true
		}
		s.update(v, func(view *VMView) { view.State, view.Detail = VMGone, w.end })
		select {
		case <-changed:
		case <-link.Done():
			return w, true
		case <-ctx.Done():
			return w, true
		}
	}
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
	if was == VMReady && is.State != VMPaused && is.Detail != unfollowed {
		level = slog.LevelWarn
	}
	v.log.Log(context.Background(), level, "vm state", "state", is.State.String(), "detail", is.Detail, "generation", is.Generation)
}
