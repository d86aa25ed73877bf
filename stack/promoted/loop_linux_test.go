package promoted

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A silent is a Source of no frames.
type silent struct{ fd int }

func (s silent) Control(f func(fd uintptr)) error { f(uintptr(s.fd)); return nil }
func (s silent) Read() bool                       { return true }

// TestLoopThatHasEnded tells a loop that has ended of this and that: its descriptors are
// others' by now.
func TestLoopThatHasEnded(t *testing.T) {
	s := newScript(t)
	source, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(t, err)
	defer unix.Close(source)
	require.NoError(t, s.table.Drive(silent{source}))
	l := s.table.loop
	wakefd := l.wakefd
	s.table.Close()
	l.parked.Store(true) // as who was about to wake it has seen it

	other, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(t, err)
	defer unix.Close(other)
	if other != wakefd {
		require.NoError(t, unix.Dup3(other, wakefd, unix.O_CLOEXEC))
		defer unix.Close(wakefd)
	}
	s.table.End()
	_, err = unix.Read(other, make([]byte, 8))
	assert.ErrorIs(t, err, unix.EAGAIN, "it wrote to what is not its own")

	_, ours := newSocket(t)
	c := newConn(s.table, guest, nil)
	c.client = ours
	assert.ErrorIs(t, l.add(c), net.ErrClosed)
	c.added = true
	assert.ErrorIs(t, l.addWrite(c), net.ErrClosed)
}

// TestRoomBeforeWatched has a client that is to be watched for room before it is watched
// at all: it is told of room.
func TestRoomBeforeWatched(t *testing.T) {
	s := newScript(t)
	source, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(t, err)
	defer unix.Close(source)
	require.NoError(t, s.table.Drive(silent{source}))
	_, ours := newSocket(t)
	c := newConn(s.table, guest, nil)
	c.mu.Lock()
	c.client, c.full = ours, true
	c.watched = true
	require.NoError(t, s.table.loop.addWrite(c))
	require.NoError(t, s.table.loop.add(c))
	c.mu.Unlock()
	require.Eventually(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return !c.full
	}, 5*time.Second, time.Millisecond)
}

// TestLateInTime has a loop be busy with flows whose turns take long: what the guest has sent
// is acknowledged in time all the same, for it may wait for that with more.
func TestLateInTime(t *testing.T) {
	s := newScript(t)
	s.connect(100)
	s.copy()
	l := &loop{table: s.table, conns: make(map[int32]*Conn)}
	s.table.loop = l
	defer func() { s.table.loop = nil }()
	const first = 10 * 1448 // a guest's first window
	s.says(ack|flagPSH, 1, 1, 500, strings.Repeat("x", first), 101)
	s.expect(0)
	for began := s.now; s.now < began+ackDelay; {
		l.acknowledge(false)
		l.round++
		s.pass(5 * time.Millisecond) // 16 turns
	}
	assert.EqualValues(t, 1+first, s.expect(1)[0].ack)
	s.pass(time.Second)
	for range 2 * bulkRounds {
		l.acknowledge(false)
		l.round++
	}
	s.expect(0)
}
