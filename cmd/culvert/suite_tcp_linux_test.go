package main_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A page through the forward, whichever loopback address the client tries
// (C-10: the guest has IPv4 only).
func testHTTP(t *testing.T, e *env) {
	client := &http.Client{Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	for _, host := range []string{"127.0.0.1", "::1", "localhost"} {
		resp, err := client.Get("http://" + e.addr(host, "tcp", portHTTP) + "/")
		require.NoError(t, err, host)
		page, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		require.NoError(t, err, host)
		assert.Contains(t, string(page), "Hello from inside the guest", host)
		assert.Contains(t, string(page), gateway+":", "whom the guest sees (C-24)")
	}
}

// A server that is not ours, and a file.
func testHTTPD(t *testing.T, e *env) {
	client := &http.Client{Timeout: 2 * time.Minute}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://" + e.addr("localhost", "tcp", portHTTPD) + "/cgi-bin/64MiB")
	require.NoError(t, err)
	defer resp.Body.Close()
	sum, n, err := hashAll(resp.Body)
	require.NoError(t, err)
	assert.EqualValues(t, 64<<20, n)
	assert.Equal(t, knownHash(64<<20), sum)
}

func testTransfer(t *testing.T, e *env) {
	const size = 64 << 20
	for _, dir := range []struct {
		name string
		move func(int64) error
	}{{"to the host", e.fetch}, {"to the guest", e.send}} {
		t.Run(dir.name, func(t *testing.T) {
			start := time.Now()
			require.NoError(t, dir.move(size))
			t.Logf("%.0f Mbit/s, generating and hashing included", size*8/1e6/time.Since(start).Seconds())
		})
	}
}

// fetch takes n known bytes from the guest.
func (e *env) fetch(n int64) error {
	c, err := e.tryDial(portSource)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "%d\n", n); err != nil {
		return err
	}
	sum, got, err := hashAll(c)
	switch {
	case err != nil:
		return fmt.Errorf("after %d of %d bytes: %w", got, n, err)
	case got != n || sum != knownHash(n):
		return fmt.Errorf("%d bytes for %d, or wrong ones", got, n)
	}
	return nil
}

