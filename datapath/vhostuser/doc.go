// Package vhostuser is a vhost-user back-end (QEMU, docs/interop/vhost-user): it
// is the virtio-net device of a VM whose VMM, the front-end, shares the guest's
// memory with it. A frame is copied once each way, between the guest's buffers
// and the caller's.
//
// It does not know what a frame is for, nor what VM it serves: package attach
// opens the socket, package virtqueue knows rings.
//
//	              socket: requests and descriptors
//	front-end ═══════════════════════════════════► frontend ── session ──► device
//	   │                                                                    ▲  ▲
//	   └─ guest memory, mapped by both ══ RX, TX rings ════ queuePair ──────┘  │
//	                                                            └ attachment ──┘
//
// # Theory of operation
//
// Three lives lie inside each other, and each may end and begin again while the
// one around it goes on:
//
//   - A connection. The front-end connects to the Listener's socket and asks, one
//     request after another; one goroutine answers (frontend). A request that
//     cannot be done as asked, or that breaks the protocol, ends the connection:
//     the front-end would go on believing in what is not so. Everything that was
//     agreed, mapped and passed ends with it, and nothing is carried over to the
//     next.
//   - A driver's. The guest's driver negotiates features and starts rings; a
//     reboot, another driver, a pause of the VM stops them and starts them again
//     on the same connection.
//   - An attachment. Accept makes one when both rings of a pair run and are
//     enabled. It lives on while rings stop and start, with its writes short and
//     its reads waiting, unless they start under other offloads: those are fixed
//     for an attachment's life, so that one ends and the next Accept makes
//     another, on the same connection. When our own side closes it, the
//     connection stays too, for as long as the Listener is open.
//
// What a request may do in which state is session's; what it does, device's.
//
// # A ring
//
//	               SET_VRING_NUM, ADDR, BASE
//	stopped ───────────────────────────────────► described
//	   ▲                                             │ SET_VRING_KICK
//	   │  GET_VRING_BASE, RESET_DEVICE, status 0     ▼
//	   └───────────────────────────────────────── started ─── corrupt ──► broken
//
// A started ring is used while it is enabled: SET_VRING_ENABLE, or from the start
// where the front-end does not know that. TX that is not is taken and thrown
// away. A ring starts with SET_VRING_KICK and is looked at once then, and the
// driver called once, whether or not anybody kicks: a kick may have been lost
// between two back-ends, and each side would wait for the other. It starts where
// the used index says (see device.start). A broken ring has ended the attachment
// and is left alone until it is started anew.
//
// When the memory table changes, started rings are found again in the new one.
// One that is not there rests until its memory comes back.
//
// # Waiting
//
// Nothing polls an idle ring. TX's reader asks for a kick, looks once more, and
// waits on the kick's descriptor itself; having had frames a moment ago, it looks
// a few times before it asks, as often as that has lately brought something. RX is
// kicked only after a short WriteBatch. One goroutine for each started RX ring
// waits for that and fires Room.
//
// # Trust
//
// The driver is an adversary; package virtqueue says what it may do to a ring.
// The front-end is trusted no further: the sizes, indexes, addresses and numbers
// of descriptors in its requests are checked, what is not offered is refused, and
// memory that it takes away after all (a file cut short) is a fault that is
// caught, once a batch, and ends its connection. One descriptor has one owner at
// each moment: the message, until a request takes it.
//
// # Front-ends
//
// The guest's memory has to be shared. QEMU's part, with a chardev that comes
// back when the daemon does:
//
//	-object memory-backend-memfd,id=m,size=SIZE,share=on -numa node,memdev=m
//	-chardev socket,id=c,path=PATH,reconnect=1
//	-netdev vhost-user,id=n,chardev=c[,queues=N]
//	-device virtio-net-pci,netdev=n[,mq=on]
//
// QEMU 7.2 without KVM also needs vectors=0 on the device: it crashes when such a
// NIC uses MSI-X.
package vhostuser
