package main

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestC53_Descriptors has clients take every descriptor that they get: the daemon
// refuses more and can be asked why, and goes on when they leave.
func TestC53_Descriptors(t *testing.T) {
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	// Clients and daemon are one process: 512 are some 200 flows.
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 512, Max: old.Max}))
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	d := startDaemon(t, "vms: [{attach: memory, publish: ['0:80']}]")
	d.attach(t)
	d.cli(t, "wait", "--timeout", "10s")
	at := d.rows(t)[0].Bound[0]

	var clients []net.Conn
	leave := func() {
		for _, c := range clients {
			_ = c.Close()
		}
		clients = nil
	}
	defer leave()
	for {
		c, err := net.DialTimeout("tcp", at, 10*time.Second)
		if err == nil {
			clients = append(clients, c)
			// The server waits for a request: nothing comes but a reset.
			require.NoError(t, c.SetReadDeadline(time.Now().Add(5*time.Millisecond)))
			_, err = c.Read(make([]byte, 1))
		}
		if errors.Is(err, unix.ECONNRESET) {
			break
		}
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "after %d clients", len(clients))
	}
	assert.Greater(t, len(clients), 100)
	row := d.rows(t)[0]
	assert.Positive(t, row.Flows.Refusals["no-descriptor"])
	assert.Equal(t, "forwarded", row.State)

	leave()
	require.Eventually(t, func() bool { return d.rows(t)[0].Flows.Active == 0 }, 20*time.Second, 10*time.Millisecond)
	assert.Equal(t, demoPage, fetch(t, at))
}
