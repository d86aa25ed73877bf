package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// openTerminal returns both ends of a terminal (pts(4)) of some width: what its
// user sees, and what a command prints to.
func openTerminal(t *testing.T, width uint16) (seen, printed *os.File) {
	t.Helper()
	seen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(seen.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(seen.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	printed, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(printed.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: width}))
	return seen, printed
}

// TestWatchTerminal redraws, with rates once there are two readings.
func TestWatchTerminal(t *testing.T) {
	d := startDaemon(t, "vms: [{attach: memory, publish: ['0:80']}]")
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	hold(t, d.rows(t)[0].Bound[0])
	for _, command := range []string{"ls", "flows", "vms"} {
		t.Run(command, func(t *testing.T) {
			seen, printed := openTerminal(t, 300)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan int, 1)
			go func() { ended <- run(ctx, nil, []string{"--api", d.socket, command, "-w"}, printed, io.Discard) }()
			var text strings.Builder
			page := make([]byte, 4096)
			deadline := time.Now().Add(20 * time.Second)
			for !strings.Contains(text.String(), " B/s") {
				require.True(t, time.Now().Before(deadline), text.String())
				n, err := seen.Read(page) // every second there is something
				require.NoError(t, err)
				text.Write(page[:n])
			}
			cancel()
			go func() { _, _ = io.Copy(io.Discard, seen) }() // what is printed meanwhile
			assert.Zero(t, <-ended)
			require.NoError(t, printed.Close())
			_ = seen.Close()
			screens := strings.Split(text.String(), "\x1b[H\x1b[2J")
			require.Greater(t, len(screens), 2, "it was drawn again")
			assert.Empty(t, screens[0])
			assert.Contains(t, screens[1], "GUEST/S")
			assert.Contains(t, text.String(), "\x1b[32m", "green")
		})
	}
}

// TestFollowFlows is a pipe: flows that begin and end, one line each.
func TestFollowFlows(t *testing.T) {
	d := startDaemon(t, "vms: [{attach: memory, publish: ['0:80']}]")
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := make(lines, 100)
	var errs bytes.Buffer
	ended := make(chan int, 1)
	go func() { ended <- run(ctx, nil, []string{"--api", d.socket, "flows", "-w", "-o", "json"}, out, &errs) }()
	next := func() (f api.Flow) {
		t.Helper()
		select {
		case line := <-out:
			require.NoError(t, json.Unmarshal([]byte(line), &f), line)
		case <-time.After(20 * time.Second):
			require.FailNow(t, "nothing is said")
		}
		return f
	}
	c := hold(t, d.rows(t)[0].Bound[0])
	begun := next()
	for begun.State != "open" { // it may be seen connecting
		begun = next()
	}
	require.NoError(t, c.Close())
	end := next()
	for end.State != "gone" { // it may be seen half-closed
		end = next()
	}
	assert.Equal(t, begun.ID, end.ID)
	cancel()
	assert.Zero(t, <-ended)
	assert.Empty(t, errs.String())
}
