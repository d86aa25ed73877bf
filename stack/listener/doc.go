// Package listener has the host's side of a publish: what was asked for
// ([Spec], [ParseSpec]), who asked ([Owner]), who gets it ([Table]), the
// sockets ([Open], [Group], [Socket], [Conn]) and what became of it
// ([Outcome], [Explain]).
//
// It does not know VMs, flows or gVisor: package stack takes the connections
// and datagrams that arrive here and carries them to a guest. It never logs.
//
// # Theory of operation
//
// A publish passes four stations:
//
//		Spec ──► Policy ──► Table ──► Open
//		what     which      whose     sockets, errno → Outcome
//		         addresses
//
//	  - [Policy] turns "no address" and wildcards into addresses, once, here.
//	  - [Table] is pure bookkeeping of keys (protocol, address, ports). The first
//	    to ask holds a key; others wait in line. It is consulted before any
//	    socket is made, so a conflict among our own publishes has a name, and
//	    what the kernel refuses after that is somebody else's doing.
//	  - [Open] binds all that a spec means, keeps what worked, and says in one
//	    [Outcome] what did not (C-5). Nothing else in culvert binds ports for
//	    guests.
//	  - A [Group] waits for any number of sockets with one epoll set and one
//	    goroutine. An idle port costs its socket in the kernel and a few hundred
//	    bytes here: no goroutine, no buffer (C-9).
//
// A [Socket] is open from its creation to [Socket.Close], which frees the port
// before it returns. A [Conn] is the accepted client, independent of the
// socket it came through; all of a Group's are watched by one more epoll set and
// goroutine (clients_linux.go), for as long as there are any.
package listener
