package reconcile

import (
	"context"
	"net/netip"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
)

// A Source says what is to be published: the containers of a VM, the Services
// of its cluster. What the config file and the CLI ask for comes from Static,
// which needs its answers at once and so applies its snapshots itself.
type Source interface {
	// Name tells the sources of one VM apart; a Snapshot replaces the former of
	// its source and VM.
	Name() string
	// Run sends a Snapshot to out whenever what is wanted may have changed,
	// the first as soon as it is known, until ctx ends. It returns ctx's error
	// or the reason it cannot go on; it never closes out. After a failure it is
	// run again, so it begins with a listing, never with what it remembers.
	Run(ctx context.Context, out chan<- Snapshot) error
}

// A Snapshot is all that one source wants, complete: an owner that is missing
// from it is no longer wanted (C-31: a source that could not list sends none).
// It is a value: nobody changes what it holds once it was sent.
type Snapshot struct {
	// Source is the name of the source that says so.
	Source string
	// VM and Generation say which life of which VM was looked at. A snapshot of
	// an earlier generation is ignored (C-27). VM is empty for a source that
	// speaks for every VM.
	VM         string
	Generation uint64
	// Wants is in the order of asking: of two owners that want one host port,
	// the first gets it, unless the second has it already (C-3, C-45).
	Wants []Want

	// changes says that Wants is not all but what changes; at is where in the Wants
	// of what the loop keeps of such snapshots each owner's is. See amend.go.
	changes bool
	at      map[listener.Owner]int
}

// A Want is the whole of what one owner asks for (C-2). With nothing in it the
// owner asks for nothing, the same as not being there.
type Want struct {
	Owner listener.Owner
	Specs []listener.Spec
	// Notes are what the owner asked for and its source could not make a Spec
	// of: rows of the ledger that no Publisher is told of.
	Notes []Note
	// Names are the names that lead to the owner (C-37).
	Names []Name
}

// A Note is a row of the ledger whose state its source knows: a port that waits
// for something in the guest, or that can never be published. Its texts are as
// a row shows them.
type Note struct {
	Protocol    string // "tcp", "udp", or what the guest calls it, in lower case
	Host, Guest string // "127.0.0.1:8080"; empty where it is not known
	State       listener.State
	Detail      string    // the sentence for people
	RetryAt     time.Time // when it is tried again; zero otherwise
}

// A Name is a name of an owner in the zone.
type Name struct {
	// Name is lower-case labels without the zone: "web", "db.shop".
	Name string
	// Addrs are what it leads to; never empty.
	Addrs []netip.Addr
	// Since orders the owners that share a name: it leads to the newest (C-37).
	Since time.Time
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
