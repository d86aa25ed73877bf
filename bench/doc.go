// Package bench measures culvert, whole paths first: a client on the host, a
// published port, the stack, an attachment, a server in the guest.
//
// Run it with
//
//	make bench        # seven rounds, raw output kept in bench/results, BENCHMARKS.md written
//	make bench-smoke  # each once, as CI does
//
// or pick with go test: go test ./bench -run '^$' -bench 'TCPStream/path=culvert-tap' -benchtime 1x
//
// # Reading
//
// Names are key=value, so that benchstat can group by any of them. One iteration
// is one run of a peer program (iperf3) over a fixed time, or of a fixed number
// of requests; ns/op means nothing there and the reported metrics everything.
// Every table starts with what the rest is compared with, of the same run: the
// same work over kernel loopback with no relay between or, for a VM, by QEMU's own
// user networking. Machines differ and are shared: compare ratios inside one run,
// by medians.
//
// The guest is a network namespace behind a tap: a real Linux TCP stack at
// native speed. Client, server and daemon are separate processes, as in life:
// the daemon's part is this test process itself. The guest of BenchmarkVM is a
// real one under software emulation, which costs more than everything on the host.
// BenchmarkFrames has neither guest nor stack: DPDK's driver on one pair of queues.
package bench
