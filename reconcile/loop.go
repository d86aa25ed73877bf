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

	"github.com/culvertnet/culvert/stack/listener"
)

const (
	// resyncEvery is how often everything is stated again, whatever changed:
	// what got lost in between (a listener that vanished, rows that nobody
	// wants) is put right within this time.
	resyncEvery = 30 * time.Second
	// A source that fails is run again after 250 ms, then 500 ms … 30 s. One
	// that ran for longer than the longest delay begins again with the shortest.
	sourceBackoffMin = 250 * time.Millisecond
	sourceBackoffMax = 30 * time.Second
)

// ErrStale says that a snapshot is of a life of a VM that has ended (C-27).
var ErrStale = errors.New("snapshot of an earlier life of the VM")

// A Loop keeps a Publisher equal to what its sources want. See the package's
// theory of operation. All methods are safe for concurrent use.
type Loop struct {
	pub Publisher
	log *slog.Logger
	in  chan Snapshot // from the sources' goroutines to Run
	now chan struct{} // holds one while a resync is asked for

	ctx     context.Context // ends with Run; the sources' contexts come from it
	cancel  context.CancelFunc
	sources sync.WaitGroup

	// mu is held while the Publisher is told something, so that it hears of
	// snapshots one after the other. Nothing that waits for a guest happens
	// under it.
	mu       sync.Mutex
	ended    bool
	followed map[sourceKey]*followed
	snaps    []Snapshot // the last of each source, in the order they first spoke
	told     map[listener.Owner]told
	clashed  map[clash]bool // those that were said
	held     map[sourceKey]bool
	noted    map[noteKey]NoteView
	changed  chan struct{} // closed, and made anew, when noted changes

	names *Names
	stats stats
}

// A sourceKey tells sources apart.
type sourceKey struct{ vm, name string }

// followed is a source that runs, for one life of its VM.
type followed struct {
	generation uint64
	cancel     context.CancelFunc
}

// told is what the Publisher was last told of an owner, and what it answered, in
// the same order.
type told struct {
	specs  []listener.Spec
	states []listener.State
}

// state returns what was answered about spec, which has place i now and likely had
// it then; zero if it was not asked for. index is made when it had another.
func (t told) state(i int, spec listener.Spec, index *map[listener.Spec]listener.State) listener.State {
	if i < len(t.states) && t.specs[i] == spec {
		return t.states[i]
	}
	if *index == nil {
		*index = make(map[listener.Spec]listener.State, len(t.specs))
		for j, state := range t.states {
			(*index)[t.specs[j]] = state
		}
	}
	return (*index)[spec]
}

// NewLoop returns a loop that tells pub what to publish and log what became of
// it. It does nothing before Run, except Apply.
func NewLoop(pub Publisher, log *slog.Logger) *Loop {
	ctx, cancel := context.WithCancel(context.Background())
	return &Loop{
		pub:      pub,
		log:      log,
		in:       make(chan Snapshot),
		now:      make(chan struct{}, 1),
		ctx:      ctx,
		cancel:   cancel,
		followed: make(map[sourceKey]*followed),
		told:     make(map[listener.Owner]told),
		clashed:  make(map[clash]bool),
		held:     make(map[sourceKey]bool),
		changed:  make(chan struct{}),
		names:    newNames(),
	}
}

// Names returns the table of the names that owners have.
func (l *Loop) Names() *Names { return l.names }

// Run follows the sources until ctx ends and returns nil when the last of them
// has ended too. From then on the Publisher is told nothing more, whoever asks:
// what is open stays open, and closing it is the Publisher's own shutdown. Run
// is called once.
func (l *Loop) Run(ctx context.Context) error {
	resync := time.NewTicker(resyncEvery)
	defer resync.Stop()
	for {
		select {
		case s := <-l.in:
			l.receive(s)
		case <-resync.C:
			l.resync()
		case <-l.now:
			l.resync()
		case <-ctx.Done():
			l.end()
			return nil
		}
	}
}

// end stops the sources and waits for them. One that is about to send gets rid
// of its snapshot, which counts no more.
func (l *Loop) end() {
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.cancel()
	stopped := make(chan struct{})
	go func() {
		l.sources.Wait()
		close(stopped)
	}()
	for {
		select {
		case <-l.in:
		case <-stopped:
			return
		}
	}
}

