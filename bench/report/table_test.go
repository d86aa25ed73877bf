package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// tables renders the run's tables alone.
func tables(r *run) string {
	var out strings.Builder
	r.write(&out)
	_, rest, _ := strings.Cut(out.String(), "\n### ")
	return "\n### " + rest
}

func TestTables(t *testing.T) {
	for _, c := range []struct {
		name   string
		rounds []string
		want   string
	}{
		{"medians, spread and what rounds lack", []string{
			"BenchmarkTCP/path=loopback/flows=1-2 1 30 Gbit/s\nBenchmarkTCP/path=tap/flows=1-2 1 15 Gbit/s\n",
			"BenchmarkTCP/path=loopback/flows=1-2 1 20 Gbit/s\nBenchmarkTCP/path=tap/flows=1-2 1 11 Gbit/s\n",
			"BenchmarkTCP/path=loopback/flows=1-2 1 40 Gbit/s\n",
		}, `
### TCP, Gbit/s

| | flows=1 |
|---|---|
| loopback | 30 (20 to 40) |
| tap | 13 (11 to 15) of 2 rounds ×0.433 |
`},
		{"units are columns of a narrow table, and cells may be empty", []string{
			"BenchmarkPing/path=loopback-2 1 20 p50-µs\nBenchmarkPing/path=tap-2 1 50 p50-µs 90 p99-µs\n",
		}, `
### Ping

| | p50-µs | p99-µs |
|---|---|---|
| loopback | 20 | – |
| tap | 50 ×2.5 | 90 |
`},
		{"a wide one is split, by all params but the last and by unit; 4 < 16", []string{
			"BenchmarkTCP/path=tap/dir=a/flows=16-2 1 3 Gbit/s 4 MB 5 s\nBenchmarkTCP/path=tap/dir=a/flows=4-2 1 1 Gbit/s 2 MB\n" +
				"BenchmarkTCP/path=tap/dir=a/flows=64-2 1 5 Gbit/s 6 MB\nBenchmarkTCP/path=tap/dir=b/flows=4-2 1 7 Gbit/s\n",
		}, `
### TCP dir=a, Gbit/s

| | flows=4 | flows=16 | flows=64 |
|---|---|---|---|
| tap | 1 | 3 | 5 |

### TCP dir=a, MB

| | flows=4 | flows=16 | flows=64 |
|---|---|---|---|
| tap | 2 | 4 | 6 |

### TCP dir=a, s

| | flows=16 |
|---|---|
| tap | 5 |

### TCP dir=b, Gbit/s

| | flows=4 |
|---|---|
| tap | 7 |
`},
		{"ours against references; no ratios of proportions or to nothing", []string{
			"BenchmarkUDP/path=loopback-2 1 100 kpkt/s 1 loss-% 0 failed\nBenchmarkUDP/path=pasta-tap-2 1 20 kpkt/s 2 loss-% 1 failed\n" +
				"BenchmarkUDP/path=culvert-tap-2 1 50 kpkt/s 0 loss-% 2 failed\nBenchmarkUDP/path=culvert-tap-promoted-2 1 60 kpkt/s 0 loss-% 3 failed\n",
		}, `
### UDP

| | kpkt/s | loss-% | failed |
|---|---|---|---|
| loopback | 100 | 1 | 0 |
| pasta-tap | 20 ×0.2 | 2 | 1 |
| **culvert-tap** | 50 ×0.5 | 0 | 2 |
| **culvert-tap-promoted** | 60 ×0.6 | 0 | 3 |
| *culvert-tap ÷ pasta-tap* | ×2.5 | – | ×2 |
| *culvert-tap-promoted ÷ pasta-tap* | ×3 | – | ×3 |
`},
		{"without subjects params are rows", []string{
			"BenchmarkPublish/ports=9/owners=1-2 1 10 ms 1 MB\nBenchmarkPublish/ports=9/owners=9-2 1 30 ms 2 MB\n",
		}, `
### Publish

| | ms | MB |
|---|---|---|
| ports=9 owners=1 | 10 | 1 |
| ports=9 owners=9 | 30 | 2 |
`},
		{"traces are rows, compared with none", []string{
			"BenchmarkTrace/path=culvert-tap/trace=none-2 1 10 Gbit/s\nBenchmarkTrace/path=culvert-tap/trace=off-2 1 9 Gbit/s\n",
		}, `
### Trace, Gbit/s

| | path=culvert-tap |
|---|---|
| none | 10 |
| off | 9 ×0.9 |
`},
	} {
		t.Run(c.name, func(t *testing.T) { assert.Equal(t, c.want, tables(mustRun(t, "x", c.rounds...))) })
	}
}

func TestNatural(t *testing.T) {
	assert.Equal(t, []string{"to n=2", "to n=10", "to n=10a", "fro n=1", "fro n=3", ""},
		natural([]string{"to n=10", "to n=2", "to n=10a", "fro n=3", "fro n=1", ""}))
}

func TestMissing(t *testing.T) {
	var out strings.Builder
	mustRun(t, "x", "--- FAIL: BenchmarkB-2\n", "--- FAIL: BenchmarkB-2\nleft-out: BenchmarkA: no "+strings.Repeat("µ", 300)+"\n").write(&out)
	assert.Contains(t, out.String(), "\n- B (2×): failed\n- A (1×): no "+strings.Repeat("µ", 197)+"…\n")
	assert.NotContains(t, out.String(), "tried again")
}

func TestTriedAgain(t *testing.T) {
	var out strings.Builder
	mustRun(t, "x", "tried-again: BenchmarkA: 2: stands still\n", "tried-again: BenchmarkA: 1: other\n", "BenchmarkA-2 1 1 Gbit/s\n").write(&out)
	assert.Contains(t, out.String(), "\nFailed and tried again, as only a peer is:\n\n- A (3×, in 2 of 3 rounds): stands still\n\n")
}
