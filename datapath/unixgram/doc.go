// Package unixgram carries frames over a unix datagram socket, one Ethernet
// frame a datagram and nothing else in it: what QEMU's `-netdev dgram`, vfkit
// and krunkit speak. There is no virtio-net header, so no offload either way.
//
// It does not notice that a peer leaves without being spoken to: datagrams have
// no end of file. Whoever watches the VM probes it.
//
// # Theory of operation
//
// A Listener binds one socket for its life. It is in one of two states:
//
//   - free: connected to nobody, so whoever may write to the socket file (its
//     mode is 0600: the daemon's own user) may send.
//   - taken: the first to send a frame, or the 4-byte greeting "VFKT", from a
//     bound socket has become the peer. The socket is connected (connect(2)) to
//     that very socket. The kernel then refuses every other sender with EPERM,
//     also one that has bound the same path anew, and tells by poll(2) when the
//     peer's queue has room again, which it cannot for a socket that is not
//     connected. What others had queued before is dropped (DropForeign).
//
// Accept goes from free to taken and leaves the frame that did it in the
// socket's queue, for the first ReadBatch. Only one attachment is live. Its end
// (Close, or a send that finds the peer's socket gone: ErrPeerGone) goes back to
// free, with the rest of the old peer's frames thrown away; a VMM that was
// started again is refused until then, and taken by its first frame after it.
//
// The attachment reads and writes a duplicate of the descriptor, which is its
// own to close.
//
// A full queue at the peer (net.unix.max_dgram_qlen, ten datagrams, for a peer
// that is not connected back) makes WriteBatch short. One goroutine, which Close
// waits for, then waits until the socket is writable and fires Room.
package unixgram
