package main

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/netstack"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestSuiteMemory is the end-to-end suite's list over the memory attachment: a
// whole daemon and its guest in this process.
func TestSuiteMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a run without -short: it moves 128 MiB")
	}
	d := startDaemon(t, "vms: [{name: vm1, attach: memory, publish: ['127.0.0.1:0:7', '127.0.0.1:0:7/udp']}]")
	guest := d.attachEcho(t)
	_, errs, code := cli(t, "--api", d.socket, "wait", "--timeout", "10s")
	require.Zero(t, code, errs)
	rows := d.rows(t)
	tcp, udp := rows[0].Bound[0], rows[1].Bound[0]

	t.Run("64 MiB each way", func(t *testing.T) {
		want := make([]byte, 64<<20)
		_, _ = rand.Read(want)
		c, err := net.Dial("tcp", tcp)
		require.NoError(t, err)
		defer c.Close()
		go func() {
			_, _ = c.Write(want)
			_ = c.(*net.TCPConn).CloseWrite()
		}()
		sum := sha256.New()
		n, err := io.Copy(sum, c)
		require.NoError(t, err)
		assert.EqualValues(t, len(want), n)
		assert.Equal(t, sha256.Sum256(want), [32]byte(sum.Sum(nil)))
	})
	bounce := func() error {
		c, err := net.Dial("tcp", tcp)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := io.WriteString(c, "ping"); err != nil {
			return err
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		got, err := io.ReadAll(c)
		if err == nil && string(got) != "ping" {
			err = fmt.Errorf("got %q", got)
		}
		return err
	}
	t.Run("1000 connections", func(t *testing.T) {
		for range 1000 {
			require.NoError(t, bounce())
		}
	})
	t.Run("200 at once", func(t *testing.T) {
		var all sync.WaitGroup
		for range 200 {
			all.Go(func() { assert.NoError(t, bounce()) })
		}
		all.Wait()
	})
	t.Run("UDP", func(t *testing.T) {
		c, err := net.Dial("udp", udp)
		require.NoError(t, err)
		defer c.Close()
		buf := make([]byte, 1<<16)
		for _, size := range []int{0, 1, 1472, 1473, 9000, 65507} {
			want := strings.Repeat("x", size)
			_, err := io.WriteString(c, want)
			require.NoError(t, err)
			require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
			n, err := c.Read(buf)
			require.NoError(t, err, "%d bytes", size)
			assert.Equal(t, want, string(buf[:n]))
		}
	})
	t.Run("the guest is closed", func(t *testing.T) {
		c, err := net.Dial("tcp", tcp)
		require.NoError(t, err)
		defer c.Close()
		_, err = io.WriteString(c, "x")
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 1))
		require.NoError(t, err)
		require.NoError(t, guest.Close())
		_, err = c.Read(make([]byte, 1))
		assert.Error(t, err)
		assert.NotErrorIs(t, err, io.EOF, "the client is reset")
		_, errs, code := cli(t, "--api", d.socket, "wait", "--for", "gone", "--timeout", "10s")
		require.Zero(t, code, errs)
		for _, r := range d.rows(t) {
			assert.Equal(t, "pending", r.State)
		}
		d.attachEcho(t)
		_, errs, code = cli(t, "--api", d.socket, "wait", "--timeout", "10s")
		require.Zero(t, code, errs)
		assert.Equal(t, rows[0].Bound, d.rows(t)[0].Bound)
		require.NoError(t, bounce())
	})
}

// attachEcho gives the daemon a new guest that echoes on port 7, TCP and UDP.
func (d *testDaemon) attachEcho(t *testing.T) io.Closer {
	t.Helper()
	offloads := virtio.OffloadCSum | virtio.OffloadTSO4
	ours, theirs := memory.Pair(memory.Options{ToGuest: offloads, FromGuest: offloads})
	guest, err := netstack.New(theirs, netstack.Options{
		Node: netip.MustParseAddr("10.0.2.1"), Gateway: netip.MustParsePrefix("10.0.2.2/24"), MTU: 1500, Seed: "echo guest",
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = guest.Close() })
	l, err := guest.ListenTCP(7)
	require.NoError(t, err)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	u, err := guest.ListenUDP(7)
	require.NoError(t, err)
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(buf[:n], from)
		}
	}()
	d.guests <- ours
	return guest
}