// AddSource runs src until DropVM(vm) is called or the loop ends. When it fails
// it is run again after a while; what it last wanted stays in force meanwhile
// (C-31). Its snapshots count only when they carry the same vm and generation,
// zero values for a source that speaks for every VM. A source of the same name
// and VM is replaced.
func (l *Loop) AddSource(vm string, generation uint64, src Source) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	ctx, cancel := context.WithCancel(l.ctx)
	key := sourceKey{vm, src.Name()}
	if former := l.followed[key]; former != nil {
		former.cancel()
	}
	l.followed[key] = &followed{generation, cancel}
	l.sources.Go(func() {
		defer cancel()
		l.follow(ctx, vm, src)
	})
}

// Follow makes sources all that run for one life of a VM: those of other names
// end and what they wanted is withdrawn, the rest is as with AddSource. What a
// replaced source wanted stays in force until its successor speaks.
func (l *Loop) Follow(vm string, generation uint64, sources ...Source) {
	l.mu.Lock()
	for key, f := range l.followed {
		if key.vm == vm && !slices.ContainsFunc(sources, func(s Source) bool { return s.Name() == key.name }) {
			f.cancel()
			delete(l.followed, key)
			l.snaps = slices.DeleteFunc(l.snaps, func(s Snapshot) bool { return s.VM == vm && s.Source == key.name })
		}
	}
	if !l.ended {
		l.converge(nil)
	}
	l.mu.Unlock()
	for _, src := range sources {
		l.AddSource(vm, generation, src)
	}
}

// follow runs src again and again until ctx ends.
func (l *Loop) follow(ctx context.Context, vm string, src Source) {
	log := l.log.With("source", src.Name(), "vm", vm)
	retry := backoff{min: sourceBackoffMin, max: sourceBackoffMax}
	said := ""
	for {
		began := time.Now()
		err := src.Run(ctx, l.in)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("source ended")
		}
		if time.Since(began) > sourceBackoffMax {
			retry.reset()
			said = ""
		}
		l.stats.source(vm, src.Name(), func(s *SourceStats) { s.Failures++ })
		if text := err.Error(); text != said {
			said = text
			log.Warn("source failed, its last snapshot stays", "err", err)
		}
		if !sleep(ctx, retry.delay()) {
			return
		}
	}
}

// receive takes a snapshot from a source's goroutine.
func (l *Loop) receive(s Snapshot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.current(s) {
		l.stats.source(s.VM, s.Source, func(c *SourceStats) { c.Stale++ })
		l.log.Debug("snapshot ignored", "source", s.Source, "vm", s.VM, "generation", s.Generation)
		return
	}
	l.keep(s)
	l.converge(nil)
}

// current says whether s comes from a source that is followed, and is of the
// same life of its VM.
func (l *Loop) current(s Snapshot) bool {
	f := l.followed[sourceKey{s.VM, s.Source}]
	return f != nil && f.generation == s.Generation
}

// keep puts s in the place of its source's former snapshot.
func (l *Loop) keep(s Snapshot) {
	l.stats.source(s.VM, s.Source, func(c *SourceStats) { c.Snapshots, c.Last = c.Snapshots+1, time.Now() })
	if i := l.last(s); i < 0 {
		l.snaps = append(l.snaps, s)
	} else {
		l.snaps[i] = s
	}
}

// last returns where the former snapshot of s's source is, -1 if there is none.
func (l *Loop) last(s Snapshot) int {
	return slices.IndexFunc(l.snaps, func(o Snapshot) bool { return o.VM == s.VM && o.Source == s.Source })
}

// Apply takes a snapshot as from a source and returns when the Publisher has
// done what follows from it: what is wanted has its rows, and ports that are no
// longer wanted are free (C-4). A source that only applies need not be added,
// unless it is one of a VM.
//
// Once begun it is not left half done: ctx counts before the first step only.
// The error is ctx's, ErrStale, or os.ErrClosed after the loop has ended; then
// nothing was changed.
func (l *Loop) Apply(ctx context.Context, s Snapshot) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("apply snapshot of %s: %w", s.Source, ctx.Err())
	case l.ended:
		return fmt.Errorf("apply snapshot of %s: %w", s.Source, os.ErrClosed)
	case s.VM != "" && !l.current(s):
		return fmt.Errorf("apply snapshot of %s: %w", s.Source, ErrStale)
	}
	if s.changes {
		l.amend(s)
		return nil
	}
	l.keep(s)
	l.converge(nil)
	return nil
}

