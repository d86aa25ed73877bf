package stack

import (
	"os"
	"runtime"
)

// LimitProcs has Go's scheduler use half of the processors that the program may
// use, and one at least; a GOMAXPROCS in the environment is obeyed instead. It is
// for the start of a program whose work is a Forwarder's, before any goroutine.
//
// A forwarded byte is worked on by three: the client, the guest and this process,
// which finish together. Given all processors, the scheduler keeps threads awake
// to look for work on those that the other two are about to use. On a machine with
// two processors, one for the daemon moves a third more through one flow, with a
// third less processor time a byte, and opens a third more connections a second
// (bench, TCPStream and Connect).
func LimitProcs() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
	}
}
