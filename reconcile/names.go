package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
)

const (
	// A name is at most 253 bytes of labels of 1 to 63 bytes: what is left of RFC
	// 1035's 255 without the length bytes at both ends.
	maxName  = 253
	maxLabel = 63
	// A prefix that stands for a container has at least so many digits (C-36).
	minPrefix = 4
	// maxReverse is how many names one address leads back to. With `address: host`
	// every name leads to 127.0.0.1, and an answer has to end somewhere.
	maxReverse = 64
	// maxCandidates is how many containers an ambiguous prefix names.
	maxCandidates = 8
)

var (
	// ErrNoOwner says that nothing in force is meant by a text.
	ErrNoOwner = errors.New("no such container")
	// ErrAmbiguous says that a text means more than one container.
	ErrAmbiguous = errors.New("more than one container begins so")
)

// Names is the table of names: who has each, and where it leads (C-37). The
// Loop keeps it equal to what is wanted. All methods are safe for concurrent
// use.
//
// A table is never changed: set makes a new one and puts it in the place of the
// old, so that a reader sees one moment and waits for nobody. Only of its ids, which
// no guest's question needs, single ones come and go.
type Names struct {
	table atomic.Pointer[nameTable]

	mu sync.RWMutex // guards the table's ids
}

// A nameTable is the names in force at one moment.
type nameTable struct {
	names map[string][]nameHolder // the newest first
	above map[string]bool         // "shop" for "db.shop": names that others are below of
	back  map[netip.Addr][]string // the names that lead to an address, the newest first
	ids   map[string][]listener.Owner
}

// A nameHolder is one of the owners of a name.
type nameHolder struct {
	owner listener.Owner
	since time.Time
	addrs []netip.Addr
}

// A NameView is a name, for people.
type NameView struct {
	Name   string
	VM     string           // of the owner it leads to
	Owners []listener.Owner // the newest first
	Addrs  []netip.Addr
}

func newNames() *Names {
	n := new(Names)
	n.set(nil)
	return n
}

// set makes the names in force those of wants.
func (n *Names) set(wants []Want) {
	t := &nameTable{
		names: make(map[string][]nameHolder),
		above: make(map[string]bool),
		back:  make(map[netip.Addr][]string),
		ids:   make(map[string][]listener.Owner),
	}
	for _, w := range wants {
		t.ids[w.Owner.ID] = append(t.ids[w.Owner.ID], w.Owner)
		for _, name := range w.Names {
			t.names[name.Name] = append(t.names[name.Name], nameHolder{w.Owner, name.Since, name.Addrs})
		}
	}
	for name, holders := range t.names {
		slices.SortFunc(holders, func(a, b nameHolder) int {
			return cmp.Or(b.since.Compare(a.since), compareOwners(a.owner, b.owner))
		})
		for _, below, more := strings.Cut(name, "."); more; _, below, more = strings.Cut(below, ".") {
			t.above[below] = true
		}
		for _, a := range holders[0].addrs {
			t.back[a] = append(t.back[a], name)
		}
	}
	for a, names := range t.back {
		slices.SortFunc(names, func(x, y string) int {
			return cmp.Or(t.names[y][0].since.Compare(t.names[x][0].since), cmp.Compare(x, y))
		})
		t.back[a] = names[:min(len(names), maxReverse)]
	}
	n.table.Store(t)
}

// amend adds the owners of wants that have no names, those that are there already
// among them, and takes out those that are gone and had none.
func (n *Names) amend(wants []Want, gone []listener.Owner) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ids := n.table.Load().ids
	for _, w := range wants {
		if o := w.Owner; !slices.Contains(ids[o.ID], o) {
			ids[o.ID] = append(ids[o.ID], o)
		}
	}
	for _, o := range gone {
		left := slices.DeleteFunc(ids[o.ID], func(other listener.Owner) bool { return other == o })
		if len(left) == 0 {
			delete(ids, o.ID)
		} else {
			ids[o.ID] = left
		}
	}
}

// knows says whether o asks for anything.
func (n *Names) knows(o listener.Owner) bool {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return slices.Contains(n.table.Load().ids[o.ID], o)
}

func compareOwners(a, b listener.Owner) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.VM, b.VM), cmp.Compare(a.ID, b.ID))
}

