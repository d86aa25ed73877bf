package reconcile

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"
)

// applyBounds are the upper bounds of Stats.Applies' buckets: from what comparing
// a few rows takes to what opening ten thousand sockets does.
var applyBounds = [...]time.Duration{
	100 * time.Microsecond, time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, time.Second, 10 * time.Second,
}

// Stats is a reading of what a Loop has counted since it was made; nothing in it
// falls. It is a consistent cut.
type Stats struct {
	Published uint64 // times an owner's specs were stated to the Publisher
	Withdrawn uint64 // times an owner was withdrawn
	Resyncs   uint64 // times everything was stated again
	// Applies are the times that what is wanted was compared with what the
	// Publisher was told, and the difference applied.
	Applies Durations
	// Sources are those that have ever spoken or failed, by VM and name.
	Sources []SourceStats
}

// SourceStats count one source of one VM, over all lives of the VM.
type SourceStats struct {
	VM, Source string    // VM is empty for a source that speaks for every VM
	Snapshots  uint64    // that counted
	Stale      uint64    // that were of an earlier life, and ignored (C-27)
	Failures   uint64    // times that it ended and had to be run again
	Last       time.Time // when the last that counted came; zero before the first
}

// Durations count how long something took.
type Durations struct {
	Count   uint64
	Sum     time.Duration
	Buckets map[time.Duration]uint64 // upper bound to how many took no longer
}

// stats counts for a Loop.
type stats struct {
	mu      sync.Mutex
	now     Stats
	took    [len(applyBounds)]uint64 // how many took no longer
	sources map[sourceKey]*SourceStats
}

// Stats returns what the loop has counted. It waits for nobody but the counting.
func (l *Loop) Stats() Stats { return l.stats.get() }

func (s *stats) get() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now
	now.Applies.Buckets = make(map[time.Duration]uint64, len(applyBounds))
	for i, bound := range applyBounds {
		now.Applies.Buckets[bound] = s.took[i]
	}
	now.Sources = make([]SourceStats, 0, len(s.sources))
	for _, key := range slices.SortedFunc(maps.Keys(s.sources), func(a, b sourceKey) int {
		return cmp.Or(cmp.Compare(a.vm, b.vm), cmp.Compare(a.name, b.name))
	}) {
		now.Sources = append(now.Sources, *s.sources[key])
	}
	return now
}

// applied counts one converge that began at a time.
func (s *stats) applied(began time.Time, published, withdrawn int) {
	took := time.Since(began)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Published += uint64(published)
	s.now.Withdrawn += uint64(withdrawn)
	s.now.Applies.Count++
	s.now.Applies.Sum += took
	for i, bound := range applyBounds {
		if took <= bound {
			s.took[i]++
		}
	}
}

func (s *stats) resynced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Resyncs++
}

// source counts what happened to a source.
func (s *stats) source(vm, name string, count func(*SourceStats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := sourceKey{vm, name}
	if s.sources == nil {
		s.sources = make(map[sourceKey]*SourceStats)
	}
	if s.sources[key] == nil {
		s.sources[key] = &SourceStats{VM: vm, Source: name}
	}
	count(s.sources[key])
}
