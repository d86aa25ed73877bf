package qemustream

import (
	"bytes"
	"context"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/socketfile"
)

// patience bounds what should happen at once.
const patience = 10 * time.Second

// A logBuffer is where a test's log goes.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func mustListen(t *testing.T, network, address string, log *logBuffer) *Listener {
	t.Helper()
	l, err := Listen(network, address, log.logger())
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	return l
}

func mustAccept(t *testing.T, l interface {
	Accept(context.Context) (datapath.Attachment, error)
}) datapath.Attachment {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a, err := l.Accept(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, a.Close()) })
	return a
}

func mustDial(t *testing.T, l *Listener) *peer {
	t.Helper()
	addr := l.l.Addr()
	conn, err := net.Dial(addr.Network(), addr.String())
	require.NoError(t, err)
	p := newPeer(conn.(Conn))
	t.Cleanup(func() { assert.NoError(t, p.Leave()) })
	return p
}

// mustPass sends a frame each way.
func mustPass(t *testing.T, a datapath.Attachment, p *peer) {
	t.Helper()
	want := pattern(100, 1)
	require.NoError(t, p.Send(want))
	frames := make([]datapath.Frame, 1)
	_, err := a.QueuePairs()[0].ReadBatch(frames, lend)
	require.NoError(t, err)
	require.Equal(t, want, frameBytes(frames[0]))
	require.NoError(t, writeAll(a.QueuePairs()[0], frames))
	got, err := p.Recv(patience)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestListenServesOneAtATime(t *testing.T) {
	for network, address := range map[string]string{"unix": filepath.Join(t.TempDir(), "s"), "tcp": "127.0.0.1:0"} {
		t.Run(network, func(t *testing.T) {
			datapathtest.Leaks(t)
			var log logBuffer
			l := mustListen(t, network, address, &log)
			first := mustDial(t, l)
			a := mustAccept(t, l)
			mustPass(t, a, first)

			for range 3 {
				second := mustDial(t, l)
				_, err := second.Recv(patience)
				require.Error(t, err, "told no")
				require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
			}
			assert.EqualValues(t, 3, l.Refused())
			assert.Equal(t, 1, bytes.Count([]byte(log.String()), []byte("refused a second connection")), "said once")
			mustPass(t, a, first)
		})
	}
}

// TestListenTakesARestartedVMM: a VMM that is killed and connects again at once
// is served, though nobody has noticed yet that it had gone.
func TestListenTakesARestartedVMM(t *testing.T) {
	datapathtest.Leaks(t)
	var log logBuffer
	l := mustListen(t, "unix", filepath.Join(t.TempDir(), "s"), &log)
	p := mustDial(t, l)
	a := mustAccept(t, l)
	for range 100 {
		require.NoError(t, p.Send(pattern(60, 0))) // unread
		require.NoError(t, p.Leave())
		p = mustDial(t, l)
		require.NoError(t, a.Close())
		a = mustAccept(t, l)
		mustPass(t, a, p)
	}
	assert.Zero(t, l.Refused())
}

// TestListenDropsTheDead: VMMs that connected and left while nobody accepted do
// not come up one by one, each as a life of the VM.
func TestListenDropsTheDead(t *testing.T) {
	datapathtest.Leaks(t)
	var log logBuffer
	l := mustListen(t, "unix", filepath.Join(t.TempDir(), "s"), &log)
	for range 100 {
		p := mustDial(t, l)
		require.NoError(t, p.Send(pattern(60, 0)))
		require.NoError(t, p.Leave())
	}
	p := mustDial(t, l)
	mustPass(t, mustAccept(t, l), p)
	assert.Zero(t, l.Refused())
}

func TestListenSocketFile(t *testing.T) {
	datapathtest.Leaks(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	var log logBuffer
	l := mustListen(t, "unix", path, &log)
	info, err := os.Lstat(path)
	require.NoError(t, err)
	assert.Equal(t, fs.ModeSocket|0o600, info.Mode())

	_, err = Listen("unix", path, log.logger())
	require.ErrorIs(t, err, socketfile.ErrInUse, "a live daemon's")
	p := mustDial(t, l)
	mustPass(t, mustAccept(t, l), p)

	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, left)
	_, err = l.Accept(t.Context())
	assert.ErrorIs(t, err, datapath.ErrClosed)

	_, err = Listen("unix", filepath.Join(dir, "missing", "s"), log.logger())
	assert.ErrorIs(t, err, fs.ErrNotExist)
	_, err = Listen("tcp", "192.0.2.1:1", log.logger())
	assert.ErrorIs(t, err, unix.EADDRNOTAVAIL)
}

func TestListenCloseUnblocksAccept(t *testing.T) {
	datapathtest.Leaks(t)
	var log logBuffer
	l := mustListen(t, "tcp", "127.0.0.1:0", &log)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := l.Accept(ctx)
	require.ErrorIs(t, err, context.Canceled)
	accepted := make(chan error)
	go func() {
		_, err := l.Accept(context.Background())
		accepted <- err
	}()
	require.NoError(t, l.Close())
	assert.ErrorIs(t, <-accepted, datapath.ErrClosed)
}

// TestListenSurvivesEMFILE: without a descriptor left the listener says so once,
// and accepts when there is one again.
func TestListenSurvivesEMFILE(t *testing.T) {
	datapathtest.Leaks(t)
	var log logBuffer
	l := mustListen(t, "unix", filepath.Join(t.TempDir(), "s"), &log)
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	client, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer func() { assert.NoError(t, unix.Close(client)) }()
	none := limit
	none.Cur = 1 // standard input's: a number just above the highest would leave the gaps below it
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	connectErr := unix.Connect(client, &unix.SockaddrUnix{Name: l.l.Addr().String()})
	said := assert.Eventually(t, func() bool { return bytes.Contains([]byte(log.String()), []byte("cannot accept")) },
		patience, 10*time.Millisecond)
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, connectErr)
	require.True(t, said)
	mustAccept(t, l)
	assert.Equal(t, 1, bytes.Count([]byte(log.String()), []byte("cannot accept")))
}

