// Package datapath is the layer-2 edge of culvert: how Ethernet frames reach and
// leave the virtio-net NIC of a VM, whatever carries them.
//
//	stack/netstack ──► Attachment ──► QueuePair ──► RX of the guest
//	               ◄──            ◄──           ◄── TX of the guest
//
// RX and TX are always the guest's, as in virtio: WriteBatch gives frames to
// the guest's RX, ReadBatch takes frames from the guest's TX.
//
// The virtio-net header always lies beside the frame (Frame.Hdr), never inside
// it. A transport that carries no such header on its wire says so in
// Info.ToGuest and Info.FromGuest: both are zero, and every frame is then whole,
// checksummed and no longer than the link's MTU.
//
// Memory belongs to the caller in both directions. A transport borrows what a
// call hands it, for the length of that call.
//
// The guest is an adversary. A transport bounds and counts what it takes; it
// does not interpret it. Package stack/netstack checks headers and frames
// before it believes them.
//
// Packages:
//
//   - virtio: wire formats of virtio-net, pure
//   - tap: a Linux tap device with virtio-net headers
//   - qemustream: QEMU's stream netdev, length-prefixed frames on a stream socket
//   - unixgram: one datagram, one frame
//   - vhostuser: a vhost-user back-end, the VM's virtio-net device itself
//   - virtqueue: the device side of a split virtqueue, pure
//   - memory: two attachments joined in memory
//   - socketfile: one process at a time for a unix socket path
//   - trace: shows the frames that pass an attachment, in pcapng
//   - attach: parses an attach spec and opens the transport it names
//   - datapathtest: what every transport must do, as a test suite
package datapath
