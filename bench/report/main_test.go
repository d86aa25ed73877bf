package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// mustRun is a run of these rounds.
func mustRun(t *testing.T, name string, rounds ...string) *run {
	t.Helper()
	r := newRun(name, len(rounds))
	for _, round := range rounds {
		require.NoError(t, r.read(strings.NewReader(round)))
	}
	return r
}

func TestReport(t *testing.T) {
	dir, plots := filepath.Join(t.TempDir(), "Day-1"), filepath.Join(t.TempDir(), "new", "plots")
	require.NoError(t, os.Mkdir(dir, 0o755))
	for name, text := range map[string]string{
		"round-1.txt": "cpus: 2\nBenchmarkTCPStream/path=loopback/dir=host-to-guest/flows=1-2 1 20 Gbit/s\n" +
			"BenchmarkTCPStream/path=culvert-tap/dir=host-to-guest/flows=1-2 1 8 Gbit/s\n" +
			"BenchmarkTCPStream/path=culvert-tap-promoted/dir=host-to-guest/flows=1-2 1 7 Gbit/s\n",
		"round-2.txt": "cpus: 2\nBenchmarkTCPStream/path=loopback/dir=host-to-guest/flows=1-2 1 20 Gbit/s\n" +
			"BenchmarkTCPStream/path=culvert-tap/dir=host-to-guest/flows=1-2 1 12 Gbit/s\n",
		"notes.md": "It copies *twice*.\n\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	var out strings.Builder
	require.NoError(t, report(&out, plots, []string{dir}))
	for _, want := range []string{
		"| TCP host→guest, 1 flow | ≥ 0.45 × loopback | ×0.35: 7 against 20 Gbit/s | **not met** | ×0.5: 10 against 20 Gbit/s | met | [Day-1](#run-day-1) |\n",
		"\n\nIt copies *twice*.\n\n",
		"](" + filepath.ToSlash(plots) + "/throughput.svg)\n",
		"## Run Day-1\n\nrounds: 2 · cpus: 2\n",
		"| **culvert-tap** | 10 (8 to 12) ×0.5 |\n",
		"| **culvert-tap-promoted** | 7 of 1 rounds ×0.35 |\n",
	} {
		assert.Contains(t, out.String(), want)
	}
	assert.FileExists(t, filepath.Join(plots, "throughput.svg"))
	assert.NoFileExists(t, filepath.Join(plots, "latency.svg"), "of nothing measured")

	require.ErrorContains(t, report(&out, plots, []string{t.TempDir()}), "no rounds")
}

// TestResults renders what has been measured, which later runs stand beside.
func TestResults(t *testing.T) {
	rounds, err := filepath.Glob("../results/*/round-1.txt")
	require.NoError(t, err)
	require.NotEmpty(t, rounds)
	for _, round := range rounds {
		dir := filepath.Dir(round)
		var out strings.Builder
		require.NoError(t, report(&out, t.TempDir(), []string{dir}), dir)
		raw, err := os.ReadFile(round)
		require.NoError(t, err)
		for line := range strings.Lines(string(raw)) {
			if fields := strings.Fields(line); len(fields) > 3 && strings.HasPrefix(line, "Benchmark") {
				assert.Contains(t, out.String(), "\n### "+parseName(fields[0]).family, dir)
			}
		}
		assert.NotContains(t, out.String(), "NaN", dir)
	}
}
