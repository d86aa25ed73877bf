// Package qemustream carries frames over a stream socket as QEMU's
// `-netdev stream` does (QEMU 7.2, net/stream.c and net/net.c:
// net_fill_rstate): each Ethernet frame behind its length, a 32-bit number in
// network byte order. There is no virtio-net header on the wire, so the guest's
// NIC offers no offload and takes none.
//
// It does not choose an address or remember a VM: Listen and Dial return
// attachments, package attach decides which.
//
// # Theory of operation
//
// An attachment owns one connection. It is live until one of these ends it, and
// what ended it first is what every later call returns:
//
//   - the peer closed, reset or vanished: ErrPeerGone
//   - a length that no frame has, so the stream is out of step: ErrPeerGone,
//     since nothing after it can be trusted
//   - Close: ErrClosed, whatever was before
//
// Reading. One goroutine calls ReadBatch. It reads as much as the socket has,
// up to 256 KiB, cuts it into frames and copies each once, into the memory lent
// for it. A frame that is only half there at the start of a call is read straight
// into its own memory, and what follows it into the buffer by the same readv(2):
// no byte is copied twice. No lent memory is kept between calls.
//
// Writing. Writers take turns under one lock and never wait for the socket. When
// it is full in the middle of a frame, the rest of that frame, and never more, is
// copied aside: a stream cannot take back what it has sent. From then on the
// attachment is "waiting": WriteBatch takes nothing, and one goroutine, which
// Close waits for, sends the rest as soon as it can, waits until the socket is
// writable, ends the waiting and fires Room.
package qemustream
