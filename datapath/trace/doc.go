// Package trace shows the frames of a VM's link to whoever asks: a decorator over
// any datapath.Attachment, readers of what passes, a pcapng stream of it, and a
// flight recorder that outlives the process.
//
// It does not know the stack. Whose flow a frame belongs to it is told by a
// function handed in; which frames were dropped above it, by netstack through
// datapath.DropObserver.
//
//	netstack ──► link (Tracer.Wrap) ──► transport
//	               │ copies, while someone reads
//	               ▼
//	             ring ──► Reader ──► pcapng
//
// Directions are those of the host's end of the link, as tcpdump on a tap would
// say them: what the guest sent is inbound, what goes to it outbound.
//
// # Theory of operation
//
// While nobody reads, a batch costs one atomic load. Each Reader has a ring of
// its own, bounded, that every goroutine of the datapath fills and one goroutine
// empties. A record is reserved, filled and then published or voided, each in
// constant time and without waiting: a ring without room loses the record, which
// is counted and told in the stream, and traffic goes on.
//
// A frame to the guest is reserved before WriteBatch and published after it, or
// voided when the transport had no room: so it stands before the answer to it,
// and once. A frame from the guest is reserved when ReadBatch returns and
// published when its reader asks for the next batch: what the reader has dropped
// by then carries its reason. The Reader waits for the oldest record, so the
// order is that of reserving, and times never fall.
//
// What a transport drops by itself it keeps no frame of: then a line of text
// stands in the frame's place, on an interface of its own ("vm1/drops").
//
// Frames are copied as they are, super-frames whole. A partial checksum is
// completed in the copy, off the datapath, if all of the frame is there and it
// was not dropped; otherwise a comment says that it is partial.
//
// pcapng is written and read here, in some hundred lines each, and not by
// gopacket's pcapgo: that one wants an interface before there is any, allocates
// for each option, and links every decoder it has (3 MB). Tests read what is
// written with tshark and with pcapgo.
package trace
