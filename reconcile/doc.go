// Package reconcile keeps host listeners equal to what people, containers and
// Services ask for, and follows the VMs they lead to through their lives.
//
// It opens no socket and reads no frame: the Publisher does the one, the Link's
// owner the other. It imports of this module only stack/listener and the clients
// in guest, whose types it takes and whose work it is handed, so its tests need
// neither a network nor a guest.
//
// # Theory of operation
//
//	Source ──Snapshot──┐
//	Source ──Snapshot──┼─► Loop ─ desired ─ diff ──► Publisher
//	Static ──Apply─────┘     ▲
//	                         │ AddSource, DropVM
//	Attacher ──Link──► VMs ──┴── AttachVM, DetachVM ──► Attacher
//
// Publishing is level-triggered. A source states all that it wants, a Snapshot;
// the loop keeps the last of each source, joins them (desired), compares with
// what the Publisher was last told (diff), withdraws owners that nobody wants
// and publishes those whose specs changed. The Publisher does the same one step
// down, between an owner's specs and its sockets. So a lost, repeated or
// reordered event costs nothing but time: the next snapshot puts it right, and
// every 30 s, and when a VM came or went, everything is stated again and owners
// without a want are pruned.
//
// Only Static, whose Apply returns when it is done, says what changes of what it
// wants, and one publish beside ten thousand costs what one costs (amend.go).
//
// The state of a row (pending, forwarded …) is the Publisher's. It knows which
// VMs are attached, retries failed binds and promotes owners by itself; the loop
// only logs a state that differs from the last it was told. Likewise a source
// knows by itself what it must ask for again: one that fails sends nothing, its
// last snapshot stays, and it is run again after a while.
//
// Two kinds of sources live for different times. Static and others that speak
// for every VM live as long as the loop: their rows survive a VM and become
// pending. The sources of a VM live as long as one life of it, and what they
// wanted goes at once when it ends (C-26).
//
// A life of a VM is one guest on one attachment and has a number, the generation.
// Within one life the states are
//
//	          attached                probe passes
//	waiting ───────────► stalled ─────────────────────► ready
//	   (nothing yet)     ▲  ▲  ◄────────────────────────  │
//	                     │  │     three probes missed     │
//	               resumed  │     (with a connection)     │
//	                     │  │                             │
//	        paused ──────┘  │ attached or booted again    │
//	          ▲             │                             │
//	   the VMM says so     gone ◄─────────────────────────┘
//	   (from stalled and         from stalled, ready and paused: the datapath
//	    ready)                   ended, the VMM says shutdown or reset, or, without
//	                             a connection, three probes missed
//
// An attached VM that has not answered yet is stalled, not waiting: C-25 keeps
// waiting for "nothing attached", and ready for a probe that has passed. The
// detail tells a VM that boots from one that hangs. Listeners open when it first
// is ready and stay open until the life ends; then, in this order, the listeners
// are closed and the flows reset (DetachVM), the sources' owners withdrawn, the
// state is gone, and only then is the link closed and the next one accepted.
//
// Where a VMM can be asked (VM.VMM), its last word lies beside the VM, and the
// VM's goroutine looks when it changes: how often a VMM speaks costs nothing.
//
//   - Paused: nothing is asked of the node and nothing counts against it, however
//     long, and the link is told, whose flows outlive it (C-28). From the end of the pause on a probe must pass before it is
//     ready again. One that was under way when a pause began or ended is dropped.
//   - Reset and shutdown end the life, not the link (C-26, C-27): QEMU 7.2's stream
//     netdev does not connect a second time, so a link that was closed then would
//     be the VM's last. The next life begins on the same link: after a reset when
//     100 ms have passed, in which what the earlier guest sent last is read; after
//     a shutdown (-no-shutdown keeps QEMU up) when the VMM says that it has a guest
//     again. Until then nothing else is accepted.
//   - Lost, the VMM cannot be asked: a pause is over as far as anyone knows, and the
//     probe decides. A shutdown holds for the link it was said of, but for one
//     without a connection, which nobody else would ever end. What happens to the
//     guest in this time is not learnt later.
//
// A guest may end more than once between two looks, so the word counts ends, and
// beginnings and ends of pauses, and a life knows the count it began with. Lives
// are at least 100 ms apart, whoever ends them.
//
// A late answer of an earlier life finds nobody: probes report on a channel of
// their life and are over before the next one's begin, and a snapshot whose
// generation is not the present one is dropped (C-27).
//
// Network interfaces are not watched here: a tap whose interface is deleted ends
// its own attachment, and one that is down shows as a node that does not answer.
//
// Time is the monotonic clock's alone (C-52): wall-clock times are shown, never
// compared.
//
// Who may wait for whom: a VM's goroutine waits for its own Attacher, Link and VMM
// and for the loop's mutex; under that mutex the Publisher binds and closes sockets
// and nothing waits for a guest, so a broken VM delays no other (C-29). Shutdown
// is Loop.Run first (nothing is published any more), then the Publisher's own
// (flows drain), then VMs.Close (stacks and attachments).
package reconcile
