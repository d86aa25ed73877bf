// Package tap attaches to a guest by a Linux tap device: whatever uses the
// interface (a namespace, a container) is the guest, and we hold its file side,
// with a virtio-net header before each frame.
//
// It interprets no frame and starts no conversation: no address, route or
// neighbour is set, only the interface's own properties.
//
// # Theory of operation
//
// Open looks for the interface in the guest's namespace. If there is none it is
// created and lives as long as the attachment: made in our namespace, under a
// passing name, then moved to the guest's. It has to be this way round, because
// an open /dev/net/tun holds the namespace it was opened in: one opened inside
// would keep a deleted namespace, and the interface in it, alive for ever. Made
// here, the interface goes with its namespace, and our descriptors tell us.
//
// A persistent tap that exists already is adopted where it is, with its
// addresses and routes, and stays when we close. Its descriptors can only be
// opened inside its namespace, so they do hold it. So can the kernel hold any
// deleted namespace for a while. Hence the path that named it is watched, too.
//
// An attachment has one file, non-blocking and on the runtime's poller, for
// each queue pair. A goroutine that finds the queue empty leaves its thread to
// the goroutine it has just made ready, which a thread blocked in read could
// not do. Its states:
//
//	open ──► gone    the interface or its namespace was deleted: every call
//	 │        │      returns ErrPeerGone
//	 └────────┴───► closed   Close was called: every call returns ErrClosed
//
// The kernel tells of the end by waking the poller and by EBADFD to each call.
// It wakes before it detaches, though, and a reader that is quicker finds
// nothing wrong and waits again; so a goroutine asks four times a second too.
//
// Towards the guest the kernel takes each frame at once, into the guest's own
// stack: WriteBatch is short only while a limited send buffer of the interface
// is used up. From the guest, frames wait in a ring of txqueuelen frames, and
// what exceeds it the kernel drops.
package tap
