package reconcile

import (
	"fmt"
	"log/slog"
	"sync"
	"time"
)

const (
	// An engine that has not answered for this long is said to be slow.
	slowAfter = 5 * time.Second
	// sayEvery is the least time between two warnings of one kind: an engine that
	// comes and goes fills no log.
	sayEvery = time.Minute
	// eventsMissed is how often in a row the stream of events may end, or not open,
	// before it is said.
	eventsMissed = 5
)

// A ContainersStatus says how it stands between a source and its engine.
type ContainersStatus struct {
	// Reachable says that the last listing succeeded.
	Reachable bool
	// Detail is the sentence for people; empty when all is well.
	Detail string
	// Failures counts the listings in a row that failed.
	Failures int
	// Listed is when the last complete listing arrived; zero before the first.
	Listed time.Time
	// Containers is how many that one had.
	Containers int
}

// containersStatus keeps a ContainersStatus and says its changes in the log: one
// warning when the engine stops answering, one line when it is back.
type containersStatus struct {
	log *slog.Logger

	mu       sync.Mutex
	now      ContainersStatus
	asked    time.Time // when the listing under way began; zero when none is
	noAnswer warning
	noEvents warning
	unheard  int       // times in a row that the stream ended or did not open
	since    time.Time // when the first of them was
	why      string    // of the last
}

// A warning is said when something lasts and was not said within a minute, and
// taken back when it is over.
type warning struct {
	on   bool
	last time.Time
}

// due says whether the warning is to be said now.
func (w *warning) due() bool {
	if w.on || !w.last.IsZero() && time.Since(w.last) < sayEvery {
		return false
	}
	w.on, w.last = true, time.Now()
	return true
}

// over says whether the warning was said and is to be taken back.
func (w *warning) over() bool {
	was := w.on
	w.on = false
	return was
}

// Status says how it stands with the engine now.
func (c *Containers) Status() ContainersStatus { return c.status.get() }

func (s *containersStatus) get() ContainersStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now
	waited := time.Duration(0)
	if !s.asked.IsZero() {
		waited = time.Since(s.asked)
	}
	switch {
	case now.Detail != "":
	case waited >= slowAfter:
		now.Detail = fmt.Sprintf("the container engine has not answered for %s", waited.Truncate(time.Second))
	case !now.Reachable:
		now.Detail = "the container engine has not answered yet"
	case s.deaf():
		now.Detail = s.eventsSentence()
	}
	return now
}

// deaf says whether there are no events from an engine that is there.
func (s *containersStatus) deaf() bool {
	return s.unheard >= eventsMissed && s.now.Reachable && s.now.Listed.After(s.since)
}

func (s *containersStatus) eventsSentence() string {
	return fmt.Sprintf("changes of containers are seen within %s only: %s", containersEvery, s.why)
}

func (s *containersStatus) asking() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = time.Now()
}

func (s *containersStatus) listed(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = time.Time{}
	first := s.now.Listed.IsZero()
	s.now = ContainersStatus{Reachable: true, Listed: time.Now(), Containers: n}
	if s.noAnswer.over() || first {
		s.log.Info("container engine answers", "containers", n)
	}
}

func (s *containersStatus) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = time.Time{}
	s.now.Reachable, s.now.Detail = false, err.Error()
	s.now.Failures++
	if s.noAnswer.due() {
		s.log.Warn("container engine does not answer, what it published stays", "err", err)
	}
}

func (s *containersStatus) subscribed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unheard = 0
	if s.noEvents.over() {
		s.log.Info("container engine's events are followed again")
	}
}

// unsubscribed counts a stream that ended, or did not open, and returns how often
// in a row it was. It says so only while the engine answers otherwise: that one is
// gone is another warning.
func (s *containersStatus) unsubscribed(err error) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unheard++; s.unheard == 1 {
		s.since = time.Now()
	}
	s.why = "the engine's stream of events ended"
	if err != nil {
		s.why = err.Error()
	}
	if s.deaf() && s.noEvents.due() {
		s.log.Warn("container engine's events cannot be followed", "detail", s.eventsSentence())
	}
	return s.unheard
}