// DropVM ends the sources of a VM that is gone and withdraws all they wanted
// (C-26). When it returns nothing they may still send counts; it does not wait
// for them, Run does. Owners of sources that speak for every VM keep their rows.
func (l *Loop) DropVM(vm string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, f := range l.followed {
		if key.vm == vm {
			f.cancel()
			delete(l.followed, key)
		}
	}
	l.snaps = slices.DeleteFunc(l.snaps, func(s Snapshot) bool { return s.VM == vm })
	if !l.ended {
		l.converge(nil)
	}
}

// Hold makes a source of a VM, also one that is not there yet, count for nothing
// until it is called again with hold false: its owners' ports are free when it
// returns (C-43). The source runs on, and what it last said counts again after.
func (l *Loop) Hold(vm, source string, hold bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := sourceKey{vm, source}
	if l.held[key] == hold {
		return
	}
	if hold {
		l.held[key] = true
	} else {
		delete(l.held, key)
	}
	if !l.ended {
		l.converge(nil)
	}
}

// Held says whether Hold holds the source.
func (l *Loop) Held(vm, source string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held[sourceKey{vm, source}]
}

// Resync asks Run to state everything again, and to say which states are not
// what they were: for those who know that much has changed, as when a VM came or
// went. It returns at once.
func (l *Loop) Resync() {
	select {
	case l.now <- struct{}{}:
	default:
	}
}

// resync states everything again and withdraws owners that the Publisher has
// and nobody wants.
func (l *Loop) resync() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.resynced()
	for _, o := range l.pub.Owners() {
		if _, known := l.told[o]; !known {
			l.told[o] = told{}
		}
	}
	all := make([]listener.Owner, 0, len(l.told))
	for o := range l.told {
		all = append(all, o)
	}
	l.converge(all)
}

// converge tells the Publisher the difference between what it was told and what
// is wanted now, and again what the owners in ask want. What leaves goes before
// what comes, so that a port can pass from one owner to the next.
func (l *Loop) converge(ask []listener.Owner) {
	began := time.Now()
	wants, clashes := desired(l.counting())
	l.logClashes(clashes)
	l.note(wants)
	l.names.set(wants)
	wants = slices.DeleteFunc(wants, func(w Want) bool { return len(w.Specs) == 0 })
	gone, publish := diff(l.told, wants, ask)
	l.tell(began, gone, publish)
}

// tell tells the Publisher a difference that has been looked for since began.
func (l *Loop) tell(began time.Time, gone []listener.Owner, publish []Want) {
	// A request that is cut off must not leave the Publisher half told.
	ctx := context.Background()
	for _, o := range gone {
		l.pub.Withdraw(ctx, o)
		delete(l.told, o)
		l.log.Info("withdrawn", "owner", o.String(), "vm", o.VM)
	}
	for _, w := range publish {
		outs := l.pub.Publish(ctx, w.Owner, w.Specs)
		l.told[w.Owner] = told{w.Specs, l.logOutcomes(w.Owner, l.told[w.Owner], outs)}
	}
	l.stats.applied(began, len(publish), len(gone))
}

// counting returns the snapshots of sources that are not held.
func (l *Loop) counting() []Snapshot {
	if len(l.held) == 0 {
		return l.snaps
	}
	return slices.DeleteFunc(slices.Clone(l.snaps), func(s Snapshot) bool { return l.held[sourceKey{s.VM, s.Source}] })
}

// logOutcomes says which states are not what they were, once each (C-7), and
// returns what they are.
func (l *Loop) logOutcomes(o listener.Owner, were told, outs []listener.Outcome) []listener.State {
	are := make([]listener.State, len(outs))
	var index map[listener.Spec]listener.State
	for i, out := range outs {
		are[i] = out.State
		if out.State == were.state(i, out.Spec, &index) {
			continue
		}
		// For those who follow the loop: the Publisher says it to people, when it
		// happens.
		l.log.Debug("publish", "state", out.State.String(),
			"owner", o.String(), "vm", out.Spec.Target.VM, "spec", out.Spec.String(), "detail", out.Detail)
	}
	return are
}

// logClashes says each clash once for as long as it lasts.
func (l *Loop) logClashes(clashes []clash) {
	now := make(map[clash]bool, len(clashes))
	for _, c := range clashes {
		now[c] = true
		if !l.clashed[c] {
			l.log.Warn("owner wanted twice", "owner", c.owner.String(), "source", c.has, "ignored", c.wanted)
		}
	}
	l.clashed = now
}

// sleep waits for d and says whether ctx is still alive then.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
