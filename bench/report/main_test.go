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
	require.NoError(t, r.read(strings.NewReader("BenchmarkVM/path=qemu-user/dir=a-2 1 1.0 Gbit/s\n"+
		"BenchmarkVM/path=culvert-vhost-user/dir=a-2 1 6.0 Gbit/s\nBenchmarkVM/path=culvert-stream/dir=a-2 1 2.0 Gbit/s\n")))
	var out strings.Builder
	r.write(&out)
	assert.Contains(t, out.String(), "- cpus: 2\n")
	assert.Contains(t, out.String(), "| flows=1 | 30 (20 to 40) | 12 (11 to 15) ×0.40 |")
	assert.Contains(t, out.String(), "| | qemu-user | culvert-stream | culvert-vhost-user |")
	assert.Contains(t, out.String(), "| dir=a | 1 (1 to 1) | 2 (2 to 2) ×2.00 qemu-user | 6 (6 to 6) ×6.00 qemu-user ×3.00 culvert-stream |")
	assert.NotContains(t, out.String(), "ns/op")
}
