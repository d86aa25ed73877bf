package netstack

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// A timer runs after as much time of the clock as it was set for, whenever the
// clock stood meanwhile.
func TestClockTimers(t *testing.T) {
	const minute = time.Minute
	for _, c := range []struct {
		name  string
		steps []time.Duration // alternately going and standing
		want  time.Duration   // since the timer was set for 10 minutes
	}{
		{"never stood", nil, 10 * minute},
		{"stood before it was due", []time.Duration{2 * minute, 5 * minute}, 15 * minute},
		{"stands when it would be due", []time.Duration{2 * minute, 24 * 60 * minute}, (24*60 + 10) * minute},
		{"stood twice", []time.Duration{2 * minute, 20 * minute, 3 * minute, 30 * minute}, 60 * minute},
		{"set while it stands", []time.Duration{0, 20 * minute}, 30 * minute},
		{"stood again when it was set for the rest", []time.Duration{9 * minute, 2 * minute, minute / 2, 2 * minute}, 14 * minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newClock()
				time.Sleep(time.Hour)
				if len(c.steps) > 0 && c.steps[0] == 0 {
					k.setStopped(true)
				}
				set, before := time.Now(), k.elapsed()
				ran := make(chan time.Duration, 2)
				k.AfterFunc(10*minute, func() { ran <- time.Since(set) })
				for i, d := range c.steps {
					time.Sleep(d)
					synctest.Wait()
					k.setStopped(i%2 == 0)
					k.setStopped(i%2 == 0)
				}
				assert.Equal(t, c.want, <-ran)
				assert.Equal(t, 10*minute, k.elapsed()-before)
				time.Sleep(time.Hour)
				assert.Empty(t, ran, "once")
				assert.Empty(t, k.parked)
			})
		})
	}
}

// What is stopped does not run, and is not kept for the end of a pause.
func TestClockTimerStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newClock()
		var ran atomic.Int32
		running := k.AfterFunc(time.Second, func() { ran.Add(1) })
		assert.True(t, running.Stop())
		assert.False(t, running.Stop())
		k.setStopped(true)
		parked := k.AfterFunc(time.Second, func() { ran.Add(1) })
		again := k.AfterFunc(time.Second, func() { ran.Add(100) })
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Len(t, k.parked, 2)
		assert.True(t, parked.Stop())
		again.Reset(time.Hour)
		assert.Empty(t, k.parked)
		k.setStopped(false)
		time.Sleep(time.Hour - time.Second)
		synctest.Wait()
		assert.Zero(t, ran.Load())
		time.Sleep(time.Second)
		synctest.Wait()
		assert.EqualValues(t, 100, ran.Load())
		assert.False(t, again.Stop())
		again.Reset(0)
		synctest.Wait()
		assert.EqualValues(t, 200, ran.Load())
	})
}

func TestClockResumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newClock()
		assert.Zero(t, k.resumed())
		k.setStopped(true)
		time.Sleep(time.Minute)
		assert.Equal(t, time.Now(), k.resumed())
		k.setStopped(false)
		at := time.Now()
		time.Sleep(time.Minute)
		assert.Equal(t, at, k.resumed())
	})
}

// Readings never go back, whoever reads while the clock stops and goes.
func TestClockGoesForward(t *testing.T) {
	k := newClock()
	var last atomic.Int64 // of what somebody has read already
	var wg sync.WaitGroup
	done := make(chan struct{})
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				before := last.Load()
				now := int64(k.elapsed())
				if !assert.GreaterOrEqual(t, now, before) {
					return
				}
				for was := last.Load(); was < now && !last.CompareAndSwap(was, now); was = last.Load() {
				}
			}
		})
	}
	for i := range 20_000 {
		k.setStopped(i%2 == 0)
	}
	close(done)
	wg.Wait()
}
