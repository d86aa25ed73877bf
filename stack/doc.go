// Package stack takes a client from a host listener to a guest's socket.
//
// A Forwarder holds the ledger: who asked for which host port, what became of
// it, and the flows that pass. It opens a publish's sockets while its VM is
// there and retires them when the VM goes (ledger.go). The path of one TCP flow, in order:
//
//	listener.Group   accepts the client                      (package listener)
//	Accepted         finds its row, starts its flow          tcp.go, flow.go
//	serveTCP         dials the guest through the VM's stack  tcp.go, dial.go
//	relay.Start      carries both streams                    (package relay)
//	flowTable.end    gives back its place                    flow.go
//
// None of it waits, and none has a goroutine of its own: each step is taken by
// whoever brings the event it needs (package netstack, copy.go). And of a datagram:
//
//	listener.Group   says that a socket is readable
//	Readable         reads datagrams                         udp.go
//	relay.Sessions   finds or opens the client's flow        (package relay)
//	Reply            answers from where the client sent to   udp.go
//
// It is not responsible for what is to be published (package reconcile), nor for
// how frames reach the guest (package netstack, datapath).
package stack
