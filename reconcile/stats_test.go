package reconcile

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLoopStats(t *testing.T) {
	inLoop(t, func(t *testing.T, l *Loop, p *publisher, _ *logBuffer) {
		before := l.Stats()
		assert.Zero(t, before.Applies.Count)
		assert.Empty(t, before.Sources)

		src := newSource("containers")
		l.AddSource("vm", 3, src)
		began := time.Now()
		src.send <- Snapshot{Source: "containers", VM: "vm", Generation: 3, Wants: []Want{want(t, "a", "80:80"), want(t, "b", "81:80")}}
		synctest.Wait()
		src.send <- Snapshot{Source: "containers", VM: "vm", Generation: 2} // of an earlier life
		synctest.Wait()
		time.Sleep(time.Second)
		src.send <- Snapshot{Source: "containers", VM: "vm", Generation: 3, Wants: []Want{want(t, "b", "81:80")}}
		synctest.Wait()
		src.fail <- errBoom
		synctest.Wait()
		err := l.Apply(t.Context(), Snapshot{Source: "static"})
		require.NoError(t, err)

		s := l.Stats()
		assert.Equal(t, []SourceStats{
			{Source: "static", Snapshots: 1, Last: time.Now()},
			{VM: "vm", Source: "containers", Snapshots: 2, Stale: 1, Failures: 1, Last: began.Add(time.Second)},
		}, s.Sources)
		assert.EqualValues(t, 2, s.Published)
		assert.EqualValues(t, 1, s.Withdrawn)
		assert.EqualValues(t, 3, s.Applies.Count, "what is stale is not applied")
		assert.Zero(t, s.Applies.Sum, "time stands still in a bubble")
		assert.Len(t, s.Applies.Buckets, len(applyBounds))
		for bound, n := range s.Applies.Buckets {
			assert.EqualValues(t, 3, n, bound)
		}
		assert.Zero(t, s.Resyncs)

		// What took long is in the buckets above it alone.
		l.stats.applied(time.Now().Add(-50*time.Millisecond), 0, 0)
		s = l.Stats()
		assert.Equal(t, 50*time.Millisecond, s.Applies.Sum)
		assert.EqualValues(t, 3, s.Applies.Buckets[10*time.Millisecond])
		assert.EqualValues(t, 4, s.Applies.Buckets[100*time.Millisecond])

		// The VM's end forgets nothing; the next life counts on.
		l.DropVM("vm")
		l.AddSource("vm", 4, newSource("containers"))
		time.Sleep(resyncEvery)
		synctest.Wait()
		s = l.Stats()
		assert.EqualValues(t, 2, s.Sources[1].Snapshots)
		assert.EqualValues(t, 1, s.Resyncs)
	})
}
