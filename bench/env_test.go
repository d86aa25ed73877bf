package bench

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
)

// TestMain prints what the figures depend on, once a run; or plays a peer
// process when this binary was started as one.
func TestMain(m *testing.M) {
	if role := os.Getenv("CULVERT_BENCH_ROLE"); role != "" {
		os.Exit(playRole(role))
	}
	// stderr, so that benchstat reads the rest; the figures' file keeps both.
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
	return lines
}
