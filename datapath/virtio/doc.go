// Package virtio holds the wire formats of virtio-net that every transport
// shares: the header that travels with a frame and the offloads it can express.
// It is pure: no system calls, no state.
package virtio
