package vhostuser

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// TestIdle: a VM that does nothing costs nothing, also with a reader in wait and
// right after traffic. Counted is how often this process gave up the processor to
// wait (getrusage(2), ru_nvcsw): who looks at a ring every pollEvery does so
// a thousand times for each, who waits for a kick a few times, all of the runtime's own;
// a busy machine changes neither. Who spins waits for nothing, but uses time.
func TestIdle(t *testing.T) {
	const idle = time.Second
	cost := func(t *testing.T, cfg config) (waits int64, cpu time.Duration) {
		datapathtest.Leaks(t)
		cfg.features |= featureMQ
		cfg.pairs = 4
		_, a, v := mustOpen(t, cfg)
		exchange(t, a, v, 1)
		for _, qp := range a.QueuePairs()[1:] {
			go func() { _, _ = qp.ReadBatch(make([]datapath.Frame, 1), lend) }()
		}
		read := make(chan [][]byte)
		go func() { read <- mustRead(t, a, 300) }()
		for range 4 {
			for seq := range uint32(txBufs) { // the reader looks as often as it ever does
				require.NoError(t, (&peer{v}).Send(frame(60, seq)))
			}
		}
		var before, after unix.Rusage
		require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &before))
		time.Sleep(idle)
		require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &after))
		for seq := range uint32(300 - 4*txBufs) {
			require.NoError(t, (&peer{v}).Send(frame(60, seq)))
		}
		require.Len(t, <-read, 300)
		require.NoError(t, a.Close())
		used := func(r unix.Rusage) time.Duration { return time.Duration(r.Utime.Nano() + r.Stime.Nano()) }
		return after.Nvcsw - before.Nvcsw, used(after) - used(before)
	}
	polled := plain()
	polled.noKick = true
	for name, test := range map[string]struct {
		cfg  config
		idle bool
	}{
		"kicked": {plain(), true},
		"polled": {polled, false}, // or what is counted would say nothing
	} {
		t.Run(name, func(t *testing.T) {
			waits, cpu := cost(t, test.cfg)
			t.Logf("%d waits and %v of processor time in %v", waits, cpu, idle)
			assert.Equal(t, test.idle, waits < 200, "%d waits", waits)
			assert.Less(t, cpu, idle/2)
		})
	}
}
