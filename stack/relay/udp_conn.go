package relay

import "time"

// A Datagram is one UDP payload of 0 to 65507 bytes. It lies in up to two
// pieces, as a frame from the guest does in the memory it was read into.
type Datagram = [2][]byte

// A GuestPacketConn is the guest's end of one UDP flow: connected to one
// address and port of the guest, from a source port that is this flow's own
// while it lives (C-20). All methods are safe for concurrent use.
type GuestPacketConn interface {
	// Write sends datagrams of 0 to 65507 bytes each, in order and whole. It
	// neither blocks nor keeps anything of them; one for which the link has no
	// room is counted and dropped below. n of them were taken; the error, if
	// any, concerns the next one, and net.ErrClosed all that are left.
	Write(datagrams [][]byte) (n int, err error)
	// Receive has deliver called for what comes from the guest until Close, and
	// returns at once. It is called once. Datagrams come some at a time and in
	// order; they are valid during the call only. The guest's port-unreachable is
	// deliver(nil, syscall.ECONNREFUSED); the flow may live on after it. The end of
	// the endpoint, which may be before Receive, is deliver(nil, net.ErrClosed).
	// deliver runs in the goroutine that reads the guest's frames, or that calls
	// Write, Receive or Close, and must not block; a call with datagrams may be
	// under way when Close returns.
	Receive(deliver func(datagrams []Datagram, err error))
	// Resumed is GuestConn's.
	Resumed() time.Time
	// LocalAddr is the source as the guest sees it, "IP:port".
	LocalAddr() string
	// Close frees the endpoint.
	Close() error
}
