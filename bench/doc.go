// Package bench measures culvert, whole paths first: a client on the host, a
// published port, the stack, an attachment, a server in the guest.
//
// Run it with
//
//	make bench        # seven rounds, raw output kept in bench/results, BENCHMARKS.md written
//	make bench-peers  # seven rounds of the same work through culvert and what people use in its place
//	make bench-smoke  # each once, as CI does
//
// or pick with go test: go test ./bench -run '^$' -bench 'TCPStream/path=culvert-tap' -benchtime 1x.
// CULVERT_BENCH_SECONDS is how long each measurement of a rate lasts (3), and
// CULVERT_BENCH_PEERS=1 makes it the peers' table: more paths, fewer cells.
//
// # Reading
//
// Names are key=value, so that benchstat can group by any of them. One iteration
// is one run of a client's program over a fixed time, or of a fixed number of
// things; ns/op means nothing there and the reported metrics everything. Every
// table starts with what the rest is compared with, of the same run: the same work
// over kernel loopback with no relay between or, for a VM, by QEMU's own user
// networking. Machines differ and are shared: compare ratios inside one run, by
// medians.
//
//	Gbit/s, slowest-Gbit/s  what the receivers counted, all flows together and the slowest
//	cpu-s/GB, cpu-µs/pkt    processor time of the relay alone, from /proc: this process for
//	                        culvert, a peer's with its children; in steps of 10 ms
//	p50-µs, p99-µs, p99.9-µs  of round trips of one byte
//	conn/s, failed          connections made, used for a byte each way, and closed
//	kpkt/s                  datagrams that arrived when the sender sent all it could
//	loss-%, jitter-µs       of datagrams; at rate=20000, which every path should carry
//	KiB/flow, MB            growth of the relay's resident memory; the kernel's own, such as
//	                        socket buffers and the pipes of who splices, does not count
//
// A line "left-out: NAME: why" stands where a peer is missing, or cannot do what is
// asked of it on this machine, and its cell stays empty; a measurement of a peer's that
// fails is tried again before, up to three times, and "tried-again: NAME: N: why" says
// that it was. A failure of culvert's fails the run.
//
// The guest is a network namespace behind a tap: a real Linux TCP stack at
// native speed. Client, server and relay are separate processes, as in life:
// the daemon's part is this test process itself, or in BenchmarkContainers and
// BenchmarkPublishCommand a daemon. Host and guest of each path are namespaces of
// their own. The guest of BenchmarkVM is a real one under software emulation,
// which costs more than everything on the host. BenchmarkFrames has neither guest
// nor stack: DPDK's driver on one pair of queues.
//
// # Peers
//
// loopback and nft-dnat have no relay, docker-proxy, socat and pasta-splice join two
// sockets of the kernel: what they show is what a namespace costs, and none of them
// reaches a VM. pasta-tap, slirp4netns and gvproxy do what culvert does, to a guest
// behind a link of Ethernet. Each runs as its makers advise: pasta and slirp4netns
// with an MTU of 65520, gvproxy with its own 1500 and its own forwarder in the guest,
// whose time does not count; gvproxy-65500 shows what it could do.
package bench
