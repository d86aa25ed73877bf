// Package promoted is a small TCP for flows to the guest that do without gVisor:
// promoted flows, after passt. It knows one link, whose far side is near, and one
// kind of flow: from a client's socket on the host to a port of the guest's, which
// we open. Whatever else speaks TCP on the link is gVisor's.
//
// # Theory of operation
//
// The client's socket is the send buffer. Its bytes are peeked (MSG_PEEK at
// SO_PEEK_OFF) straight into the frame that goes to the guest and stay in the
// socket until the guest has acknowledged them; only then are they taken from it.
// What has to be sent again is peeked again. So nothing is kept here, a client is
// held up by its own window when the guest is slow, and the one buffer that the
// bytes pass through is as hot as a cache can have it. What a request is, a few
// bytes with nothing else under way, is read at once and kept (held), for that
// costs two system calls less. See send.go.
//
// Towards the client bytes go from the guest's frames straight into the socket, those of
// a batch at once (gathered): what costs is to wake the client. What it does not take
// waits (pending), and the window that the guest is shown is less by as much: a flow
// keeps no more than it has promised to take. Segments that come before their turn wait
// too, within that window (early). See receive.go.
//
// One link, one round trip of microseconds: there is no selective acknowledgement,
// and the congestion window (RFC 5681, slow start and halving) is there for what
// may lie behind the node. Timestamps (RFC 7323) are, for round trips, for old
// duplicates, and because a guest takes a new connection on the ports of one that
// it remembers only if it is newer (RFC 6191).
//
// A Conn has a lock and no goroutine. Who brings an event runs what follows from
// it: the reader of frames, the goroutine of the clients' sockets, a timer. Where the
// link can be waited for, the first two are one (loop_linux.go). The reader leaves
// acknowledging, and sending what acknowledgements allow, to the end of its batch
// (Batch.End), so that many segments are answered by one. A flow that has more to send
// than a turn of it has another in its turn with others (turns.go).
//
// The guest is an adversary. What comes of it is a Segment, read once from a frame
// that was checked. It can cost a flow its own traffic, and us at most twice
// Options.Window bytes a flow from it (pending and early) and what maxHeld and maxLinger
// allow towards it.
package promoted