// Lookup says where a name of the zone leads, in any case and without the zone:
// to the addresses of the newest of its owners or, where nobody has the name, of
// the longest name that it is below of ("x.web" is what "web" is). A name that
// is there only because others are below it exists without addresses. The caller
// must not write to the slice.
func (n *Names) Lookup(name string) (addrs []netip.Addr, exists bool) {
	t := n.table.Load()
	name = strings.ToLower(name)
	for at, more := name, true; more; _, at, more = strings.Cut(at, ".") {
		if holders := t.names[at]; holders != nil {
			return holders[0].addrs, true
		}
	}
	return nil, t.above[name]
}

// Has says whether an owner has the very name, in any case.
func (n *Names) Has(name string) bool {
	return n.table.Load().names[strings.ToLower(name)] != nil
}

// Reverse returns the names, without the zone, that lead to addr, the newest
// first; at most 64. The caller must not write to the slice.
func (n *Names) Reverse(addr netip.Addr) []string { return n.table.Load().back[addr.Unmap()] }

// Len returns how many names there are.
func (n *Names) Len() int { return len(n.table.Load().names) }

// Views returns the names in force, sorted.
func (n *Names) Views() []NameView {
	t := n.table.Load()
	views := make([]NameView, 0, len(t.names))
	for _, name := range slices.Sorted(maps.Keys(t.names)) {
		holders := t.names[name]
		v := NameView{Name: name, VM: holders[0].owner.VM, Addrs: slices.Clone(holders[0].addrs)}
		for _, h := range holders {
			v.Owners = append(v.Owners, h.owner)
		}
		views = append(views, v)
	}
	return views
}

// Resolve says who is meant by a text (C-36): the owner of exactly that id; else
// the owners that have it as a name, the newest first; else the container whose
// id begins with it, when it is four hexadecimal digits or more and no other
// container's does. Where VMs have a container of one id, it is all of them. The
// error is ErrNoOwner, or ErrAmbiguous with the candidates named.
func (n *Names) Resolve(text string) ([]listener.Owner, error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	t := n.table.Load()
	if owners := t.ids[text]; owners != nil {
		return slices.Clone(owners), nil
	}
	if holders := t.names[strings.ToLower(text)]; holders != nil {
		owners := make([]listener.Owner, len(holders))
		for i, h := range holders {
			owners[i] = h.owner
		}
		return owners, nil
	}
	var ids []string
	prefix := strings.ToLower(text)
	if len(prefix) >= minPrefix && strings.Trim(prefix, "0123456789abcdef") == "" {
		for id, owners := range t.ids {
			if owners[0].Kind == listener.KindDocker && strings.HasPrefix(id, prefix) {
				ids = append(ids, id)
			}
		}
	}
	switch len(ids) {
	case 0:
		return nil, fmt.Errorf("%q: %w", text, ErrNoOwner)
	case 1:
		return slices.Clone(t.ids[ids[0]]), nil
	}
	slices.Sort(ids)
	return nil, fmt.Errorf("%q: %w: %s", text, ErrAmbiguous, t.candidates(ids))
}

// candidates names containers as docker does, with their names: "0123456789ab
// (web), …".
func (t *nameTable) candidates(ids []string) string {
	called := make(map[string]string)
	for _, name := range slices.Sorted(maps.Keys(t.names)) {
		for _, h := range t.names[name] {
			if called[h.owner.ID] == "" || !strings.Contains(name, ".") {
				called[h.owner.ID] = name
			}
		}
	}
	var texts []string
	for i, id := range ids {
		if i == maxCandidates {
			texts = append(texts, fmt.Sprintf("and %d more", len(ids)-i))
			break
		}
		text := id[:min(len(id), 12)]
		if name := called[id]; name != "" {
			text += " (" + name + ")"
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// dnsName returns what a guest calls something as a name of the zone: lower-case
// labels of letters, digits, hyphens and underscores, which DNS carries and
// resolvers pass on. The error says why it is none.
func dnsName(text string) (string, error) {
	if len(text) > maxName {
		return "", fmt.Errorf("it has %d bytes, a name at most %d", len(text), maxName)
	}
	name := strings.ToLower(text)
	for label := range strings.SplitSeq(name, ".") {
		switch {
		case label == "":
			return "", errors.New("a part between dots is empty")
		case len(label) > maxLabel:
			return "", fmt.Errorf("a part between dots has %d bytes, a label at most %d", len(label), maxLabel)
		case strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "":
			return "", errors.New("it has other characters than letters, digits, '-', '_' and '.'")
		}
	}
	return name, nil
}
