package bench

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"github.com/culvertnet/culvert/stack"
)

// seconds is how long one measurement of a rate lasts: CULVERT_BENCH_SECONDS.
var seconds = 3

// withPeers says that this is the table of peers, CULVERT_BENCH_PEERS=1: all paths,
// of each what is compared; or else culvert's own paths, of each everything.
var withPeers = os.Getenv("CULVERT_BENCH_PEERS") == "1"

// TestMain prints what the figures depend on, once a run; or plays a peer
// process when this binary was started as one.
func TestMain(m *testing.M) {
	_ = raiseFDs() // what wants more than there are says so
	if os.Getenv("CULVERT_BENCH_ROLE") == "1" {
		os.Exit(playRole(os.Args[1], os.Args[2:]))
	}
	stack.LimitProcs() // as the daemon does
	if text := os.Getenv("CULVERT_BENCH_SECONDS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			fmt.Fprintln(os.Stderr, "CULVERT_BENCH_SECONDS: want a whole number from 1, not", text)
			os.Exit(2)
		}
		seconds = n
	}
	for _, line := range environment() {
		fmt.Println(line)
	}
	os.Exit(m.Run())
}

// environment describes machine, system and versions, in benchstat's form of
// configuration lines.
func environment() []string {
	var lines []string
	add := func(key, value string) { lines = append(lines, key+": "+strings.TrimSpace(value)) }
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		add("kernel", string(b))
	}
	add("cpus", fmt.Sprint(runtime.NumCPU()))
	add("go", runtime.Version())
	add("gomaxprocs", fmt.Sprint(runtime.GOMAXPROCS(0)))
	add("seconds", fmt.Sprint(seconds))
	if out, err := exec.Command("git", "rev-parse", "--short", "HEAD").Output(); err == nil {
		add("commit", string(out))
	}
	if out, err := exec.Command("iperf3", "--version").Output(); err == nil {
		add("iperf3", strings.SplitN(string(out), "\n", 2)[0])
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			if dep.Path == "gvisor.dev/gvisor" {
				add("gvisor", dep.Version)
			}
		}
	}
	if withPeers {
		lines = append(lines, peerVersions()...)
	}
	return lines
}
