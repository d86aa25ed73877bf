package listener

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mustPair returns a client and the Conn it became.
func mustPair(tb testing.TB) (*net.TCPConn, *Conn) {
	tb.Helper()
	g, conns := accepting(tb)
	s := mustListen(tb, g, TCP, anyPort4)
	client := mustDial(tb, TCP, s.Addr()).(*net.TCPConn)
	return client, mustAccept(tb, conns)
}

// C-13: the end of a stream and a reset are two things.
func TestConnEndAndReset(t *testing.T) {
	client, c := mustPair(t)
	_, err := client.Write([]byte("last"))
	require.NoError(t, err)
	require.NoError(t, client.CloseWrite())
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	assert.Equal(t, "last", string(got))
	_, err = c.Read(make([]byte, 1))
	assert.Equal(t, io.EOF, err)

	// FB-002: the other direction lives on.
	_, err = c.Write([]byte("answer"))
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	got, err = io.ReadAll(client)
	require.NoError(t, err)
	assert.Equal(t, "answer", string(got))

	client, c = mustPair(t)
	require.NoError(t, client.SetLinger(0))
	client.Close()
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ECONNRESET)
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	assert.Equal(t, c.RemoteAddr().String(), op.Addr.String())
	_, err = c.Write([]byte("x"))
	assert.ErrorIs(t, err, syscall.EPIPE)
}

func TestConnAbort(t *testing.T) {
	client, c := mustPair(t)
	_, err := c.Write([]byte("unread"))
	require.NoError(t, err)
	c.Abort()
	c.Abort()
	assert.NoError(t, c.Close())
	_, err = io.ReadAll(client)
	assert.ErrorIs(t, err, syscall.ECONNRESET)

	// Also after our FIN.
	client, c = mustPair(t)
	require.NoError(t, c.CloseWrite())
	_, err = client.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	c.Abort()
	for err = nil; err == nil; {
		_, err = client.Write([]byte("x"))
	}
	assert.True(t, isReset(err), err)
}

func isReset(err error) bool {
	errno, ok := err.(*net.OpError).Err.(*os.SyscallError)
	return ok && (errno.Err == syscall.ECONNRESET || errno.Err == syscall.EPIPE)
}

// FB-013: what was not read makes Close a reset, as the kernel has it.
func TestFB013CloseWithUnreadData(t *testing.T) {
	client, c := mustPair(t)
	_, err := client.Write([]byte("unread"))
	require.NoError(t, err)
	mustPoll(t, c, unix.POLLIN)
	require.NoError(t, c.Close())
	_, err = client.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
}

func TestConnCloseUnblocks(t *testing.T) {
	for name, end := range map[string]func(*Conn){"close": func(c *Conn) { c.Close() }, "abort": (*Conn).Abort} {
		t.Run(name, func(t *testing.T) {
			_, c := mustPair(t)
			started := make(chan struct{}, 2)
			var wg sync.WaitGroup
			wg.Go(func() {
				started <- struct{}{}
				_, err := c.Read(make([]byte, 1))
				assert.ErrorIs(t, err, net.ErrClosed)
			})
			wg.Go(func() {
				started <- struct{}{}
				var err error
				for b := make([]byte, 1<<20); err == nil; { // until the client's window is full
					_, err = c.Write(b)
				}
				assert.ErrorIs(t, err, net.ErrClosed)
			})
			<-started
			<-started
			end(c)
			wg.Wait()
			_, err := c.Read(make([]byte, 1))
			assert.ErrorIs(t, err, net.ErrClosed)
			_, err = c.Write(make([]byte, 1))
			assert.ErrorIs(t, err, net.ErrClosed)
			assert.ErrorIs(t, c.CloseWrite(), net.ErrClosed)
			assert.ErrorIs(t, c.CloseRead(), net.ErrClosed)
			assert.ErrorIs(t, c.KeepAlive(), net.ErrClosed)
			assert.True(t, c.Gone())
			assert.ErrorIs(t, c.WaitGone(t.Context()), net.ErrClosed)
		})
	}
}

func TestConnCloseRead(t *testing.T) {
	client, c := mustPair(t)
	require.NoError(t, c.CloseRead())
	_, err := c.Read(make([]byte, 1))
	assert.Equal(t, io.EOF, err)
	_, err = c.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(client, make([]byte, 1))
	assert.NoError(t, err)
}

