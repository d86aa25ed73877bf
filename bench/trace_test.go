package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/stretchr/testify/require"
)

// traceModes are the ways an attachment can be under trace. The first is what the
// others are compared with, in the same run.
var traceModes = []struct {
	name string
	wrap func(testing.TB, datapath.Attachment) datapath.Attachment
}{
	{"none", func(_ testing.TB, att datapath.Attachment) datapath.Attachment { return att }},
	{"off", func(tb testing.TB, att datapath.Attachment) datapath.Attachment {
		return mustTrace(tb, trace.Options{}, att, nil)
	}},
	{"never-read", func(tb testing.TB, att datapath.Attachment) datapath.Attachment {
		return mustTrace(tb, trace.Options{}, att, func(*trace.Reader) {})
	}},
	{"read", func(tb testing.TB, att datapath.Attachment) datapath.Attachment {
		return mustTrace(tb, trace.Options{}, att, func(r *trace.Reader) { _ = r.Stream(context.Background(), io.Discard, nil) })
	}},
	{"flight", func(tb testing.TB, att datapath.Attachment) datapath.Attachment {
		path := tb.TempDir() + "/flight"
		return mustTrace(tb, trace.Options{FlightPath: func(string) string { return path }, FlightFrames: 10_000}, att, nil)
	}},
}

// mustTrace wraps att, with a reader unless read is nil.
func mustTrace(tb testing.TB, o trace.Options, att datapath.Attachment, read func(*trace.Reader)) datapath.Attachment {
	tb.Helper()
	t := trace.New(o)
	var reading sync.WaitGroup
	tb.Cleanup(func() {
		_ = t.Close()
		reading.Wait()
	})
	traced, err := t.Wrap("guest", att)
	require.NoError(tb, err)
	if read != nil {
		r, err := t.Open(trace.ReaderOptions{})
		require.NoError(tb, err)
		reading.Go(func() { read(r) })
	}
	return traced
}

// BenchmarkTrace is what tracing costs. Over memory it is a frame's whole way, one
// copy in and one out, so that what is added shows; times-none is the median of
// many short turns, taken by turns with an attachment that is not wrapped. Over the
// tap it is what a user sees: iperf3 through the whole of culvert.
func BenchmarkTrace(b *testing.B) {
	for _, size := range []int{60, 1514, 65000} {
		for _, batch := range []int{1, 32} {
			for _, m := range traceModes {
				b.Run(fmt.Sprintf("path=memory/size=%d/batch=%d/trace=%s", size, batch, m.name), func(b *testing.B) {
					benchTraceMemory(b, size, batch, m.wrap)
				})
			}
		}
	}
	for _, dir := range []string{"host-to-guest", "guest-to-host"} {
		for _, m := range traceModes {
			b.Run(fmt.Sprintf("path=culvert-tap/dir=%s/trace=%s", dir, m.name), func(b *testing.B) {
				bed := openTapAs(b, func(att datapath.Attachment) datapath.Attachment { return m.wrap(b, att) })
				startIperf(b, bed)
				measureStream(b, bed, dir, 1)
			})
		}
	}
}

// benchTraceMemory has frames pass a wrapped attachment and one that is not, by
// turns.
func benchTraceMemory(b *testing.B, size, batch int, wrap func(testing.TB, datapath.Attachment) datapath.Attachment) {
	const turns = 401
	perTurn := 4096 // some 0.5 ms of small frames
	if size > 10_000 {
		perTurn = 128
	}
	plain := openTurns(b, size, batch, func(_ testing.TB, att datapath.Attachment) datapath.Attachment { return att })
	traced := openTurns(b, size, batch, wrap)
	var took, ratios []float64
	for b.Loop() {
		for range turns {
			without, with := plain(perTurn), traced(perTurn)
			took = append(took, float64(with.Nanoseconds())/float64(perTurn))
			ratios = append(ratios, float64(with)/float64(without))
		}
	}
	slices.Sort(took)
	slices.Sort(ratios)
	b.ReportMetric(took[len(took)/2], "ns/frame")
	b.ReportMetric(ratios[len(ratios)/2], "times-none")
	b.ReportMetric(0, "ns/op")
}

// openTurns opens a pair and returns what has frames pass from our end to the
// guest's, in one goroutine, and says how long they took.
func openTurns(b *testing.B, size, batch int, wrap func(testing.TB, datapath.Attachment) datapath.Attachment) func(frames int) time.Duration {
	ours, guest := memory.Pair(memory.Options{Depth: batch})
	b.Cleanup(func() { _ = guest.Close() })
	att := wrap(b, ours)
	b.Cleanup(func() { _ = att.Close() })
	out, in := make([]datapath.Frame, batch), make([]datapath.Frame, batch)
	frame := make([]byte, size)
	for i := range out {
		out[i] = datapath.Frame{Segs: [][]byte{frame[:54], frame[54:]}, N: size}
	}
	lend := [][]byte{make([]byte, datapath.MaxFrame)}
	get := func(int) [][]byte { return lend }
	to, from := att.QueuePairs()[0], guest.QueuePairs()[0]
	return func(frames int) time.Duration {
		start := time.Now()
		for n := 0; n < frames; n += batch {
			if _, err := to.WriteBatch(out); err != nil {
				b.Fatal(err)
			}
			if _, err := from.ReadBatch(in, get); err != nil {
				b.Fatal(err)
			}
		}
		return time.Since(start)
	}
}
