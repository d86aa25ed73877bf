package main_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// TestTraceTap traces a real Linux guest with offloads both ways, by the command
// line alone: tshark finds nothing wrong with what was written, checksums
// included, and after SIGKILL the flight recorder has the last frames (C-50,
// FB-149).
func TestTraceTap(t *testing.T) {
	needsTime(t)
	tshark, err := exec.LookPath("tshark")
	datapathtest.Require(t, "tshark", err == nil, "apt-get install tshark")
	b := newTap(t)
	e := &env{bed: b, base: freePorts(t, hostLen)}
	e.d = newDaemon(t, b.spec(), publishes(e.base))
	e.d.keepFlight(t, 64)
	e.d.start(t)
	e.boot(t)
	e.d.waitReady(t)

	file := filepath.Join(t.TempDir(), "tap.pcapng")
	var said bytes.Buffer
	cmd := exec.Command(e.d.binary, "trace", "-w", file)
	cmd.Env = append(os.Environ(), "CULVERT_API="+e.d.api)
	cmd.Stderr = &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	starter() <- func() { started <- cmd.Start() }
	require.NoError(t, <-started)
	holds := func(text string) func() bool {
		return func() bool {
			got, err := os.ReadFile(file)
			return err == nil && bytes.Contains(got, []byte(text))
		}
	}
	require.Eventually(t, holds("default/q0"), 20*time.Second, 5*time.Millisecond)

	const size = 4 << 20
	sink := e.dial(t, portSink)
	_, err = io.Copy(sink, io.LimitReader(known(), size))
	require.NoError(t, err)
	require.NoError(t, sink.CloseWrite())
	answer, err := io.ReadAll(sink)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("%s %d\n", knownHash(size), size), string(answer))
	source := e.dial(t, portSource)
	_, err = fmt.Fprintf(source, "%d\n", size)
	require.NoError(t, err)
	sum, _, err := hashAll(source)
	require.NoError(t, err)
	require.Equal(t, knownHash(size), sum)
	echo := e.dialUDP(t, "127.0.0.1", portEcho)
	for _, datagram := range []string{"x", strings.Repeat("y", 1472), strings.Repeat("z", 9000), "this is the end"} {
		mustEchoDatagram(t, echo, datagram)
	}
	require.Eventually(t, holds("this is the end"), 20*time.Second, 10*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.NoError(t, cmd.Wait(), said.String())
	assert.Regexp(t, regexp.MustCompile(`^\d+ frames, \d+ lost\n$`), said.String())

	out := mustTshark(t, tshark, file, "frame.packet_flags_direction", "tcp.checksum.status", "udp.checksum.status", "ip.checksum.status", "_ws.malformed",
		"frame.len", "frame.comment")
	supers, owned := map[string]int{}, 0
	for _, f := range out {
		assert.NotContains(t, f[1]+f[2]+f[3], "0", "a checksum is bad: %v", f)
		assert.Empty(t, f[4])
		if len(f[5]) > 4 || f[5] > "1514" && len(f[5]) == 4 {
			supers[f[0]]++
			assert.Contains(t, f[6], "super-frame of segments of")
		}
		if strings.Contains(f[6], "owner config") {
			owned++
		}
	}
	assert.Len(t, supers, 2, "super-frames each way: %v", supers)
	assert.Greater(t, owned, 50)

	require.NoError(t, e.d.cmd.Process.Kill())
	_ = e.d.cmd.Wait()
	e.d.cmd = nil
	last := filepath.Join(t.TempDir(), "last.pcapng")
	said.Reset()
	cmd = exec.Command(e.d.binary, "trace", "--last", "-w", last)
	cmd.Env = append(os.Environ(), "CULVERT_API="+e.d.api)
	cmd.Stderr = &said
	require.NoError(t, cmd.Run(), said.String())
	assert.Equal(t, "64 frames, 0 lost\n", said.String())
	assert.Len(t, mustTshark(t, tshark, last, "frame.number"), 64)
}

// keepFlight has the daemon's config keep frames in flight recorders.
func (d *daemon) keepFlight(t *testing.T, frames int) {
	t.Helper()
	path := filepath.Join(filepath.Dir(d.api), "culvert.yaml")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var config map[string]any
	require.NoError(t, json.Unmarshal(text, &config)) // it is YAML that is JSON
	config["trace"] = map[string]any{"flightRecorder": frames}
	text, err = json.Marshal(config)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o600))
}

func mustEchoDatagram(t *testing.T, c *net.UDPConn, text string) {
	t.Helper()
	_, err := io.WriteString(c, text)
	require.NoError(t, err)
	got := make([]byte, len(text)+1)
	n, err := c.Read(got)
	require.NoError(t, err)
	require.Equal(t, text, string(got[:n]))
}

// mustTshark returns the fields of each packet, every checksum verified.
func mustTshark(t *testing.T, tshark, file string, fields ...string) (packets [][]string) {
	t.Helper()
	args := []string{"-n", "-r", file, "-T", "fields", "-E", "separator=|"}
	for _, o := range []string{"tcp.check_checksum", "ip.check_checksum", "udp.check_checksum"} {
		args = append(args, "-o", o+":TRUE")
	}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	var complaints bytes.Buffer
	cmd := exec.Command(tshark, args...)
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	require.NoError(t, err, complaints.String())
	for line := range strings.Lines(complaints.String()) {
		assert.Contains(t, line, "Running as user")
	}
	for line := range strings.Lines(string(out)) {
		packets = append(packets, strings.Split(strings.TrimSuffix(line, "\n"), "|"))
	}
	return packets
}
