package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// processes are those that work for a path, by id: this one alone, as it is
// culvert's data plane and the parent of clients and servers, or a peer's with
// all that they have started, as socat is one process a connection.
type processes []int

// self is culvert here.
var self = processes{os.Getpid()}

// cpu is the processor time they have used, in steps of 10 ms, ended children
// counted as soon as they are waited for.
func (r processes) cpu(tb testing.TB) (sum time.Duration) {
	tb.Helper()
	for _, p := range r.all(tb) {
		ticks := p.utime + p.stime
		if p.pid != os.Getpid() {
			ticks += p.cutime + p.cstime
		}
		sum += time.Duration(ticks) * time.Second / 100 // USER_HZ
	}
	return sum
}

// resident is their memory in bytes; of this process garbage does not count.
func (r processes) resident(tb testing.TB) (sum int64) {
	tb.Helper()
	debug.FreeOSMemory()
	for _, p := range r.all(tb) {
		sum += p.resident
	}
	return sum
}

// A process is what /proc says of one.
type process struct {
	pid, parent                  int
	utime, stime, cutime, cstime int64 // in ticks
	resident                     int64 // in bytes
}

func (r processes) all(tb testing.TB) []process {
	tb.Helper()
	all := make(map[int]process)
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(tb, err)
	for _, path := range stats {
		if text, err := os.ReadFile(path); err == nil { // or it has ended
			p, err := parseStat(text)
			require.NoError(tb, err)
			all[p.pid] = p
		}
	}
	var counted []process
	for pid, p := range all {
		for up := pid; up > 1; up = all[up].parent {
			if r.has(up) && (up == pid || up != os.Getpid()) {
				counted = append(counted, p)
				break
			}
		}
	}
	require.GreaterOrEqual(tb, len(counted), len(r), "a relay has ended")
	return counted
}

func (r processes) has(pid int) bool {
	for _, p := range r {
		if p == pid {
			return true
		}
	}
	return false
}

// parseStat reads /proc/PID/stat (proc_pid_stat(5)).
func parseStat(text []byte) (p process, err error) {
	head, rest, _ := bytes.Cut(text, []byte(" ("))
	if p.pid, err = strconv.Atoi(string(head)); err != nil {
		return p, err
	}
	rest = rest[bytes.LastIndexByte(rest, ')')+1:] // the name may hold anything
	var parent, pages int64
	for field, v := range map[int]*int64{4: &parent, 14: &p.utime, 15: &p.stime, 16: &p.cutime, 17: &p.cstime, 24: &pages} {
		fields := strings.Fields(string(rest)) // from the third on
		if *v, err = strconv.ParseInt(fields[field-3], 10, 64); err != nil {
			return p, fmt.Errorf("field %d: %w", field, err)
		}
	}
	p.parent, p.resident = int(parent), pages*int64(os.Getpagesize())
	return p, nil
}
