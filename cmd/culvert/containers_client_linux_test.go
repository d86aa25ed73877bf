package main_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

func onLoopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// echoes asks an echo server something of its own.
func echoes(network, addr string) error {
	c, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	patience := 2 * time.Second
	if network == "udp" {
		patience = 200 * time.Millisecond // what was lost is not sent again
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	sent := fmt.Sprintf("hello at %d\n", time.Now().UnixNano())
	if _, err := io.WriteString(c, sent); err != nil {
		return err
	}
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != sent {
		return fmt.Errorf("%q came back as %q", sent, got)
	}
	return nil
}

// A kept flow is one that has to outlive what a test does.
type keptFlow struct {
	*net.TCPConn
	addr  string
	inode uint64 // of the listener it came through
}

func keep(t *testing.T, port int) *keptFlow {
	t.Helper()
	addr := onLoopback(port)
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(5*time.Minute)))
	mustEcho(t, c, "kept")
	return &keptFlow{c.(*net.TCPConn), addr, listenInode(t, addr)}
}

// assertKept asserts that the flow lives and that its listener is the one it was.
func (k *keptFlow) assertKept(t *testing.T) {
	t.Helper()
	mustEcho(t, k, "still here")
	assert.Equal(t, k.inode, listenInode(t, k.addr), "the listener at %s was closed and opened again", k.addr)
}

// listenInode returns the inode of the socket that listens at addr, as
// proc_pid_net(5) has it: this thread's, for the main one may be elsewhere (see
// tapEngine).
func listenInode(t *testing.T, addr string) uint64 {
	t.Helper()
	ap := netip.MustParseAddrPort(addr)
	ip := ap.Addr().As4()
	local := fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(ip[:]), ap.Port())
	f, err := os.Open("/proc/thread-self/net/tcp")
	require.NoError(t, err)
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) > 9 && fields[1] == local && fields[3] == "0A" {
			inode, err := strconv.ParseUint(fields[9], 10, 64)
			require.NoError(t, err)
			return inode
		}
	}
	require.FailNow(t, "nobody listens at "+addr)
	return 0
}

// background runs f over and over until stop is called, which waits for it, or the
// test ends.
func background(t *testing.T, f func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for ctx.Err() == nil {
			f()
		}
	}()
	stop = func() {
		cancel()
		<-stopped
	}
	t.Cleanup(stop)
	return stop
}

// bindable complains unless a server can have each of n host ports.
func bindable(first, n int) func() error {
	return func() error { return portsFree(first, n) }
}

// assertReset asserts that the flow's end is told as what it is.
func (k *keptFlow) assertReset(t *testing.T) {
	t.Helper()
	err := k.end(t)
	assert.True(t, isReset(err), "the client saw %v", err)
}

// assertEnds asserts that the flow ends, in whatever way.
func (k *keptFlow) assertEnds(t *testing.T) {
	t.Helper()
	assert.NotErrorIs(t, k.end(t), os.ErrDeadlineExceeded)
}

func (k *keptFlow) end(t *testing.T) error {
	t.Helper()
	require.NoError(t, k.SetDeadline(time.Now().Add(20*time.Second)))
	_, err := io.Copy(io.Discard, k)
	return err
}

// dig asks the daemon's DNS server, and returns the status and the answers, sorted.
func (e *containersEnv) dig(t *testing.T, args ...string) (status string, answers []string) {
	t.Helper()
	_, err := exec.LookPath("dig")
	datapathtest.Require(t, "dig", err == nil, "apt-get install bind9-dnsutils, or contrib/install-deps.sh test")
	args = append([]string{"@" + e.dns.Addr().String(), "-p", strconv.Itoa(int(e.dns.Port())), "+tries=1", "+time=5"}, args...)
	out, err := exec.Command("dig", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for line := range strings.Lines(string(out)) {
		if _, after, ok := strings.Cut(line, "status: "); ok {
			status, _, _ = strings.Cut(after, ",")
		}
		if fields := strings.Fields(line); len(fields) == 5 && !strings.HasPrefix(line, ";") && fields[3] != "SOA" {
			answers = append(answers, fields[4])
		}
	}
	slices.Sort(answers)
	return status, answers
}
