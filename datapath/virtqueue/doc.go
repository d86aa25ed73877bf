// Package virtqueue is the device side of a split virtqueue (virtio 1.3, 2.7).
//
// It takes descriptor chains the driver made available, lets the caller copy
// to or from them, and returns them as used. It does no I/O, maps no memory and
// waits for nothing: package vhostuser does that. Which bytes are a header and
// which a frame is not its business either.
//
// # Theory of operation
//
// A queue is three pieces of guest memory. The driver writes the descriptor
// table and the available ring, the device writes the used ring, and each end
// reads what the other writes:
//
//	       driver                                    device (us)
//	descriptor table ──────────────────────────────► walk, once, into a Chain
//	avail: flags idx ring[Num] used_event ─────────► Pop, Flush
//	 used: flags idx ring[Num] avail_event ◄──────── Push, Flush, EnableKicks
//
// Four free-running 16-bit counters, all private, say where we are:
//
//	next       the available entry Pop takes next; GET_VRING_BASE's answer
//	avail      the available index as last read: entries before it may be taken
//	used       the used entry Push writes next
//	published  the used index the driver can see; Flush makes it equal to used
//
// A turn of the caller's loop is DisableKicks, Pop and Push until Pop finds
// nothing, Flush (and a call, if it says so), then EnableKicks; if that finds
// more, another turn, else sleep until the kick. Chains that turned out not to
// be wanted go back with Unpop, the latest first, as if never taken.
//
// A Queue lives from the moment a ring starts to the moment it stops. When the
// ring's place or the guest's memory changes, a new Queue is made from Next.
// The caller sees to it that no method runs while memory is unmapped.
//
// # The driver is not trusted
//
// Whatever lies in the table and the available ring may change while we look.
// An index, a head and a descriptor are therefore loaded once, into variables of
// our own, and only that copy is checked and used. A descriptor that changes
// meanwhile may be half old and half new: that is one more wrong descriptor. What
// may be wrong falls into two classes:
//
//   - A ring that cannot be followed any more: an available index more than Num
//     ahead of us, a head that is no descriptor. Pop returns ErrCorrupt, then
//     and for ever; the caller stops the ring.
//   - A chain that cannot be used, behind a head that can be given back: every
//     ChainError. The caller completes it with nothing written and counts it;
//     the ring goes on.
//
// Every walk is bounded: by the number of descriptors in the table that it
// walks, by MaxSegments, and by MaxReadable and MaxWritable bytes.
//
// # Memory ordering
//
// Four orders matter (virtio 1.3, 2.7.13 and 2.7.14). Each is named where it is
// made; index_unsafe.go says why Go's atomics make them on amd64 and arm64.
//
//  1. The available index is read before the entries and descriptors it
//     covers: acquire, in loadAvail.
//  2. Used entries and what was written to chains are seen before the used
//     index that covers them: release, in storeUsed.
//  3. The used index is stored before used_event is read. If both ends could
//     do their read first, the driver would sleep on entries that we did not
//     call it for: full barrier, in storeUsed.
//  4. The same mirrored: avail_event is stored before the available index is
//     read again, lest we sleep on a chain that we were not kicked for: full
//     barrier, in storeAvailEvent.
package virtqueue
