package datapathtest

import (
	"os"
	"runtime"
	"testing"
	"time"
)

// settle is how long a test's leftovers may take to go: what C-19 allows.
const settle = 3 * time.Second

// Leaks takes the process's open descriptors and goroutines as the baseline and
// asserts, when the test and the clean-ups it registers later have ended, that
// there are no more of either. It waits up to 3 s for them to go. The counts
// are the process's: a test that uses it does not run in parallel with others.
func Leaks(tb testing.TB) {
	tb.Helper()
	leaks(tb, settle)
}

func leaks(tb testing.TB, settle time.Duration) {
	tb.Helper()
	warmPoller(tb)
	fds, goroutines := openFDs(tb), runtime.NumGoroutine()
	tb.Cleanup(func() {
		if tb.Failed() || tb.Skipped() {
			return // it stopped half-way; what is left over says nothing
		}
		deadline := time.Now().Add(settle)
		for {
			f, g := openFDs(tb), runtime.NumGoroutine()
			if f <= fds && g <= goroutines {
				return
			}
			if time.Now().After(deadline) {
				stacks := make([]byte, 64<<10)
				stacks = stacks[:runtime.Stack(stacks, true)]
				tb.Errorf("left behind: %d descriptors (was %d), %d goroutines (was %d)\n%s",
					f, fds, g, goroutines, stacks)
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
}

// warmPoller makes the runtime create its poller, whose descriptors stay for
// the life of the process, before they can be taken for a leak.
func warmPoller(tb testing.TB) {
	tb.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		tb.Fatalf("open pipe: %v", err)
	}
	_ = r.Close()
	_ = w.Close()
}

// openFDs returns the number of open descriptors, the one that reads the
// directory included: it is there each time.
func openFDs(tb testing.TB) int {
	tb.Helper()
	fds, err := os.ReadDir("/dev/fd") // on Linux a link to /proc/self/fd
	if err != nil {
		tb.Fatalf("count descriptors: %v", err)
	}
	return len(fds)
}