func TestDialWaitsForTheVMM(t *testing.T) {
	datapathtest.Leaks(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "qemu")
	d := NewDialer("unix", path)
	defer func() { assert.NoError(t, d.Close()) }()
	accepted := make(chan datapath.Attachment)
	go func() {
		a, err := d.Accept(t.Context())
		assert.NoError(t, err)
		accepted <- a
	}()
	select {
	case <-accepted:
		require.Fail(t, "nothing is there")
	case <-time.After(2 * dialEvery): // at least one try finds nothing
	}
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	for range 3 { // and again after each end
		conn, err := l.Accept()
		require.NoError(t, err)
		a := <-accepted
		mustPass(t, a, newPeer(conn.(Conn)))
		require.NoError(t, conn.Close())
		require.NoError(t, a.Close())
		go func() {
			a, err := d.Accept(t.Context())
			assert.NoError(t, err)
			accepted <- a
		}()
	}
	conn, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.NoError(t, (<-accepted).Close())
}

func TestDialEnds(t *testing.T) {
	datapathtest.Leaks(t)
	path := filepath.Join(t.TempDir(), "qemu")
	d := NewDialer("unix", path)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := d.Accept(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	accepted := make(chan error)
	go func() {
		_, err := d.Accept(context.Background())
		accepted <- err
	}()
	require.NoError(t, d.Close())
	assert.ErrorIs(t, <-accepted, datapath.ErrClosed)

	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	defer func() { assert.NoError(t, l.Close()) }()
	d = NewDialer("unix", path)
	defer func() { assert.NoError(t, d.Close()) }()
	_, err = d.Accept(t.Context())
	assert.ErrorIs(t, err, unix.EPROTOTYPE, "a socket of another kind will not turn into one")
}
