package main

import (
	"fmt"
	"slices"
	"strings"
)

// A target is what culvert has to reach: value, as it is or in proportion to
// base, times scale, within bound.
type target struct {
	title string
	value result
	base  result  // of the same run; zero: the bound is in value's unit
	than  string  // base in words, or that unit
	scale float64 // what the proportion is multiplied with
	rel   relation
	bound float64
}

// A relation is that of a figure to its bound.
type relation string

const (
	atLeast relation = "≥"
	atMost  relation = "≤"
)

// targets are all there are: culvert over a tap unless a title says otherwise.
var targets = slices.Concat(
	[]target{
		against("pasta-tap", "TCP host→guest, 1 flow", stream("host-to-guest", 1, "Gbit/s"), atLeast, 1.2),
		against("loopback", "TCP host→guest, 1 flow", stream("host-to-guest", 1, "Gbit/s"), atLeast, 0.45),
		against("gvproxy", "TCP host→guest, 1 flow", stream("host-to-guest", 1, "Gbit/s"), atLeast, 20),
		against("loopback", "TCP guest→host, 1 flow", stream("guest-to-host", 1, "Gbit/s"), atLeast, 0.45),
		against("gvproxy", "TCP guest→host, 1 flow", stream("guest-to-host", 1, "Gbit/s"), atLeast, 15),
	},
	flowsTogether("host-to-guest", 8),
	flowsTogether("host-to-guest", 64),
	flowsTogether("guest-to-host", 8),
	flowsTogether("guest-to-host", 64),
	[]target{
		against("pasta-tap", "Processor time, host→guest, 1 flow", stream("host-to-guest", 1, "cpu-s/GB"), atMost, 1),
		against("pasta-tap", "Processor time, guest→host, 1 flow", stream("guest-to-host", 1, "cpu-s/GB"), atMost, 1),
		against("pasta-tap", "Ping-pong of 1 byte, p50", tap("PingPong", "", "p50-µs"), atMost, 1),
		against("pasta-tap", "Ping-pong of 1 byte, p99", tap("PingPong", "", "p99-µs"), atMost, 1.2),
		against("pasta-tap", "Connect, 1 byte, close: 1 client", tap("Connect", "clients=1", "conn/s"), atLeast, 1),
		against("pasta-tap", "Connect, 1 byte, close: 16 clients", tap("Connect", "clients=16", "conn/s"), atLeast, 3),
		against("pasta-tap", "UDP of 1400 bytes at full speed, delivered", tap("UDP", "size=1400 rate=full", "kpkt/s"), atLeast, 1.5),
		against("pasta-tap", "UDP of 1400 bytes at 20 000/s, lost", tap("UDP", "size=1400 rate=20000", "loss-%"), atMost, 1),
		against("pasta-tap", "UDP of 64 bytes at full speed, delivered", tap("UDP", "size=64 rate=full", "kpkt/s"), atLeast, 1.5),
		against("pasta-tap", "UDP of 64 bytes at 20 000/s, lost", tap("UDP", "size=64 rate=20000", "loss-%"), atMost, 1),
		within("Memory of an idle TCP flow, of 50 000", tap("IdleFlow", "flows=50000", "KiB/flow"), 12, "KiB"),
		within("10 000 single ports published, time", tap("Publish", "ports=10000", "publish-ms"), 1000, "ms"),
		within("10 000 single ports published, memory", tap("Publish", "ports=10000", "MB"), 60, "MB"),
		within("10 000 single ports by one command, time", command("publish-ms"), 1000, "ms"),
		within("10 000 single ports by one command, memory", command("MB"), 60, "MB"),
	},
	traced("off", "Tracing off", 0.99),              // 1 % less
	traced("never-read", "A trace never read", 0.9), // 10 % less
	wrapped(60, 1), wrapped(60, 32),
	wrapped(1514, 1), wrapped(1514, 32),
	wrapped(65000, 1), wrapped(65000, 32),
)

// The two ways a VM's TCP flows can be over a tap: gVisor's, and promoted, which is the
// default.
const (
	ownPath      = "path=culvert-tap"
	promotedPath = "path=culvert-tap-promoted"
)

// promoted returns the target for promoted flows, if it is one of culvert over a
// tap: what is culvert's in it is theirs then, and the peer's stays.
func (t target) promoted() (target, bool) {
	if t.value.subject != ownPath {
		return target{}, false
	}
	t.value.subject = promotedPath
	if t.base.subject == ownPath {
		t.base.subject = promotedPath
	}
	return t, true
}

// against demands a proportion to a peer's figure.
func against(peer, title string, value result, rel relation, bound float64) target {
	return target{title, value, value.of("path=" + peer), peer, 1, rel, bound}
}

// within demands at most so many units.
func within(title string, value result, bound float64, unit string) target {
	return target{title: title, value: value, than: unit, scale: 1, rel: atMost, bound: bound}
}

// flowsTogether demands that flows move no less than one does, and none of them
// less than half of its share, sum/flows.
func flowsTogether(dir string, flows int) []target {
	title := fmt.Sprintf("TCP %s, %d flows", arrow(dir), flows)
	sum, slowest := stream(dir, flows, "Gbit/s"), stream(dir, flows, "slowest-Gbit/s")
	return []target{
		{title, sum, stream(dir, 1, "Gbit/s"), "that of 1 flow", 1, atLeast, 1},
		{title + ", the slowest", slowest, sum, "its fair share", float64(flows), atLeast, 0.5},
	}
}

// traced demands a proportion to the same without a tracer.
func traced(mode, title string, bound float64) []target {
	var out []target
	for _, dir := range []string{"host-to-guest", "guest-to-host"} {
		value := result{"Trace", "trace=" + mode, "path=culvert-tap dir=" + dir, "Gbit/s"}
		out = append(out, target{title + ", TCP " + arrow(dir), value, value.of("trace=none"), "untraced", 1, atLeast, bound})
	}
	return out
}

// wrapped demands that a tracer that is off adds at most 1 % to a frame's way over
// memory, which is where it shows most.
func wrapped(size, batch int) []target {
	value := result{"Trace", "trace=off", fmt.Sprintf("path=memory size=%d batch=%d", size, batch), "times-none"}
	return []target{within(fmt.Sprintf("Tracing off, frames of %d bytes over memory, %d at a time", size, batch), value, 1.01, "× untraced")}
}

// tap is a result of culvert over a tap.
func tap(family, params, unit string) result {
	return result{family, ownPath, params, unit}
}

// command is one of BenchmarkPublishCommand's: of a daemon, from end to end.
func command(unit string) result {
	return result{"PublishCommand", "path=culvert", "ports=10000", unit}
}

// stream is one of BenchmarkTCPStream's.
func stream(dir string, flows int, unit string) result {
	return tap("TCPStream", fmt.Sprintf("dir=%s flows=%d", dir, flows), unit)
}

// arrow is a direction for a reader.
func arrow(dir string) string { return strings.Replace(dir, "-to-", "→", 1) }
