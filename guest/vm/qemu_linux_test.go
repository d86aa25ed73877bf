package vm

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// patience bounds what should happen soon, on a busy machine.
const patience = time.Minute

// A machine is a QEMU without a guest system, with two QMP sockets: that under
// test at path, and one by which the test moves it.
type machine struct {
	cmd   *exec.Cmd
	conn  net.Conn
	lines *bufio.Scanner
}

func mustStart(t *testing.T, path string, args ...string) *machine {
	t.Helper()
	_, err := exec.LookPath("qemu-system-x86_64")
	datapathtest.Require(t, "qemu", err == nil, "apt-get install qemu-system-x86")
	control := filepath.Join(t.TempDir(), "control")
	m := &machine{cmd: exec.Command("qemu-system-x86_64", append([]string{
		"-accel", "tcg", "-m", "16", "-nodefaults", "-no-user-config", "-display", "none",
		"-qmp", "unix:" + path + ",server=on,wait=off", "-qmp", "unix:" + control + ",server=on,wait=off"}, args...)...)}
	var output bytes.Buffer
	m.cmd.Stdout, m.cmd.Stderr = &output, &output
	require.NoError(t, m.cmd.Start())
	t.Cleanup(func() {
		if m.conn != nil {
			_ = m.conn.Close()
		}
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
		if t.Failed() {
			t.Logf("QEMU: %s", output.String())
		}
	})
	require.Eventually(t, func() bool {
		m.conn, err = net.Dial("unix", control)
		return err == nil
	}, patience, 10*time.Millisecond)
	require.NoError(t, m.conn.SetDeadline(time.Now().Add(patience)))
	m.lines = bufio.NewScanner(m.conn)
	require.True(t, m.lines.Scan(), "no greeting")
	m.run(t, "qmp_capabilities", "")
	return m
}

// run has QEMU execute a command and returns when it has answered.
func (m *machine) run(t *testing.T, command, arguments string) {
	t.Helper()
	if arguments != "" {
		arguments = `, "arguments": ` + arguments
	}
	_, err := fmt.Fprintf(m.conn, `{"execute": %q%s}`+"\n", command, arguments)
	require.NoError(t, err)
	for m.lines.Scan() {
		if line := m.lines.Text(); !strings.Contains(line, `"event"`) {
			require.Contains(t, line, `"return"`, command)
			return
		}
	}
	require.NoError(t, m.lines.Err(), command)
}

// A listening is a QMP that follows, and what it says.
type listening struct {
	heard chan Event
	end   func() // and waits
}

func follow(t *testing.T, path string) *listening {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := &listening{heard: make(chan Event, 100_000)}
	var following sync.WaitGroup
	following.Go(func() { NewQMP(path).Follow(ctx, func(e Event) { l.heard <- e }) })
	l.end = func() { cancel(); following.Wait() }
	t.Cleanup(l.end)
	return l
}

// says asserts what is said next.
func (l *listening) says(t *testing.T, want ...Event) {
	t.Helper()
	for _, w := range want {
		select {
		case e := <-l.heard:
			require.Equal(t, w, e)
		case <-time.After(patience):
			require.FailNow(t, "nothing is said", "instead of %v", w)
		}
	}
}

func TestQEMU(t *testing.T) {
	datapathtest.Leaks(t)
	path := filepath.Join(t.TempDir(), "qmp")
	lost := func(why string) Event { return Event{Lost, "QMP socket " + path + ": " + why} }
	run, stopped, prelaunch := Event{Kind: Running}, Event{Kind: Paused}, Event{Paused, "prelaunch"}
	byHost := Event{Reset, "host-qmp-system-reset"}

	first := follow(t, path)
	first.says(t, lost("nobody listens there"))
	m := mustStart(t, path, "-M", "microvm", "-S")
	first.says(t, prelaunch)
	m.run(t, "cont", "")
	first.says(t, run)
	m.run(t, "stop", "")
	first.says(t, stopped, Event{Paused, "paused"})
	m.run(t, "cont", "")
	first.says(t, run)
	m.run(t, "system_reset", "")
	first.says(t, byHost, run)
	m.run(t, "stop", "")
	first.says(t, stopped, Event{Paused, "paused"})
	m.run(t, "system_reset", "")
	first.says(t, byHost, prelaunch)

	// A second client waits for its turn.
	second := follow(t, path)
	second.says(t, lost(errBusy.Error()))
	m.run(t, "cont", "")
	first.says(t, run)
	first.end()
	second.says(t, run)
	assert.Empty(t, first.heard)

	_, _ = fmt.Fprintln(m.conn, `{"execute": "quit"}`)
	second.says(t, Event{Shutdown, "host-qmp-quit"}, lost("the VMM closed the connection"), lost("nobody listens there"))
	require.NoError(t, m.cmd.Wait())
	again := mustStart(t, path, "-M", "microvm")
	second.says(t, run)
	require.NoError(t, again.cmd.Process.Kill()) // without a last word
	second.says(t, lost("the VMM closed the connection"), lost("nobody listens there"))
	second.end()
}

// A QEMU that stays when its guest has shut down, and gets another.
func TestQEMUWithoutAGuest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp")
	m := mustStart(t, path, "-M", "microvm", "-action", "reboot=shutdown,shutdown=pause")
	l := follow(t, path)
	l.says(t, Event{Kind: Running})
	m.run(t, "system_reset", "")
	l.says(t, Event{Shutdown, "host-qmp-system-reset"})
	l.end()
	l = follow(t, path)
	l.says(t, Event{Kind: Shutdown}) // who comes later is told as well
	m.run(t, "set-action", `{"reboot": "reset"}`)
	m.run(t, "system_reset", "")
	l.says(t, Event{Reset, "host-qmp-system-reset"}, Event{Paused, "prelaunch"})
	m.run(t, "cont", "")
	l.says(t, Event{Kind: Running})
}

// A guest that resets itself as its first act, again and again.
func TestQEMUGuestThatResets(t *testing.T) {
	bios := make([]byte, 64<<10)
	// mov al, 0xfe; out 0x64, al (the keyboard controller pulls the reset line);
	// hlt; jmp to the hlt: at the reset vector, 16 bytes from the end.
	copy(bios[len(bios)-16:], []byte{0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd})
	dir := t.TempDir()
	rom, path := filepath.Join(dir, "bios"), filepath.Join(dir, "qmp")
	require.NoError(t, os.WriteFile(rom, bios, 0o600))
	m := mustStart(t, path, "-M", "pc", "-bios", rom)
	l := follow(t, path)
	// The answers to what is asked after a reset lie in between, as they come.
	until := func(kind Kind) {
		for {
			select {
			case e := <-l.heard:
				if e.Kind == Reset {
					require.Equal(t, "guest-reset", e.Detail)
				}
				if e.Kind == kind {
					return
				}
				require.NotContains(t, []Kind{Lost, Shutdown}, e.Kind)
			case <-time.After(patience):
				require.FailNow(t, "nothing is said")
			}
		}
	}
	for range 200 {
		until(Reset)
	}
	m.run(t, "stop", "")
	until(Paused)
	m.run(t, "cont", "")
	until(Reset)
}