// send gives n known bytes to the guest, which says what it got.
func (e *env) send(n int64) error {
	c, err := e.tryDial(portSink)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := io.CopyN(c, known(), n); err != nil {
		return err
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	answer, err := io.ReadAll(c)
	if want := fmt.Sprintf("%s %d\n", knownHash(n), n); err == nil && string(answer) != want {
		err = fmt.Errorf("the guest got %q, not %q", answer, want)
	}
	return err
}

// askLine does one short connection, which the guest ends first.
func (e *env) askLine(i int) error {
	c, err := e.tryDial(portLine)
	if err != nil {
		return err
	}
	defer c.Close()
	line := fmt.Sprintf("line %d\n", i)
	if _, err := io.WriteString(c, line); err != nil {
		return err
	}
	answer, err := io.ReadAll(c)
	if err == nil && string(answer) != line {
		err = fmt.Errorf("%q came back as %q", line, answer)
	}
	return err
}

func testConnections(t *testing.T, e *env) {
	t.Run("1000 one after the other", func(t *testing.T) {
		require.Empty(t, each(1000, 1, e.askLine))
	})
	t.Run("200 at once", func(t *testing.T) {
		const n = 200
		// All are open before the first one speaks.
		var open sync.WaitGroup
		open.Add(n)
		require.Empty(t, each(n, n, func(i int) error {
			c, err := e.tryDial(portEcho)
			open.Done()
			if err != nil {
				return err
			}
			defer c.Close()
			open.Wait()
			sent := fmt.Appendf(nil, "connection %3d", i)
			if _, err := c.Write(sent); err != nil {
				return err
			}
			got := make([]byte, len(sent))
			if _, err := io.ReadFull(c, got); err != nil {
				return err
			}
			if string(got) != string(sent) {
				return fmt.Errorf("%q came back as %q", sent, got)
			}
			return nil
		}))
	})
}

// The server's close reaches a client that keeps its own side open.
func testFB001(t *testing.T, e *env) {
	for i := range 20 {
		start := time.Now()
		require.NoError(t, e.askLine(i))
		require.Less(t, time.Since(start), e.bound(2*time.Second))
	}
}

// FIN in one direction leaves the other until its own end.
func testFB002(t *testing.T, e *env) {
	type try struct {
		port  int
		delay time.Duration
		sent  string
	}
	var tries []try
	for _, sent := range []string{"", "hello"} {
		tries = append(tries, try{portAnswer50ms, 50 * time.Millisecond, sent},
			try{portAnswer500, 500 * time.Millisecond, sent}, try{portAnswer5s, 5 * time.Second, sent})
	}
	require.Empty(t, each(len(tries), len(tries), func(i int) error {
		return e.halfClose(tries[i].port, tries[i].sent, tries[i].delay)
	}))
}

// halfClose sends, says that this was all, and takes the late answer.
func (e *env) halfClose(port int, sent string, delay time.Duration) error {
	c, err := e.tryDial(port)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := io.WriteString(c, sent); err != nil {
		return err
	}
	start := time.Now()
	if err := c.CloseWrite(); err != nil {
		return err
	}
	answer, err := io.ReadAll(c)
	took := time.Since(start)
	if err != nil {
		return fmt.Errorf("after %v of %v: %w", took, delay, err)
	}
	if want := fmt.Sprintf("OK %d\n", len(sent)); string(answer) != want || took < delay {
		return fmt.Errorf("%q after %v, want %q after %v", answer, took, want, delay)
	}
	return nil
}

// A client that has nothing to say still gets the greeting.
func testFB003(t *testing.T, e *env) {
	want := knownHash(64 << 10)
	require.Empty(t, each(100, 20, func(int) error {
		c, err := e.tryDial(portGreet)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.CloseWrite(); err != nil {
			return err
		}
		sum, n, err := hashAll(c)
		if err != nil {
			return fmt.Errorf("after %d bytes: %w", n, err)
		}
		if sum != want {
			return fmt.Errorf("%d wrong bytes", n)
		}
		return nil
	}))
}

// The guest has finished; the client has only begun.
func testFB005(t *testing.T, e *env) {
	const size, chunk = 8 << 20, 256 << 10 // 32 chunks of 1/8 s: 2 MiB/s
	c := e.dial(t, portFINFirst)
	banner, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "hello\n", string(banner))

	_, err = io.WriteString(c, "FB-005\n")
	require.NoError(t, err)
	tick := time.NewTicker(125 * time.Millisecond)
	defer tick.Stop()
	src := known()
	for range size / chunk {
		<-tick.C
		_, err := io.CopyN(c, src, chunk)
		require.NoError(t, err)
	}
	require.NoError(t, c.CloseWrite())
	how, n, sum := e.observed(t, "FB-005")
	assert.Equal(t, "eof", how)
	assert.EqualValues(t, size, n)
	assert.Equal(t, knownHash(size), sum)
}

// A client that only reads learns of the server's close.
func testFB007(t *testing.T, e *env) {
	c := e.dial(t, portCloseFirst)
	start := time.Now()
	n, err := io.Copy(io.Discard, c)
	took := time.Since(start)
	require.NoError(t, err)
	require.Zero(t, n)
	require.Less(t, took, e.bound(time.Second))
}

// What one direction still holds survives the other's end, slow as its reader is.
func testFB011(t *testing.T, e *env) {
	const size = 4 << 20
	c := e.dial(t, portSource)
	_, err := fmt.Fprintf(c, "%d\n", size)
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	sum, n, err := hashAll(slowReader{c})
	require.NoError(t, err)
	require.EqualValues(t, size, n)
	require.Equal(t, knownHash(size), sum)
}

