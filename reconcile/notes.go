package reconcile

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
)

// A NoteView is a Note in force.
type NoteView struct {
	Owner listener.Owner
	Note
	Since time.Time // when State was entered
	seq   int       // order of asking
}

// A noteKey tells notes apart over time.
type noteKey struct {
	owner                 listener.Owner
	protocol, host, guest string
}

// Notes returns the notes in force, in the order of asking.
func (l *Loop) Notes() []NoteView {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.SortedFunc(maps.Values(l.noted), func(a, b NoteView) int { return cmp.Compare(a.seq, b.seq) })
}

// Changed returns a channel that is closed when Notes next gives something else.
func (l *Loop) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

// note makes the notes in force those of wants, and logs each that is new or has
// another state, once. It runs with mu held.
func (l *Loop) note(wants []Want) {
	noted := make(map[noteKey]NoteView)
	for _, w := range wants {
		for _, n := range w.Notes {
			key := noteKey{w.Owner, n.Protocol, n.Host, n.Guest}
			if _, twice := noted[key]; twice {
				continue
			}
			noted[key] = NoteView{Owner: w.Owner, Note: n, Since: time.Now(), seq: len(noted)}
		}
	}
	same := len(noted) == len(l.noted)
	for key, is := range noted {
		was, there := l.noted[key]
		if there && was.State == is.State {
			is.Since = was.Since
			noted[key] = is
		}
		if there && was.Note == is.Note {
			continue
		}
		same = false
		if !there || was.State != is.State || was.Detail != is.Detail {
			l.log.Info("not published", "state", is.State.String(), "owner", is.Owner.String(), "vm", is.Owner.VM,
				"protocol", is.Protocol, "host", is.Host, "detail", is.Detail)
		}
	}
	l.noted = noted
	if !same {
		close(l.changed)
		l.changed = make(chan struct{})
	}
}
