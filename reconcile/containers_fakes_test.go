package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/stretchr/testify/assert"
)

// An engine is a containerEngine that does as it is told.
type engine struct {
	mu      sync.Mutex
	running map[string]docker.Container // by ID
	fails   error                       // what listings return
	slow    time.Duration               // listings take so long
	deaf    bool                        // streams cannot be opened
	listing bool
	lists   []time.Time // when listings began
	streams map[chan docker.Event]func()
	opened  int
}

func newEngine(cs ...docker.Container) *engine {
	e := &engine{running: make(map[string]docker.Container), streams: make(map[chan docker.Event]func())}
	for _, c := range cs {
		e.running[c.ID] = c
	}
	return e
}

// Containers answers with what ran when it was asked, after a while, in no order.
func (e *engine) Containers(ctx context.Context) ([]docker.Container, error) {
	e.mu.Lock()
	if e.listing {
		panic("two listings at a time")
	}
	e.listing = true
	e.lists = append(e.lists, time.Now())
	found := slices.Collect(maps.Values(e.running))
	slow, err := e.slow, e.fails
	e.mu.Unlock()
	if !sleep(ctx, slow) {
		err = fmt.Errorf("engine did not answer in time: %w", ctx.Err())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.listing = false
	if err != nil {
		return nil, err
	}
	return found, nil
}

func (e *engine) Watch(ctx context.Context, subscribed func(), changed func(docker.Event)) error {
	e.mu.Lock()
	if e.deaf {
		e.mu.Unlock()
		return errors.New("engine at tcp://10.0.2.2:2375 does not answer")
	}
	ctx, cut := context.WithCancel(ctx)
	defer cut()
	events := make(chan docker.Event, 10000)
	e.streams[events] = cut
	e.opened++
	e.mu.Unlock()
	defer e.set(func() { delete(e.streams, events) })
	subscribed()
	for {
		select {
		case ev := <-events:
			changed(ev)
		case <-ctx.Done():
			return errors.New("stream ended")
		}
	}
}

// set changes the engine without an event.
func (e *engine) set(change func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change()
}

// start and stop change what runs, and say so.
func (e *engine) start(cs ...docker.Container) {
	for _, c := range cs {
		e.set(func() { e.running[c.ID] = c })
		e.tell(c.ID, "start")
	}
}

func (e *engine) stop(ids ...string) {
	for _, id := range ids {
		e.set(func() { delete(e.running, id) })
		e.tell(id, "die")
	}
}

func (e *engine) tell(id, action string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for events := range e.streams {
		events <- docker.Event{ID: id, Action: action}
	}
}

// cut ends the streams; with deaf they cannot be opened again.
func (e *engine) cut(deaf bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.deaf = deaf
	for _, end := range e.streams {
		end()
	}
}

func (e *engine) listings() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.lists)
}

// has returns what the engine publishes as a publisher should have it.
func (e *engine) has() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	rows := []string{}
	for _, c := range e.running {
		for _, b := range c.Bindings {
			rows = append(rows, fmt.Sprintf("%s %d:%d/%s", c.ID, b.HostPort, b.HostPort, b.Proto))
		}
	}
	slices.Sort(rows)
	return rows
}

// tcp is a port that the engine publishes without an address.
func tcp(hostPort, port uint16) docker.Binding {
	return docker.Binding{Proto: "tcp", HostPort: hostPort, Port: port}
}

// at puts a binding on an address of the guest.
func at(addr string, b docker.Binding) docker.Binding {
	b.HostIP = netip.MustParseAddr(addr)
	return b
}

func over(proto string, b docker.Binding) docker.Binding {
	b.Proto = proto
	return b
}

// run makes a container that was started n seconds after the epoch.
func run(id string, n int, bindings ...docker.Binding) docker.Container {
	return docker.Container{
		ID: id, Name: "name-" + id, Started: epoch.Add(time.Duration(n) * time.Second), Bindings: bindings,
		Addrs: []netip.Addr{netip.MustParseAddr("172.17.0.2")},
	}
}

var node = netip.MustParseAddr("10.0.2.2")

// options are those of a test's source, whose containers nobody reaches.
func options(e containerEngine, log *slog.Logger) ContainersOptions {
	return ContainersOptions{
		VM: "default", Generation: 1, Engine: e, Node: node, Log: log,
		HostAddr: func(netip.Addr) bool { return false },
		Reach:    func(context.Context, netip.AddrPort) error { return errBoom },
	}
}

// A containersBed is a loop with a source of containers and nothing else.
type containersBed struct {
	*engine
	pub  *publisher
	loop *Loop
	src  *Containers
	log  *logBuffer
}

// newContainersBed runs it until the test ends; in a bubble, where what leaks
// fails the test.
func newContainersBed(t *testing.T, e *engine, change ...func(*ContainersOptions)) *containersBed {
	t.Helper()
	log, lines := newLog()
	o := options(e, log)
	for _, c := range change {
		c(&o)
	}
	b := &containersBed{engine: e, pub: newPublisher(), log: lines, src: NewContainers(o)}
	b.loop = NewLoop(b.pub, log)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { assert.NoError(t, b.loop.Run(ctx)) })
	t.Cleanup(func() { cancel(); running.Wait() })
	b.loop.AddSource("default", 1, b.src)
	return b
}

// after waits for d and until nothing moves, and returns what is published then.
func (b *containersBed) after(d time.Duration) []string {
	time.Sleep(d)
	synctest.Wait()
	return b.pub.has()
}
