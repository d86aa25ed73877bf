package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseName(t *testing.T) {
	for name, want := range map[string]result{
		"BenchmarkPingPong/path=culvert-tap-2":                  {family: "PingPong", subject: "path=culvert-tap"},
		"BenchmarkPingPong/path=culvert-tap":                    {family: "PingPong", subject: "path=culvert-tap"}, // GOMAXPROCS=1
		"BenchmarkTCPStream/path=loopback/dir=a/flows=16-16":    {family: "TCPStream", subject: "path=loopback", params: "dir=a flows=16"},
		"BenchmarkUDP/size=64/path=socat-2":                     {family: "UDP", subject: "path=socat", params: "size=64"},
		"BenchmarkTrace/path=memory/size=60/trace=never-read-2": {family: "Trace", subject: "trace=never-read", params: "path=memory size=60"},
		"BenchmarkPingPong/path=socat/load=idle-2":              {family: "PingPong", subject: "path=socat"},
		"BenchmarkHeader-8":                                     {family: "Header"},
		"BenchmarkPublish/ports=9/owners=1-2":                   {family: "Publish", subject: "ports=9 owners=1"},
	} {
		assert.Equal(t, want, parseName(name), name)
	}
}

func TestRead(t *testing.T) {
	key := result{"TCP", "path=tap", "flows=1", "Gbit/s"}
	r := mustRun(t, "x",
		"kernel: 6.1\ncpus: 2\nBenchmarkTCP/path=tap/flows=1-2  \t 1\t 0 ns/op\t 15.0 Gbit/s\t 0.5 cpu-s/GB\nPASS\n",
		"kernel: 6.1\ncpus: 4\nBenchmarkTCP/path=tap/flows=1-2\n--- FAIL: BenchmarkUDP/path=tap-2\n    x_test.go:7: no answer\nleft-out: BenchmarkUDP/path=socat/size=64: no socat: install it\n"+
			"tried-again: BenchmarkTCP/path=pasta-tap/flows=1: 1: stands: still\ntried-again: BenchmarkUDP/path=socat: 1: no: one\n",
		"tried-again: BenchmarkTCP/path=pasta-tap/flows=1: 3: another\n--- FAIL: BenchmarkUDP/path=tap-2\nBenchmarkTCP/path=tap/flows=1-2 1 11.0 Gbit/s\nBenchmarkCopy-2 1000 12 ns/op\n",
	)
	assert.Equal(t, []string{"kernel: 6.1", "cpus: 2", "cpus: 4"}, r.config)
	assert.Equal(t, []absence{{"UDP/path=tap", "failed", 2}, {"UDP/path=socat/size=64", "no socat: install it", 1}}, r.absent)
	assert.Equal(t, []repeat{{"TCP/path=pasta-tap/flows=1", "stands: still", 4, 2}, {"UDP/path=socat", "no: one", 1, 1}}, r.again)
	assert.Equal(t, sample{15, 11}, r.values[key])
	assert.Equal(t, []result{key, {"TCP", "path=tap", "flows=1", "cpu-s/GB"}, {family: "Copy", unit: "ns/op"}}, r.order)

	require.ErrorContains(t, r.read(strings.NewReader("BenchmarkX-2 1 fast Gbit/s\n")), "fast")
	require.ErrorContains(t, r.read(strings.NewReader("tried-again: BenchmarkX: often: why\n")), "often")
}

func TestSample(t *testing.T) {
	for _, c := range []struct {
		of     sample
		median float64
		text   string
	}{
		{sample{7}, 7, "7"},
		{sample{0, 0, 0}, 0, "0"},
		{sample{9, 1, 2}, 2, "2 (1 to 9)"},
		{sample{4, 1, 3, 2}, 2.5, "2.5 (1 to 4)"},
		{sample{999.4, 999.6, 12345.6}, 999.6, "1000 (999 to 12346)"},
		{sample{0.12345, 0.12399}, 0.12372, "0.124 (0.123 to 0.124)"},
	} {
		given := append(sample(nil), c.of...)
		assert.InDelta(t, c.median, c.of.median(), 1e-9)
		assert.Equal(t, c.text, c.of.String())
		assert.Equal(t, given, c.of, "in their order still")
	}
}
