package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestReport(t *testing.T) {
	r := &run{name: "x", rounds: 3, values: make(map[result][]float64)}
	for _, round := range []string{
		"cpus: 2\nBenchmarkTCP/path=loopback/flows=1-2  1  0 ns/op  30.0 Gbit/s\nBenchmarkTCP/path=tap/flows=1-2  1  15.0 Gbit/s\n",
		"cpus: 2\nBenchmarkTCP/path=loopback/flows=1-2  1  20.0 Gbit/s\nBenchmarkTCP/path=tap/flows=1-2  1  11.0 Gbit/s\nPASS\n",
		"BenchmarkTCP/path=loopback/flows=1-2  1  40.0 Gbit/s\nBenchmarkTCP/path=tap/flows=1-2  1  12.0 Gbit/s\n",
	} {
		require.NoError(t, r.read(strings.NewReader(round)))
	}
	var out strings.Builder
	r.write(&out)
	assert.Contains(t, out.String(), "- cpus: 2\n")
	assert.Contains(t, out.String(), "| flows=1 | 30 (20 to 40) | 12 (11 to 15) ×0.40 |")
	assert.NotContains(t, out.String(), "ns/op")
}
