package main

import (
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
)

// A plot is one picture: bars of several results, in groups by path.
type plot struct {
	file, title string
	series      []plotSeries
}

// A plotSeries is one bar of each group: one result of whatever path.
type plotSeries struct {
	name   string
	result result
}

// plots are those of the report, each drawn if a run has its figures.
var plots = []plot{
	{"throughput", "TCP, 1 flow (Gbit/s, more is better)", bothWays("TCPStream", " flows=1", "Gbit/s")},
	{"throughput-64", "TCP, 64 flows together (Gbit/s, more is better)", bothWays("TCPStream", " flows=64", "Gbit/s")},
	{"cpu", "Processor time of the relay, TCP, 1 flow (s/GB, less is better)", bothWays("TCPStream", " flows=1", "cpu-s/GB")},
	{"latency", "Ping-pong of 1 byte (µs, less is better)", []plotSeries{
		{"p50", result{family: "PingPong", unit: "p50-µs"}},
		{"p99", result{family: "PingPong", unit: "p99-µs"}},
	}},
	{"connect", "Connect, 1 byte, close (connections/s, more is better)", []plotSeries{
		{"1 client", result{family: "Connect", params: "clients=1", unit: "conn/s"}},
		{"16 clients", result{family: "Connect", params: "clients=16", unit: "conn/s"}},
	}},
	{"udp", "UDP at full speed, delivered (1000 packets/s, more is better)", []plotSeries{
		{"1400 bytes", result{family: "UDP", params: "size=1400 rate=full", unit: "kpkt/s"}},
		{"64 bytes", result{family: "UDP", params: "size=64 rate=full", unit: "kpkt/s"}},
	}},
	{"vm", "TCP, 1 flow, a VM under emulation (Gbit/s, more is better)", bothWays("VM", "", "Gbit/s")},
}

// bothWays is a result in either direction.
func bothWays(family, params, unit string) []plotSeries {
	return []plotSeries{
		{"host to guest", result{family: family, params: "dir=host-to-guest" + params, unit: unit}},
		{"guest to host", result{family: family, params: "dir=guest-to-host" + params, unit: unit}},
	}
}

// writePlots draws into dir what the runs have figures of, and writes the links.
func writePlots(w io.Writer, dir string, runs []*run) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	heading := "\n## Plots\n\nBars are medians, whiskers reach from the least to the greatest round; one without an end goes on beyond the plot.\n"
	for _, p := range plots {
		c, ok := p.chart(runs)
		if !ok {
			continue
		}
		name := p.file + ".svg"
		if err := os.WriteFile(filepath.Join(dir, name), c.svg(), 0o644); err != nil {
			return err
		}
		fmt.Fprintf(w, "%s\n![%s](%s)\n", heading, c.title, path.Join(filepath.ToSlash(dir), name))
		heading = ""
	}
	return nil
}

// chart fills in the figures of the run that compares most paths, the last of
// those: a sitting of the peers says more than a later one of culvert alone.
func (p plot) chart(runs []*run) (c chart, ok bool) {
	for _, r := range runs {
		if groups := p.groups(r); len(groups) > 0 && len(groups) >= len(c.groups) {
			c = chart{title: p.title, source: fmt.Sprintf("run %s, rounds: %d", r.name, r.rounds), groups: groups}
		}
	}
	for _, s := range p.series {
		c.series = append(c.series, s.name)
	}
	return c, len(c.groups) > 0
}

// groups are the paths of which the run has a figure.
func (p plot) groups(r *run) (groups []group) {
	for _, subject := range distinct(r.order, func(k result) string { return k.subject }) {
		g := group{name: name(subject)}
		has := false
		for _, s := range p.series {
			v := r.values[s.result.of(subject)]
			g.bars = append(g.bars, v)
			has = has || v != nil
		}
		if has {
			groups = append(groups, g)
		}
	}
	return groups
}
