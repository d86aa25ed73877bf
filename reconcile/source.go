package reconcile

import (
	"context"

	"github.com/culvertnet/culvert/stack/listener"
)

// A Source says what is to be published: the config file and the CLI, the
// containers of a VM, the Services of its cluster.
type Source interface {
	// Name tells sources apart; a Snapshot replaces the former of its source.
	Name() string
	// Run sends a Snapshot to out whenever what is wanted may have changed,
	// the first as soon as it is known, until ctx ends. It returns ctx's error
	// or the reason it cannot go on; it never closes out.
	Run(ctx context.Context, out chan<- Snapshot) error
}

// A Snapshot is all that one source wants, complete: an owner that is missing
// from it is no longer wanted (C-31: a source that could not list sends none).
type Snapshot struct {
	Source string
	// VM and Generation say which life of which VM was looked at. A snapshot of
	// an earlier generation is ignored (C-27). VM is empty for a source that
	// speaks for every VM.
	VM         string
	Generation uint64
	Owners     map[listener.Owner][]listener.Spec
}

// A Publisher opens and closes listeners. *stack.Forwarder is one.
type Publisher interface {
	// Publish makes the owner's listeners exactly specs and reports one Outcome
	// each, in their order. Unchanged ones are not touched.
	Publish(ctx context.Context, o listener.Owner, specs []listener.Spec) []listener.Outcome
	// Withdraw drops all of the owner's listeners. When it returns their ports
	// are free (C-4). Unknown owners are no error.
	Withdraw(ctx context.Context, o listener.Owner)
	// Owners lists who has rows, for pruning.
	Owners() []listener.Owner
}
