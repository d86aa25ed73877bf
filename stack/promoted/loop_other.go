//go:build !linux

package promoted

import (
	"errors"
)

// A Source is where frames come from.
type Source interface {
	// Control calls f with a descriptor that is readable while there are frames.
	Control(f func(fd uintptr)) error
	// Read takes frames that are there, on the loop's goroutine. It reports whether
	// there may ever be more.
	Read() bool
}

type loop struct {
	late  []late
	round int
}

// Drive has one goroutine wait for everything that t's flows and source bring: on Linux.
func (t *Table) Drive(Source) error { return errors.ErrUnsupported }

// Beside has poll called now and then by a loop that is busy.
func (t *Table) Beside(func()) {}

// End has the source read once more.
func (t *Table) End() {}

func (l *loop) stop()                {}
func (l *loop) add(*Conn) error      { return errors.ErrUnsupported }
func (l *loop) addWrite(*Conn) error { return errors.ErrUnsupported }
func (l *loop) remove(*Conn)         {}
