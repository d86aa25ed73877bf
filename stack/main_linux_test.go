package stack

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// TestMain fails the package when a test left a descriptor or a goroutine.
func TestMain(m *testing.M) {
	// The runtime's poller has descriptors of its own, from its first use on.
	r, w, err := os.Pipe()
	if err != nil {
		panic(err)
	}
	_ = r.SetReadDeadline(time.Now())
	r.Close()
	w.Close()
	fds, goroutines := openFDs(), runtime.NumGoroutine()
	code := m.Run()
	if code == 0 && !settled(fds, goroutines) {
		fmt.Printf("FAIL: %d descriptors, were %d; %d goroutines, were %d\n", openFDs(), fds, runtime.NumGoroutine(), goroutines)
		buf := make([]byte, 1<<16)
		fmt.Printf("%s\n", buf[:runtime.Stack(buf, true)])
		code = 1
	}
	os.Exit(code)
}

// settled waits until there are no more descriptors and goroutines than that,
// for what C-19 allows.
func settled(fds, goroutines int) bool {
	for range 300 {
		if openFDs() <= fds && runtime.NumGoroutine() <= goroutines {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func openFDs() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(entries)
}