// A slowReader takes 64 KiB every 50 ms.
type slowReader struct{ r io.Reader }

func (s slowReader) Read(p []byte) (int, error) {
	time.Sleep(50 * time.Millisecond)
	return s.r.Read(p[:min(len(p), 64<<10)])
}

// Data that waits for a guest which does not read yet outlives the client.
func testFB012(t *testing.T, e *env) {
	const size = 1 << 20
	c := e.dial(t, portReadLate)
	_, err := io.CopyN(c, known(), size)
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	answer, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("%s %d\n", knownHash(size), size), string(answer))
}

// An abort is passed on as an abort, both ways (C-13).
func testFB013(t *testing.T, e *env) {
	t.Run("guest", func(t *testing.T) {
		c := e.dial(t, portReset)
		_, err := c.Write(make([]byte, 100_000))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, c)
		require.True(t, isReset(err), "the guest reset the flow, the client saw %v", err)
	})
	t.Run("client", func(t *testing.T) {
		c := e.dial(t, portObserve)
		_, err := io.WriteString(c, "FB-013\nand more")
		require.NoError(t, err)
		time.Sleep(200 * time.Millisecond) // the id must have been read
		require.NoError(t, c.SetLinger(0))
		require.NoError(t, c.Close())
		how, _, _ := e.observed(t, "FB-013")
		require.Equal(t, "reset", how, "the client reset the flow")
	})
}

// A guest that refuses: an immediate reset, counted, never a clean end (C-15).
func testFB017(t *testing.T, e *env) {
	refused := func() (n int64) {
		for _, r := range e.d.ls(t) {
			if r.Protocol == "tcp" && r.Guest == fmt.Sprintf("10.0.2.2:%d", portClosed) {
				n = r.Flows.Refused
			}
		}
		return n
	}
	before := refused()
	require.Empty(t, each(100, 1, func(int) error {
		start := time.Now()
		c, err := e.tryDial(portClosed)
		if isReset(err) {
			return nil // already gone while it connected
		}
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Read(make([]byte, 1))
		took := time.Since(start)
		if !isReset(err) {
			return fmt.Errorf("the client saw %w", orEnd(err))
		}
		if limit := e.bound(time.Second); took > limit { // C-15: 100 ms from the refusal
			return fmt.Errorf("the reset took %v, more than %v", took, limit)
		}
		return nil
	}))
	assert.EqualValues(t, before+100, refused(), "flows.refused of the row")
}

func orEnd(err error) error {
	if err == nil {
		return errors.New("data")
	}
	return err
}

// A reader that stops, stops the writer, and costs bounded memory (C-17); the
// others do not notice (FB-160).
func testStoppedReader(t *testing.T, e *env) {
	const flows = 4
	// C-17's 8 MiB each way and as much again for what the runtime has not
	// given back yet; the sockets' buffers are the kernel's.
	const perFlow = 2 * 8 << 20

	before := e.d.usage(t)
	var conns []*net.TCPConn
	t.Run("in the guest", func(t *testing.T) {
		block := make([]byte, 64<<10)
		for range flows {
			c, err := e.tryDial(portNeverRead)
			require.NoError(t, err)
			conns = append(conns, c)
			var taken int64
			for {
				// Nothing taken for 2 s means that the writer has stopped.
				require.NoError(t, c.SetWriteDeadline(time.Now().Add(2*time.Second)))
				n, err := c.Write(block)
				taken += int64(n)
				if errors.Is(err, os.ErrDeadlineExceeded) {
					break
				}
				require.NoError(t, err)
				// The bound above, and what three kernels' socket buffers may
				// hold (tcp_rmem and tcp_wmem end at 6 and 4 MiB).
				require.Less(t, taken, int64(perFlow+16<<20), "the writer does not stop")
			}
			t.Logf("the writer was stopped after %d KiB", taken>>10)
		}
	})
	t.Run("on the host", func(t *testing.T) {
		for range flows {
			c, err := e.tryDial(portFlood)
			require.NoError(t, err)
			conns = append(conns, c)
		}
		sent := func() (n int64) {
			for _, f := range e.d.flows(t) {
				n += f.Bytes.ToHost
			}
			return n
		}
		// The guest may take a while to fill what there is to fill.
		var last int64 = -1
		require.Eventually(t, func() bool {
			now := sent()
			stopped := now == last && now > 0
			last = now
			return stopped
		}, e.bound(20*time.Second), 2*time.Second, "the guest's writer does not stop")
		t.Logf("the guest's %d writers were stopped after %d KiB", flows, last>>10)
	})
	t.Run("the others go on", func(t *testing.T) {
		for i := range 20 {
			require.NoError(t, e.askLine(i))
		}
	})
	after := e.d.usage(t)
	t.Logf("before: %v; stopped: %v", before, after)
	if !raceEnabled { // whose shadow memory is several times the data
		assert.Less(t, after.rss-before.rss, int64(2*flows*perFlow))
	}
	for _, c := range conns {
		_ = c.SetLinger(0)
		_ = c.Close()
	}
	require.Eventually(t, func() bool { return len(e.d.flows(t)) <= before.flows },
		e.bound(margin*3*time.Second), 100*time.Millisecond, "flows are left after their clients (C-16)")
}

