package listener

import (
	"errors"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
)

// # Theory of operation
//
// A Group has one epoll set for all of its sockets, and one goroutine. The
// epoll descriptor is itself readable when one of its sockets is (epoll(7):
// sets nest), so it lies on the runtime poller like any other file: while
// nothing arrives the goroutine is parked and holds no thread, and the thread
// that finds it ready goes on to run what it readies, without a hand-over.
//
// The sockets are level-triggered. The goroutine takes a bounded number of
// clients from one of them and moves on to the next; who still waits is
// reported again. Nothing about readiness is remembered in here, so there is
// nothing to get out of step. A UDP socket to which datagrams stream is not watched
// but looked at, some thousand times a second (pace_linux.go).
//
// A socket is
//
//	open ──────────► closed
//	  ▲  │ accept(2) has no descriptor or no memory, and no client
//	  │  ▼ could be turned away either
//	paused     out of the epoll set until the pause is over
//
// Without the pause a level-triggered listener that cannot accept would spin.
// Before it comes to that, the Group gives up a descriptor it holds in reserve,
// accepts with it and resets that client: refused is better than hung (C-53).
//
// Close of a Socket and the Handler: Close never waits for the Handler, so it
// may be called from it, and under a lock that the Handler takes. A call that
// the goroutine had begun when Close was called may therefore still be running,
// and deliver one client; none begins after Close has returned. A Handler that
// registers what it accepts looks at Closed after it has registered, or under
// the lock that the one who closes takes afterwards; either way each client is
// seen by exactly one of the two.

// A Handler is told what arrives at the sockets of a Group. Its methods are
// called on the Group's one goroutine and must not block: no other socket of
// the Group is served meanwhile.
type Handler interface {
	// Accepted hands over a TCP client. The Handler owns c.
	Accepted(s *Socket, c *Conn)
	// Readable says that a UDP socket has datagrams, or that it is time to look
	// whether it has. The Handler takes what one Read gives; it is called again
	// while there are more.
	Readable(s *Socket)
	// AcceptError says that a client could not be taken: it had left
	// (ECONNABORTED), or it was reset, or made to wait, because descriptors
	// (EMFILE, ENFILE) or memory (ENOBUFS, ENOMEM) ran out. The socket goes on
	// by itself; this is for counting.
	AcceptError(s *Socket, err error)
}

// ErrWouldBlock says that a UDP socket has nothing to read, or no room to
// write, at the moment.
var ErrWouldBlock = errors.New("would block")

// A Group waits for clients of any number of sockets, on one goroutine. Its
// methods are safe for concurrent use. The Handler is called for one thing at a time.
type Group struct {
	handler Handler
	epoll   *os.File // the set, on the runtime poller
	clients *clientSet
	done    chan struct{}

	turn sync.Mutex // held by who serves clients: the goroutine, or Poll
	// Under turn.
	served  served
	reserve int // a descriptor to give up; -1 when it could not be had back
	paused  []*Socket
	pacer   pacer

	mu      sync.Mutex
	epfd    int             // epoll's descriptor; valid while not closed
	sockets map[int]*Socket // by descriptor
	closed  bool
}

// NewGroup starts a Group. The caller closes it. On systems without epoll(7) it
// returns errors.ErrUnsupported.
func NewGroup(h Handler) (*Group, error) { return newGroup(h) }

// ListenTCP opens a TCP socket on exactly ap, a wildcard being that of its
// family only; port 0 lets the kernel choose. Clients go to the Handler from
// then on, perhaps before ListenTCP returns, with token in their socket. The
// error is a *net.OpError that Explain turns into a sentence.
//
// The socket has SO_REUSEADDR, so that connections of an earlier one in
// TIME_WAIT do not keep the port from it. Clients' connections send small
// writes at once and are probed after 15 s of silence.
func (g *Group) ListenTCP(ap netip.AddrPort, token any) (*Socket, error) {
	return g.listen(TCP, ap, token)
}

// ListenUDP is ListenTCP for UDP. The socket shares its port with nobody
// (FB-064) and tells the local address of each datagram (FB-038).
func (g *Group) ListenUDP(ap netip.AddrPort, token any) (*Socket, error) {
	return g.listen(UDP, ap, token)
}

func (g *Group) listen(proto Proto, ap netip.AddrPort, token any) (*Socket, error) {
	s, err := g.bind(proto, ap, token, 0)
	if err != nil {
		return nil, err
	}
	if err := g.add(s); err != nil {
		return nil, err
	}
	return s, nil
}

// Poll serves the clients that wait now, in the caller's goroutine, and waits for none.
// It is for a goroutine that is so busy that the Group's own, on the same processor, is
// not woken for long: the runtime looks for what has come for goroutines that wait when
// no other can run, and else every 10 ms.
func (g *Group) Poll() { g.poll() }

// Close closes all sockets, ends the goroutine and waits for it: no call of the
// Handler is under way after it has returned. It must not be called from the
// Handler. Connections that were accepted live on. Closing twice is no error.
func (g *Group) Close() error { return g.close() }

// A Socket is one host address and port that is listened on. Its methods are
// safe for concurrent use.
type Socket struct {
	group *Group
	addr  netip.AddrPort
	token any
	merge atomic.Int32 // the longest datagrams to send merged; 0 never
	// Messages read and datagrams sent, since the Group's goroutine last asked.
	taken, answered atomic.Int32
	pace            pace

	mu     sync.RWMutex // held for reading during system calls on fd
	fd     int
	closed bool

	proto Proto // never change; here they fill the words that closed begins
	index uint16
}

// Addr is where the socket is bound, with the port that the kernel chose.
func (s *Socket) Addr() netip.AddrPort { return s.addr }

// Proto is TCP or UDP.
func (s *Socket) Proto() Proto { return s.proto }

// Index is the socket's place in the range of its Spec, 0 for the first port:
// what to add to the target's port. It is 0 for a socket that Open did not open.
func (s *Socket) Index() uint16 { return s.index }

// Token is what the socket was opened with.
func (s *Socket) Token() any { return s.token }

// Close closes the socket for good: when it returns, any program that sets
// SO_REUSEADDR can bind the port, whatever connections there still are (C-4);
// for UDP, any program. Clients that were accepted live on, the kernel resets
// those that were not yet. It does not wait for the Handler, which may be
// delivering one last client: see Closed. Closing twice is no error.
func (s *Socket) Close() error { return s.close() }

// Closed reports whether Close has been called. A Handler that has registered a
// client asks it afterwards, and aborts the client when it is true.
func (s *Socket) Closed() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.closed
}
