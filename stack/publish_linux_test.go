package stack

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// BenchmarkPublish publishes 10 000 single ports, each on both loopback
// addresses, and withdraws them: as one owner's, and each as an owner's of its
// own. Where the process may not have the descriptors it is as many as there are
// descriptors for. It reports
//
//	ms           from the request until all are forwarded
//	withdraw-ms  from the request until all ports are free
//	rows-ms      what a listing of the ledger takes
//	MB           what publishing adds to the resident memory, garbage included
func BenchmarkPublish(b *testing.B) {
	for _, protos := range [][]listener.Proto{{listener.TCP}, {listener.TCP, listener.UDP}} {
		ports := min(10_000, (descriptors(b)-100)/(2*len(protos)))
		for _, owners := range []int{1, ports} {
			b.Run(fmt.Sprintf("ports=%d/protocols=%d/owners=%d", ports, len(protos), owners), func(b *testing.B) {
				benchmarkPublish(b, ports, protos, owners)
			})
		}
	}
}

func benchmarkPublish(b *testing.B, ports int, protos []listener.Proto, owners int) {
	ns := datapathtest.NewNetNS(b) // where every port is free
	wants := make([][]listener.Spec, owners)
	for i := range ports {
		for _, p := range protos {
			wants[i%owners] = append(wants[i%owners], listener.Spec{
				Proto: p, Host: netip.AddrPortFrom(netip.Addr{}, uint16(10_000+i)), Ports: 1,
				Target: listener.Target{VM: "default", Addr: netip.AddrPortFrom(netip.Addr{}, uint16(10_000+i))},
			})
		}
	}
	var opening, closing, listing time.Duration
	var grown int
	for b.Loop() {
		f, err := New(Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		require.NoError(b, err)
		f.AttachVM("default", VM{Guest: newHostGuest(), Node: node})
		debug.FreeOSMemory()
		before, start := resident(b), time.Now()
		require.NoError(b, ns.Do(func() error {
			for i, specs := range wants {
				f.Publish(ctx, owner(fmt.Sprint(i)), specs)
			}
			return nil
		}))
		opening += time.Since(start)
		grown += resident(b) - before

		start = time.Now()
		rows := f.Rows()
		listing += time.Since(start)
		require.Len(b, rows, ports*len(protos))
		for _, r := range rows {
			require.Equal(b, listener.Forwarded, r.Outcome.State, r.Outcome.Detail)
		}
		start = time.Now()
		for i := range wants {
			f.Withdraw(ctx, owner(fmt.Sprint(i)))
		}
		closing += time.Since(start)
		require.Empty(b, f.Rows())
		f.Shutdown(ctx)
	}
	perRun := func(d time.Duration) float64 { return d.Seconds() * 1e3 / float64(b.N) }
	b.ReportMetric(perRun(opening), "ms")
	b.ReportMetric(perRun(closing), "withdraw-ms")
	b.ReportMetric(perRun(listing), "rows-ms")
	b.ReportMetric(float64(grown)/1e6/float64(b.N), "MB")
	b.ReportMetric(0, "ns/op")
}

// descriptors raises the limit of descriptors as far as it goes, and returns it.
func descriptors(tb testing.TB) int {
	tb.Helper()
	var l syscall.Rlimit
	require.NoError(tb, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l))
	l.Cur = l.Max
	require.NoError(tb, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l))
	return int(min(l.Cur, 1<<20))
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

// A single port on both loopback addresses costs less than two kilobytes of
// heap, whoever's it is: 10 000 of them less than 20 MB.
func TestHeapOfSinglePorts(t *testing.T) {
	const ports, most = 500, 2000
	ns := datapathtest.NewNetNS(t)
	f, _ := mustAttached(t, Options{})
	specs := make([]listener.Spec, ports)
	for i := range specs {
		specs[i] = mustSpec(t, fmt.Sprintf("%d:80", 10_000+i))
	}
	for name, owners := range map[string][][]listener.Spec{
		"one owner":     {specs},
		"an owner each": slices.Collect(slices.Chunk(specs, 1)),
	} {
		t.Run(name, func(t *testing.T) {
			before := heap()
			require.NoError(t, ns.Do(func() error {
				for i, specs := range owners {
					f.Publish(ctx, owner(fmt.Sprint(i)), specs)
				}
				return nil
			}))
			each := (heap() - before) / ports
			require.Len(t, f.Rows(), ports)
			for _, r := range f.Rows() {
				require.Len(t, r.Outcome.Bound, 2, r.Outcome.Detail)
			}
			assert.Less(t, each, most)
			for i := range owners {
				f.Withdraw(ctx, owner(fmt.Sprint(i)))
			}
		})
	}
}

// heap is what lives on the heap, in bytes.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}
