package reconcile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/require"
)

// mustSpec parses a publish and points it at a VM.
func mustSpec(tb testing.TB, vm, text string) listener.Spec {
	tb.Helper()
	s, err := listener.ParseSpec(text)
	require.NoError(tb, err)
	s.Target.VM = vm
	return s
}

func dockerOwner(id string) listener.Owner { return listener.Owner{Kind: listener.KindDocker, ID: id} }

// want makes a Want of a docker owner.
func want(tb testing.TB, id string, texts ...string) Want {
	tb.Helper()
	w := Want{Owner: dockerOwner(id)}
	for _, t := range texts {
		w.Specs = append(w.Specs, mustSpec(tb, "default", t))
	}
	return w
}

// publisher is a Publisher that keeps rows and writes down its calls.
type publisher struct {
	mu    sync.Mutex
	busy  bool
	rows  map[listener.Owner][]listener.Spec
	state map[listener.Owner]listener.State // what Publish answers; Forwarded when absent
	calls []string
	gate  chan struct{} // when set, each Publish takes one from it
}

func newPublisher() *publisher {
	return &publisher{rows: make(map[listener.Owner][]listener.Spec), state: make(map[listener.Owner]listener.State)}
}

// enter fails on a second call while one is under way: the loop promises one at
// a time.
func (p *publisher) enter(call string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy {
		panic("two calls of the Publisher at a time")
	}
	p.busy = true
	p.calls = append(p.calls, call)
}

func (p *publisher) Publish(ctx context.Context, o listener.Owner, specs []listener.Spec) []listener.Outcome {
	p.enter("publish " + o.ID)
	runtime.Gosched() // others get their chance to be in the way
	if p.gate != nil {
		<-p.gate
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy = false
	p.rows[o] = specs
	var outs []listener.Outcome
	for _, s := range specs {
		out := listener.Outcome{Spec: s, State: listener.Forwarded}
		if st := p.state[o]; st != 0 {
			out.State, out.Detail = st, "because"
		}
		outs = append(outs, out)
	}
	return outs
}

func (p *publisher) Withdraw(ctx context.Context, o listener.Owner) {
	p.enter("withdraw " + o.ID)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy = false
	delete(p.rows, o)
}

func (p *publisher) Owners() []listener.Owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.rows))
}

// takeCalls returns the calls since it was last asked.
func (p *publisher) takeCalls() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls := p.calls
	p.calls = nil
	return calls
}

// has returns what is published, "owner text" sorted.
func (p *publisher) has() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	rows := []string{}
	for o, specs := range p.rows {
		for _, s := range specs {
			rows = append(rows, o.ID+" "+s.String())
		}
	}
	slices.Sort(rows)
	return rows
}

// source is a Source that sends what it is given and fails when it is told to.
type source struct {
	name string
	send chan Snapshot
	fail chan error
	runs chan struct{} // one for each Run that began
}

func newSource(name string) *source {
	return &source{name: name, send: make(chan Snapshot), fail: make(chan error), runs: make(chan struct{}, 1000)}
}

func (s *source) Name() string { return s.name }

func (s *source) Run(ctx context.Context, out chan<- Snapshot) error {
	s.runs <- struct{}{}
	for {
		select {
		case snap := <-s.send:
			out <- snap // without ctx: the loop must not hang on a careless source
		case err := <-s.fail:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// logBuffer collects log lines.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// lines returns how many lines contain all of parts.
func (b *logBuffer) lines(parts ...string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for line := range strings.Lines(b.buf.String()) {
		if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			n++
		}
	}
	return n
}

func newLog() (*slog.Logger, *logBuffer) {
	b := new(logBuffer)
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug})), b
}

// attacher is an Attacher whose links come from a channel and that writes down,
// with those of its links, what is called.
type attacher struct {
	next     chan any // a *link or an error
	mu       sync.Mutex
	calls    []string
	attached *link
	closed   bool
	gate     chan struct{} // when set, AttachVM takes one from it
}

func newAttacher() *attacher { return &attacher{next: make(chan any, 300)} }

func (a *attacher) note(call string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, call)
}

func (a *attacher) takeCalls() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	calls := a.calls
	a.calls = nil
	return calls
}

func (a *attacher) Accept(ctx context.Context) (Link, error) {
	select {
	case v := <-a.next:
		if err, bad := v.(error); bad {
			return nil, err
		}
		return v.(*link), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (a *attacher) AttachVM(l Link) {
	a.note("attach " + l.(*link).name)
	if a.gate != nil {
		<-a.gate
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.attached != nil {
		panic("attached twice")
	}
	a.attached = l.(*link)
}

func (a *attacher) DetachVM() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.attached != nil {
		a.calls = append(a.calls, "detach "+a.attached.name)
		a.attached = nil
	}
}

func (a *attacher) Close() error {
	a.note("close")
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		panic("closed twice")
	}
	a.closed = true
	return nil
}

// link is a Link whose node answers as it is told.
type link struct {
	name      string
	connected bool
	of        *attacher
	done      chan struct{}
	reason    error

	mu     sync.Mutex
	answer error // nil: the node answers after 1 ms
	silent bool  // the node does not answer at all
	deaf   bool  // Probe does not even heed its context, only Close
	probes []time.Time
	closed chan struct{}
	slow   time.Duration // Close takes so long
	paused bool          // as it was last told
}

func (a *attacher) newLink(name string, connected bool) *link {
	return &link{name: name, connected: connected, of: a, done: make(chan struct{}), closed: make(chan struct{})}
}

// set changes how the node answers.
func (l *link) set(change func(*link)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l)
}

func (l *link) Probe(ctx context.Context) (time.Duration, error) {
	l.mu.Lock()
	l.probes = append(l.probes, time.Now())
	answer, silent, deaf := l.answer, l.silent, l.deaf
	l.mu.Unlock()
	switch {
	case deaf:
		<-l.closed
		return time.Millisecond, nil // a late answer
	case silent:
		<-ctx.Done()
		return 0, fmt.Errorf("probe: %w", ctx.Err())
	case answer != nil:
		return 0, answer
	}
	time.Sleep(time.Millisecond)
	return time.Millisecond, nil
}

func (l *link) SetPaused(paused bool) { l.set(func(l *link) { l.paused = paused }) }

func (l *link) isPaused() (paused bool) {
	l.set(func(l *link) { paused = l.paused })
	return paused
}

func (l *link) Connected() bool       { return l.connected }
func (l *link) Done() <-chan struct{} { return l.done }
func (l *link) Err() error {
	select {
	case <-l.done:
		return l.reason
	default:
		return nil
	}
}

func (l *link) Close() error {
	time.Sleep(l.slow)
	l.of.note("close " + l.name)
	close(l.closed) // panics when closed twice
	return nil
}

var (
	_ Publisher = (*publisher)(nil)
	_ Source    = (*source)(nil)
	_ Attacher  = (*attacher)(nil)
	_ Link      = (*link)(nil)

	errBoom = errors.New("boom")
)