// C-16: a client that resets is seen, whatever it had sent before; one that
// sends or ends its stream is not gone.
func TestConnGone(t *testing.T) {
	client, c := mustPair(t)
	assert.False(t, c.Gone())
	_, err := client.Write([]byte("request"))
	require.NoError(t, err)
	require.NoError(t, client.CloseWrite())
	mustPoll(t, c, unix.POLLRDHUP)
	assert.False(t, c.Gone(), "half-close is legal")

	waited := make(chan error, 1)
	go func() { waited <- c.WaitGone(context.Background()) }()
	require.NoError(t, client.SetLinger(0))
	client.Close()
	select {
	case err := <-waited:
		require.NoError(t, err)
	case <-time.After(patience):
		require.FailNow(t, "not noticed")
	}
	assert.True(t, c.Gone())

	// Nothing was consumed on the way: Read tells the stream and its end, which
	// came first, and Write that nobody is there.
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	assert.Equal(t, "request", string(got))
	_, err = c.Write([]byte("answer"))
	assert.ErrorIs(t, err, syscall.EPIPE)

	// Without an end, the reset comes after what there was.
	client, c = mustPair(t)
	_, err = client.Write([]byte("request"))
	require.NoError(t, err)
	require.NoError(t, client.SetLinger(0))
	client.Close()
	require.NoError(t, c.WaitGone(t.Context()))
	got, err = io.ReadAll(c)
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	assert.Equal(t, "request", string(got))
}

// The wait ends with its context and leaves the connection as it was.
func TestConnWaitGoneCancelled(t *testing.T) {
	client, c := mustPair(t)
	_, err := client.Write([]byte("request"))
	require.NoError(t, err)
	for range 100 {
		ctx, cancel := context.WithCancel(t.Context())
		waited := make(chan error)
		go func() { waited <- c.WaitGone(ctx) }()
		cancel()
		require.ErrorIs(t, <-waited, context.Canceled)
	}
	b := make([]byte, 16)
	n, err := c.Read(b)
	require.NoError(t, err)
	assert.Equal(t, "request", string(b[:n]))

	read := make(chan error)
	go func() {
		_, err := c.Read(b)
		read <- err
	}()
	_, err = client.Write([]byte("more"))
	require.NoError(t, err)
	assert.NoError(t, <-read, "no deadline is left behind")
}

// Close ends a wait too.
func TestConnWaitGoneClosed(t *testing.T) {
	_, c := mustPair(t)
	waited := make(chan error)
	go func() { waited <- c.WaitGone(context.Background()) }()
	c.Abort()
	assert.ErrorIs(t, <-waited, net.ErrClosed)
}

// mustPoll waits until poll(2) says one of events of c.
func mustPoll(tb testing.TB, c *Conn, events int16) {
	tb.Helper()
	require.NoError(tb, c.Control(func(fd uintptr) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(patience/time.Millisecond))
		require.NoError(tb, err)
		require.Equal(tb, 1, n)
	}))
}

// A Conn that waits is parked on the runtime poller and holds no thread.
func TestConnHoldsNoThread(t *testing.T) {
	g, conns := accepting(t)
	s := mustListen(t, g, TCP, anyPort4)
	threads := func() int {
		tasks, err := os.ReadDir("/proc/self/task")
		require.NoError(t, err)
		return len(tasks)
	}
	before := threads()
	var wg sync.WaitGroup
	var clients []net.Conn
	for range 200 {
		clients = append(clients, mustDial(t, TCP, s.Addr()))
		c := mustAccept(t, conns)
		wg.Go(func() {
			_, err := c.Read(make([]byte, 1))
			assert.Equal(t, io.EOF, err)
		})
	}
	assert.Less(t, threads(), before+50)
	for _, c := range clients {
		c.Close()
	}
	wg.Wait()
}

// A Pollable's owner is told when to try again, once for each reason.
func TestConnWatch(t *testing.T) {
	client, c := mustPair(t)
	events := make(chan Ready, 16)
	require.NoError(t, c.Watch(func(r Ready) { events <- r }))
	_, err := client.Write([]byte("x"))
	require.NoError(t, err)
	require.Equal(t, ReadyRead, <-events, "room to write was not asked for")
	b := make([]byte, 4)
	n, err := c.Read(b)
	require.NoError(t, err)
	assert.Equal(t, "x", string(b[:n]))

	require.NoError(t, c.WatchWrite())
	assert.NotZero(t, <-events&ReadyWrite, "what is so already is reported")
	require.NoError(t, c.WatchWrite())
	_, err = client.Write([]byte("y"))
	require.NoError(t, err)
	assert.NotZero(t, <-events&ReadyRead)

	require.NoError(t, client.SetLinger(0))
	client.Close()
	assert.Equal(t, ReadyRead|ReadyWrite|ReadyEnd, <-events, "a reset is for both")

	require.NoError(t, c.Close())
	assert.Equal(t, ReadyClosed, <-events)
	assert.ErrorIs(t, c.Watch(nil), net.ErrClosed)
	assert.ErrorIs(t, c.WatchWrite(), net.ErrClosed)
	assert.ErrorIs(t, c.Control(func(uintptr) {}), net.ErrClosed)
}
