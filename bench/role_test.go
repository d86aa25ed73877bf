package bench

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/require"
)

// A role is a peer process: this binary, started with CULVERT_BENCH_ROLE and
// its arguments in CULVERT_BENCH_ARGS. It says "ready" on its standard output,
// ends when its standard input does, and may print result lines in between.

// playRole runs a role and returns the process's exit status.
func playRole(role string) int {
	_ = raiseFDs()
	args := strings.Fields(os.Getenv("CULVERT_BENCH_ARGS"))
	if err := map[string]func([]string) error{
		"echo": roleEcho, "hold": roleHold, "pingpong": rolePingPong, "connect": roleConnect,
	}[role](args); err != nil {
		fmt.Fprintln(os.Stderr, role+":", err)
		return 1
	}
	return 0
}

// raiseFDs takes all the descriptors the system grants.
func raiseFDs() error {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return err
	}
	r.Cur = r.Max
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &r)
}

// roleEcho ADDR...: answers every byte, for any number of connections.
func roleEcho(addrs []string) error {
	for _, addr := range addrs {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					var b [64 << 10]byte
					for {
						n, err := c.Read(b[:1024])
						if err != nil {
							return
						}
						if _, err := c.Write(b[:n]); err != nil {
							return
						}
					}
				}()
			}
		}()
	}
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// roleHold ADDR N: opens N connections, passes a byte over each both ways, and
// holds them.
func roleHold(args []string) error {
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	conns := make([]net.Conn, n)
	for i := range conns {
		if conns[i], err = net.Dial("tcp", args[0]); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
		if err := bounce(conns[i]); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	for _, c := range conns {
		_ = c.Close()
	}
	return err
}

func bounce(c net.Conn) error {
	b := [1]byte{'x'}
	if _, err := c.Write(b[:]); err != nil {
		return err
	}
	_, err := io.ReadFull(c, b[:])
	return err
}

// rolePingPong ADDR N: passes a byte to and fro N times and prints the median
// and the 99th percentile in microseconds.
func rolePingPong(args []string) error {
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	c, err := net.Dial("tcp", args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	took := make([]time.Duration, n)
	for i := range took {
		start := time.Now()
		if err := bounce(c); err != nil {
			return err
		}
		took[i] = time.Since(start)
	}
	slices.Sort(took)
	fmt.Println("ready")
	fmt.Println(float64(took[n/2].Nanoseconds())/1e3, float64(took[n*99/100].Nanoseconds())/1e3)
	return nil
}

// roleConnect ADDR CLIENTS SECONDS: connects, passes a byte to and fro and
// closes, over and over, and prints how often a second, and how many failed.
func roleConnect(args []string) error {
	clients, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	secs, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	var done, failed atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(time.Duration(secs) * time.Second)
	for range clients {
		wg.Go(func() {
			for time.Now().Before(end) {
				c, err := net.Dial("tcp", args[0])
				if err == nil {
					err = bounce(c)
					_ = c.Close()
				}
				if err != nil {
					failed.Add(1)
					continue
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println("ready")
	fmt.Println(float64(done.Load())/float64(secs), failed.Load())
	return nil
}

// A peer is a running role.
type peer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// startRole starts a role in ns and waits until it is ready.
func startRole(tb testing.TB, ns *datapathtest.NetNS, role string, args ...string) *peer {
	tb.Helper()
	exe, err := os.Executable()
	require.NoError(tb, err)
	p := &peer{cmd: exec.Command(exe)}
	p.cmd.Env = append(os.Environ(), "CULVERT_BENCH_ROLE="+role, "CULVERT_BENCH_ARGS="+strings.Join(args, " "))
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(tb, err)
	p.out = bufio.NewScanner(out)
	require.NoError(tb, startIn(ns, p.cmd))
	tb.Cleanup(p.stop)
	require.True(tb, p.out.Scan(), "%s %v ended early", role, args)
	require.Equal(tb, "ready", p.out.Text())
	return p
}

// line returns the role's result.
func (p *peer) line(tb testing.TB) []float64 {
	tb.Helper()
	require.True(tb, p.out.Scan(), "no result")
	var values []float64
	for _, f := range strings.Fields(p.out.Text()) {
		v, err := strconv.ParseFloat(f, 64)
		require.NoError(tb, err)
		values = append(values, v)
	}
	return values
}

// stop ends the role and waits for it.
func (p *peer) stop() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}
