// Package netstack is the only package that knows gVisor. A Stack is one VM's
// TCP/IP: it sits on one datapath.Attachment as the gateway of the guest's link
// and dials the guest from there.
//
// What is used of gVisor: IPv4, TCP, UDP, their demultiplexing, timers and
// buffers. What is not, and why:
//
//   - Its link endpoints. fdbased drives a tap frame by frame and without the
//     virtio-net header; channel adds a goroutine hop. Ours (linkEndpoint) knows
//     host GSO, partial checksums and back-pressure.
//   - Its neighbour cache. There is one neighbour on the link, the node, and
//     everything else lies behind it. The link layer asks for the node itself
//     and keeps its address, so no first packet waits for a resolution, and a
//     guest can neither poison the cache nor be answered for an address that is
//     not the gateway's.
//   - gonet and the copies it makes, but for the daemon's own connections
//     (DialContext), which need deadlines. Conn copies straight between a host
//     socket and the endpoint's own chunks (copy.go), without a goroutine a flow.
//   - Its processors, where the reader of frames can do their work (inline.go).
//   - Its TCP altogether, for the flows to a guest whose flows are promoted
//     (promoted.go): those are package promoted's, which shares the link.
//
// # Theory of operation
//
// Towards the guest, gVisor's sender runs in the goroutine of whoever writes, or
// of whoever processes an acknowledgement, and ends in outbound.WritePacket:
// one frame, handed to the attachment at once. An attachment that has no room
// makes the queue keep packets, in order, until Room fires. TCP payload is
// bounded by its windows there; everything else by a short queue whose overflow
// is counted. WritePacket never blocks (gVisor holds the endpoint's lock) and
// reports no error for a full link (gVisor would take it for loss).
//
// From the guest, one goroutine a queue pair (inbound.run) reads frames in
// batches, checks each once, and delivers it. Headers lie in a small view of
// their own: gVisor clones the view its headers live in. The same goroutine goes
// on with what the batch brought about: segments are worked off (inline.go), and
// flows that have something for their client, or room for more of it, move it
// (runner.go, copy.go). Where flows are promoted and the transport can be polled, the
// loop of their package reads in its place (drive.go).
//
// gVisor's time is the stack's own (clock.go): it stands while the guest is
// paused, so that no flow ends because a paused guest does not answer (C-28).
//
// The guest is an adversary. inbound delivers only what is addressed to the
// gateway, from the node or from an address we dialled, with checksums verified
// or marked partial. ARP is answered here, for the gateway's address alone.
package netstack
