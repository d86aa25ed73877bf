package daemon

import (
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/stretchr/testify/require"
)

// BenchmarkPublish publishes 10 000 single ports of a whole daemon through its API,
// lists them and takes them back, all in one request or each in one of its own. It
// reports
//
//	ms           until the last row is here
//	list-ms      what a listing of all rows takes
//	withdraw-ms  until all ports are free
//	MB           what publishing adds to the resident memory, garbage and the
//	             client's included
func BenchmarkPublish(b *testing.B) {
	const ports = 10_000
	texts := make([]string, ports)
	for i := range texts { // an address of loopback that nobody else binds
		texts[i] = fmt.Sprintf("127.18.0.1:%d:%d", 10_000+i, 10_000+i)
	}
	for _, each := range []int{ports, 1} {
		b.Run(fmt.Sprintf("ports=%d/requests=%d", ports, ports/each), func(b *testing.B) {
			bed := start(b, "vms: [{name: a, attach: memory}]\n")
			bed.attach(b, "a")
			var opening, listing, closing time.Duration
			var grown int
			for b.Loop() {
				debug.FreeOSMemory()
				before, begin := resident(b), time.Now()
				for some := range slices.Chunk(texts, each) {
					rows, err := bed.client.Publish(b.Context(), api.PublishRequest{Publish: some})
					require.NoError(b, err)
					require.Len(b, rows, each)
					require.Equal(b, "forwarded", rows[0].State, rows[0].Detail)
				}
				opening += time.Since(begin)
				grown += resident(b) - before

				begin = time.Now()
				rows, err := bed.client.Listeners(b.Context(), "")
				listing += time.Since(begin)
				require.NoError(b, err)
				require.Len(b, rows, ports)
				require.False(b, slices.ContainsFunc(rows, func(l api.Listener) bool { return l.State != "forwarded" }))

				begin = time.Now()
				for some := range slices.Chunk(texts, each) {
					rows, err := bed.client.Unpublish(b.Context(), api.PublishRequest{Publish: some})
					require.NoError(b, err)
					require.Len(b, rows, each)
				}
				closing += time.Since(begin)
			}
			perRun := func(d time.Duration) float64 { return d.Seconds() * 1e3 / float64(b.N) }
			b.ReportMetric(perRun(opening), "ms")
			b.ReportMetric(perRun(listing), "list-ms")
			b.ReportMetric(perRun(closing), "withdraw-ms")
			b.ReportMetric(float64(grown)/1e6/float64(b.N), "MB")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// resident is the process's resident memory in bytes: the second number of
// proc_pid_statm(5), in pages.
func resident(tb testing.TB) int {
	tb.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	require.NoError(tb, err)
	var size, pages int
	_, err = fmt.Sscan(string(text), &size, &pages)
	require.NoError(tb, err)
	return pages * os.Getpagesize()
}
