package listener

import (
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A look is what one call of Readable saw.
type look struct {
	paced bool // the socket was, before
	sizes int  // messages read
	err   error
}

// A pacedHandler reads one batch a call, after the call's before, and tells of it.
type pacedHandler struct {
	tb     testing.TB
	before []func(*Socket) // by call; nil and those beyond do nothing
	answer bool
	looks  chan look
	got    chan string

	reader *Reader
	calls  int
}

func newPacedHandler(tb testing.TB, before ...func(*Socket)) *pacedHandler {
	return &pacedHandler{tb: tb, before: before, looks: make(chan look, 1000), got: make(chan string, 1000), reader: NewReader()}
}

func (h *pacedHandler) readable(s *Socket) {
	if h.calls < len(h.before) && h.before[h.calls] != nil {
		h.before[h.calls](s)
	}
	h.calls++
	messages, err := h.reader.Read(s)
	for i := range messages {
		m := &messages[i]
		h.got <- string(m.Data)
		if h.answer {
			n, err := s.Send([][2][]byte{{m.Data}}, m.Client, m.Local)
			assert.NoError(h.tb, err)
			assert.Equal(h.tb, 1, n)
		}
	}
	h.looks <- look{s.pace.on, len(messages), err}
}

// A stream sends datagrams that are numbered.
type stream struct {
	tb testing.TB

	mu   sync.Mutex
	conn net.Conn
	next int
}

// to makes s the beginning of a stream to a socket.
func (s *stream) to(sock *Socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn, s.next = mustDial(s.tb, UDP, sock.Addr()), 0
}

func (s *stream) send(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range n {
		_, err := fmt.Fprint(s.conn, s.next)
		assert.NoError(s.tb, err)
		s.next++
	}
}

// What streams is looked at until it ends, and arrives whole and in order.
func TestPace(t *testing.T) {
	in := stream{tb: t}
	h := newPacedHandler(t,
		func(*Socket) { in.send(2 * readBatch) }, // behind the one that was told of
		nil, nil,
		func(*Socket) { in.send(paceLeast) })
	g := mustGroup(t, &funcs{readable: h.readable})
	s := mustListen(t, g, UDP, anyPort4)
	in.to(s)
	in.send(1)
	assert.Equal(t, look{false, readBatch, nil}, <-h.looks)
	assert.Equal(t, look{true, readBatch, nil}, <-h.looks)
	// The one that is left is too few, so epoll(7) has it from here on.
	assert.Equal(t, look{true, 1, nil}, <-h.looks)
	in.send(1)
	assert.Equal(t, look{false, 1 + paceLeast, nil}, <-h.looks)
	for i := range 2*readBatch + 2 + paceLeast {
		assert.Equal(t, fmt.Sprint(i), <-h.got)
	}
	assert.Empty(t, h.looks)
}

// A look that finds nothing ends it, and the next datagram is told of.
func TestPaceSilence(t *testing.T) {
	in := stream{tb: t}
	h := newPacedHandler(t, func(*Socket) { in.send(paceFrom) }, func(*Socket) { in.send(paceLeast) })
	g := mustGroup(t, &funcs{readable: h.readable})
	s := mustListen(t, g, UDP, anyPort4)
	in.to(s)
	in.send(1)
	assert.Equal(t, look{false, 1 + paceFrom, nil}, <-h.looks)
	assert.Equal(t, look{true, paceLeast, nil}, <-h.looks)
	assert.Equal(t, look{true, 0, ErrWouldBlock}, <-h.looks)
	in.send(1)
	assert.Equal(t, look{false, 1, nil}, <-h.looks)
}

// Clients that are answered are never left to wait, however many they are.
func TestPaceAnswered(t *testing.T) {
	in := stream{tb: t}
	h := newPacedHandler(t, func(*Socket) { in.send(paceFrom) })
	h.answer = true
	g := mustGroup(t, &funcs{readable: h.readable})
	s := mustListen(t, g, UDP, anyPort4)
	in.to(s)
	in.send(1)
	assert.Equal(t, look{false, 1 + paceFrom, nil}, <-h.looks)
	in.send(1)
	assert.Equal(t, look{false, 1, nil}, <-h.looks)
}

// One that is closed while it is paced is not looked at again, nor is another that
// has its descriptor.
func TestPaceClose(t *testing.T) {
	in := stream{tb: t}
	h := newPacedHandler(t,
		func(*Socket) { in.send(paceFrom) },
		func(s *Socket) {
			in.send(paceLeast)
			assert.NoError(t, s.Close())
		},
		func(*Socket) { in.send(paceFrom) },
		func(s *Socket) { assert.Equal(t, []*Socket{s}, s.group.pacer.sockets) })
	g := mustGroup(t, &funcs{readable: h.readable})
	s := mustListen(t, g, UDP, anyPort4)
	in.to(s)
	in.send(1)
	assert.Equal(t, look{false, 1 + paceFrom, nil}, <-h.looks)
	assert.Equal(t, look{true, 0, net.ErrClosed}, <-h.looks)

	s = mustListen(t, g, UDP, anyPort4)
	in.to(s)
	in.send(1)
	assert.Equal(t, look{false, 1 + paceFrom, nil}, <-h.looks)
	assert.Equal(t, look{true, 0, ErrWouldBlock}, <-h.looks)
	in.send(1)
	assert.Equal(t, look{false, 1, nil}, <-h.looks)
}