// Connections that come and go leave nothing (C-19).
func testChurn(t *testing.T, e *env) {
	e.assertSettled(t, func() {
		// The client ends first (FB-008).
		require.Empty(t, each(10_000, 50, func(i int) error {
			c, err := e.tryDial(portEcho)
			if err != nil {
				return err
			}
			defer c.Close()
			sent := []byte{byte(i)}
			if _, err := c.Write(sent); err != nil {
				return err
			}
			got := make([]byte, 1)
			if _, err := io.ReadFull(c, got); err != nil {
				return err
			}
			if got[0] != sent[0] {
				return fmt.Errorf("%v came back as %v", sent, got)
			}
			return nil
		}))
		// Clients that leave before the guest has answered. They come faster than
		// a guest can accept, so some are refused (C-53).
		require.Empty(t, each(2000, 50, func(i int) error {
			c, err := e.tryDial(portEcho)
			if isReset(err) {
				return nil
			}
			if err != nil {
				return err
			}
			if i%2 == 0 {
				_ = c.SetLinger(0)
			}
			return c.Close()
		}))
		require.Eventually(t, func() bool { return e.askLine(0) == nil },
			e.bound(margin*3*time.Second), 100*time.Millisecond, "it does not recover")
		require.Empty(t, each(200, 20, func(i int) error {
			c, err := e.tryDial(portSource)
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := fmt.Fprintf(c, "%d\n", 64<<20); err != nil {
				return err
			}
			// Anywhere between the first byte and 200 KiB.
			if _, err := io.CopyN(io.Discard, bufio.NewReader(c), int64(1+i<<10)); err != nil {
				return err
			}
			return c.SetLinger(0)
		}))
		require.Empty(t, each(200, 20, func(i int) error {
			c, err := net.Dial("udp", e.addr("127.0.0.1", "udp", portEcho))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = fmt.Fprintf(c, "datagram %d", i)
			return err
		}))
	})
}

// assertSettled runs what makes flows and asserts that the daemon is soon back
// at what it held before, ±5: 3 s after the last flow has ended (C-19), UDP's
// being those that were idle for udpIdle.
func (e *env) assertSettled(t *testing.T, f func()) {
	t.Helper()
	const slack = 5
	before := e.d.usage(t)
	f()
	var after usage
	assert.Eventually(t, func() bool {
		after = e.d.usage(t)
		return after.flows <= before.flows+slack && after.fds <= before.fds+slack && after.endpoints <= before.endpoints+slack
	}, udpIdle+e.bound(margin*3*time.Second), 250*time.Millisecond, "left behind")
	t.Logf("before: %v; after: %v", before, after)
}
