package listener

import (
	"net/netip"
)

// # Theory of operation
//
// A system call costs as much as the copy of a long datagram, so datagrams cross
// it some at a time. What waits at a socket is read by one recvmmsg(2); and where
// the kernel has merged datagrams of one client (udp(7), UDP_GRO), because they
// came so from its network card or because the client sent them so, they are
// read as one and cut apart by whoever looks at them. The other way, datagrams
// of one length are given to the kernel as one (UDP_SEGMENT), which cuts them
// apart as late as it can: they pass its stack once.
//
// Neither shows outside: a client sends and gets datagrams with the boundaries
// they had. A kernel or a path that does not merge (EINVAL for a path with a
// small MTU, EIO without checksums in hardware) makes the socket remember the
// length at which it was refused, and send from there on one by one.

const (
	// readBatch is how many messages one Read takes: as many as a socket may take
	// of the Group's goroutine before the others have their turn.
	readBatch = 64
	// maxMerged is how many datagrams the kernel takes as one (UDP_MAX_SEGMENTS,
	// 64 before Linux 6.9).
	maxMerged = 64
	// maxPayload is the longest UDP payload in IPv4: 65535 - 20 - 8.
	maxPayload = 65507
	// readStride is from one message's memory to the next: 65507 rounded up to
	// 1025 cache lines of 64 bytes. An odd number, so that their beginnings do
	// not all want the same lines of the cache.
	readStride = 1025 * 64
)

// A Message is what one client sent to a UDP socket.
type Message struct {
	// Client is the sender. Zones are interface indices.
	Client netip.AddrPort
	// Local is the address of ours that it was sent to, and is answered from.
	Local netip.Addr
	// Data is one datagram; or several that the kernel has merged, each Size
	// bytes long but for the last, which may be shorter. It is valid until the
	// next Read.
	Data []byte
	// Size is the length of each datagram in Data, at least 1; len(Data) for one
	// alone.
	Size int
}

// Next cuts the first datagram off Data. After the last, more is false.
func (m *Message) Next() (datagram []byte, more bool) {
	n := min(m.Size, len(m.Data))
	datagram, m.Data = m.Data[:n:n], m.Data[n:]
	return datagram, len(m.Data) > 0
}

// A Reader is the memory that datagrams are read into: 4 MiB, of which the
// system provides what was ever used. It serves any number of sockets, and one
// goroutine.
type Reader struct {
	messages [readBatch]Message
	raw      *rawReader
}

// NewReader returns a Reader.
func NewReader() *Reader { return &Reader{raw: newRawReader()} }

// Read takes what waits at a UDP socket, at most 64 messages, without waiting and
// without allocating (a link-local client's zone aside).
//
// The error is ErrWouldBlock when there is none, net.ErrClosed after Close. Any
// other concerns one datagram: the next may be fine.
func (r *Reader) Read(s *Socket) ([]Message, error) {
	n, err := s.readMessages(r)
	return r.messages[:n], err
}

// Send sends datagrams of 0 to 65507 bytes each, in two pieces, from local, and
// from whichever address the kernel prefers if that is the zero address. It
// neither waits nor allocates. client and local are what Read gave.
//
// n of them were sent; the error concerns the next. It is ErrWouldBlock when
// there is no room, net.ErrClosed after Close.
func (s *Socket) Send(datagrams [][2][]byte, client netip.AddrPort, local netip.Addr) (n int, err error) {
	return s.sendMessages(datagrams, client, local)
}
