package reconcile

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/require"
)

// singlePorts returns n publishes of one port each.
func singlePorts(tb testing.TB, n int) []listener.Spec {
	tb.Helper()
	specs := make([]listener.Spec, n)
	for i := range specs {
		specs[i] = mustSpec(tb, "default", fmt.Sprintf("%d:80", 10_000+i))
	}
	return specs
}

// BenchmarkStatic is what publishes of 10 000 single ports cost until the Publisher
// has been told: all of them in one change, and one beside all the others.
func BenchmarkStatic(b *testing.B) {
	const ports = 10_000
	specs := singlePorts(b, ports)
	start := func() *Static { return NewStatic(NewLoop(newTablePublisher(), slog.New(slog.DiscardHandler))) }
	add := func(b *testing.B, s *Static, specs ...listener.Spec) {
		_, err := s.Add(b.Context(), specs...)
		require.NoError(b, err)
	}
	remove := func(b *testing.B, s *Static, specs ...listener.Spec) {
		unknown, err := s.Remove(b.Context(), specs...)
		require.NoError(b, err)
		require.Empty(b, unknown)
	}
	b.Run("add", func(b *testing.B) {
		for b.Loop() {
			add(b, start(), specs...)
		}
	})
	b.Run("remove", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			s := start()
			add(b, s, specs...)
			b.StartTimer()
			remove(b, s, specs...)
		}
	})
	b.Run("one", func(b *testing.B) { // added and removed
		s := start()
		add(b, s, specs[1:]...)
		for b.Loop() {
			add(b, s, specs[0])
			remove(b, s, specs[0])
		}
	})
}
