package listener

import (
	"flag"
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
	fuzzing := flag.Lookup("test.fuzz").Value.String() != "" // the engine leaves goroutines
	if code == 0 && !fuzzing {
		// What a test has waited for may still be on its last instructions.
		for range 100 {
			runtime.GC()
			if openFDs() <= fds && runtime.NumGoroutine() <= goroutines {
				os.Exit(0)
			}
			time.Sleep(10 * time.Millisecond)
		}
		fmt.Printf("FAIL: %d descriptors, were %d; %d goroutines, were %d\n", openFDs(), fds, runtime.NumGoroutine(), goroutines)
		code = 1
	}
	os.Exit(code)
}

func openFDs() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(entries)
}
