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
// A life of a VM begins with an attachment and has a number, the generation.
// Within one life the states are
//
//	          attached                probe passes
//	waiting ───────────► stalled ─────────────────────► ready
//	   (nothing yet)        ▲  ◄────────────────────────  │
//	                        │     three probes missed     │
//	gone ───────────────────┘     (with a connection)     │
//	  ▲        attached again                             │
//	  └───────────────────────────────────────────────────┘
//	     from stalled and ready: the datapath ended, or, without a connection,
//	     three probes missed
//
// An attached VM that has not answered yet is stalled, not waiting: C-25 keeps
// waiting for "nothing attached", and ready for a probe that has passed. The
// detail tells a VM that boots from one that hangs. Listeners open when it first
// is ready and stay open until the life ends; then, in this order, the listeners
// are closed and the flows reset (DetachVM), the sources' owners withdrawn, the
// state is gone, and only then is the link closed and the next one accepted.
//
// A late answer of an earlier life finds nobody: probes report on a channel of
// their life, and a snapshot whose generation is not the present one is dropped
// (C-27).
//
// Network interfaces are not watched here: a tap whose interface is deleted ends
// its own attachment, and one that is down shows as a node that does not answer.
//
// Who may wait for whom: a VM's goroutine waits for its own Attacher and Link and
// for the loop's mutex; under that mutex the Publisher binds and closes sockets
// and nothing waits for a guest, so a broken VM delays no other (C-29). Shutdown
// is Loop.Run first (nothing is published any more), then the Publisher's own
// (flows drain), then VMs.Close (stacks and attachments).
package reconcile
