package main_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Datagrams of every size come back whole (C-21), to clients of both families.
// 1472 and 1473 are the last that fits in a frame and the first that does not:
// 1500 − 20 − 8.
func testUDPEcho(t *testing.T, e *env) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		c := e.dialUDP(t, host, portEcho)
		buf := make([]byte, 65536)
		for _, size := range []int{0, 1, 1472, 1473, 9000, 65507} {
			sent := make([]byte, size)
			_, _ = io.ReadFull(known(), sent)
			_, err := c.Write(sent)
			require.NoError(t, err, "%s, %d bytes", host, size)
			n, err := c.Read(buf)
			require.NoError(t, err, "%s, %d bytes", host, size)
			require.True(t, bytes.Equal(sent, buf[:n]), "%s: %d bytes came back as %d", host, size, n)
		}
	}
}

// What a guest sends from another port than the one that was asked must not
// cost the answer from the right one; a connected client sees that one alone
// (C-20).
func testFB046(t *testing.T, e *env) {
	c := e.dialUDP(t, "127.0.0.1", portOtherUDP)
	for range 20 {
		_, err := c.Write([]byte("ask"))
		require.NoError(t, err)
		buf := make([]byte, 64)
		n, err := c.Read(buf)
		require.NoError(t, err)
		assert.Equal(t, "same ask", string(buf[:n]))
	}
}

// A closed port of the guest ends the flow, and a connected client hears of it
// (C-23; CAP_NET_RAW, which root has).
func testFB049(t *testing.T, e *env) {
	c := e.dialUDP(t, "127.0.0.1", portClosed)
	_, err := c.Write([]byte("anyone?"))
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 1))
	require.True(t, errors.Is(err, syscall.ECONNREFUSED), "the client saw %v", err)
	local := c.LocalAddr().String()
	for _, f := range e.d.flows(t) {
		assert.False(t, strings.EqualFold(f.Client, local), "the flow lives on")
	}
}
