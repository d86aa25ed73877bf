package reconcile

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestBackoffDoublesUpToItsMax(t *testing.T) {
	b := backoff{min: 250 * time.Millisecond, max: 2 * time.Second, random: func() float64 { return 0 }}
	var got []time.Duration
	for range 6 {
		got = append(got, b.delay())
	}
	ms := time.Millisecond
	assert.Equal(t, []time.Duration{250 * ms, 500 * ms, 1000 * ms, 2000 * ms, 2000 * ms, 2000 * ms}, got)
	b.reset()
	assert.Equal(t, 250*ms, b.delay())
}

func TestBackoffJitterTakesUpToHalf(t *testing.T) {
	b := backoff{min: time.Second, max: time.Second, random: func() float64 { return 0.5 }}
	assert.Equal(t, 750*time.Millisecond, b.delay())
	b.random = nil
	seen := make(map[time.Duration]bool)
	for range 1000 {
		d := b.delay()
		assert.Greater(t, d, 500*time.Millisecond)
		assert.LessOrEqual(t, d, time.Second)
		seen[d] = true
	}
	assert.Greater(t, len(seen), 900, "delays differ")
}
