package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/require"
)

// A role is a client's or a server's process: this binary, started with
// CULVERT_BENCH_ROLE=1 and the role's name and arguments. It says "ready" on its
// standard output, ends when its standard input does, and may print a result after.

// playRole runs a role and returns the process's exit status.
func playRole(role string, args []string) int {
	if err := map[string]func([]string) error{
		"echo": roleEcho, "hold": roleHold, "pingpong": rolePingPong, "connect": roleConnect,
		"sink": roleSink, "blast": roleBlast, "ask": roleAsk, "answer": roleAnswer, "nic": roleNIC,
	}[role](args); err != nil {
		fmt.Fprintln(os.Stderr, role+":", err)
		return 1
	}
	return 0
}

// maxFDs returns how many descriptors a process may have.
func maxFDs(tb testing.TB) int {
	tb.Helper()
	var r syscall.Rlimit
	require.NoError(tb, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r))
	return int(r.Cur)
}

// raiseFDs takes as many descriptors as the greatest of the benchmarks wants, or all
// that the system grants.
func raiseFDs() error {
	const most = 1 << 17
	if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: most, Max: most}) == nil {
		return nil
	}
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return err
	}
	r.Cur = r.Max
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &r)
}

// A role is a running one.
type role struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Scanner
	said bytes.Buffer // on standard error, until it has ended
}

// startRole starts a role in ns and waits until it is ready.
func startRole(tb testing.TB, ns *datapathtest.NetNS, name string, args ...string) *role {
	tb.Helper()
	r := newRole(tb, ns, name, args...)
	require.NoError(tb, r.ready())
	return r
}

// startClient starts a client's role against the bed and waits until it is ready.
func startClient(tb testing.TB, bed *bed, name string, args ...string) (*role, error) {
	tb.Helper()
	r := newRole(tb, bed.host, name, args...)
	return r, r.ready()
}

// runClient runs a client's role against the bed and returns its result.
func runClient(tb testing.TB, bed *bed, name string, args ...string) ([]float64, error) {
	tb.Helper()
	r, err := startClient(tb, bed, name, args...)
	if err != nil {
		return nil, err
	}
	defer r.stop()
	return r.line(tb), nil
}

func newRole(tb testing.TB, ns *datapathtest.NetNS, name string, args ...string) *role {
	tb.Helper()
	exe, err := os.Executable()
	require.NoError(tb, err)
	r := &role{cmd: exec.Command(exe, append([]string{name}, args...)...)}
	r.cmd.Env = append(os.Environ(), "CULVERT_BENCH_ROLE=1")
	r.cmd.Stderr = &r.said
	r.in, err = r.cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := r.cmd.StdoutPipe()
	require.NoError(tb, err)
	r.out = bufio.NewScanner(out)
	require.NoError(tb, startIn(ns, r.cmd))
	tb.Cleanup(r.stop)
	return r
}

// ready waits until the role is.
func (r *role) ready() error {
	if !r.out.Scan() || r.out.Text() != "ready" {
		r.stop()
		return fmt.Errorf("%s failed: %s", r.cmd.Args[1], r.said.String())
	}
	return nil
}

// line returns the role's result.
func (r *role) line(tb testing.TB) []float64 {
	tb.Helper()
	require.True(tb, r.out.Scan(), "no result")
	var values []float64
	for _, f := range strings.Fields(r.out.Text()) {
		v, err := strconv.ParseFloat(f, 64)
		require.NoError(tb, err)
		values = append(values, v)
	}
	return values
}

// stop ends the role and waits for it.
func (r *role) stop() {
	_ = r.in.Close()
	_ = r.cmd.Wait()
}

// startIn starts cmd in ns, or where this process is without one.
func startIn(ns *datapathtest.NetNS, cmd *exec.Cmd) error {
	if ns == nil {
		return cmd.Start()
	}
	return ns.Do(cmd.Start)
}

// awaitBound waits until somebody in ns has a socket on a local port, listening if
// it is TCP's: few programs say when they are ready.
func awaitBound(tb testing.TB, ns *datapathtest.NetNS, proto string, port int) {
	tb.Helper()
	state := map[string]string{"tcp": "0A", "udp": "07"}[proto] // enum in net/tcp_states.h
	bound := regexp.MustCompile(fmt.Sprintf(`(?m)^ *\d+: [0-9A-F]+:%04X [0-9A-F]+:0000 %s `, port, state))
	require.Eventually(tb, func() bool {
		var found bool
		err := ns.Do(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/" + proto)
			found = bound.Match(text)
			return err
		})
		return err == nil && found
	}, 10*time.Second, 10*time.Millisecond, "nobody has %s port %d", proto, port)
}
