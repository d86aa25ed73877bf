package bench

import (
	"context"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/vhostuser"
	"github.com/stretchr/testify/require"
)

// frameSize is that of the least frame of Ethernet, as DPDK's generator sends it.
const frameSize = 64

// BenchmarkFrames counts frames of 64 bytes a second on one pair of queues whose
// driver costs next to nothing: DPDK's virtio-user, polling on a processor of its
// own. No stack is behind our end, only a reader that counts, or a writer.
func BenchmarkFrames(b *testing.B) {
	testpmd, err := exec.LookPath("dpdk-testpmd")
	datapathtest.Require(b, "dpdk", err == nil, "apt-get install dpdk-dev, or contrib/install-deps.sh bench")
	for _, dir := range []struct {
		name, mode string // testpmd's
		move       func(testing.TB, datapath.QueuePair, time.Time) int
	}{
		{"guest-to-host", "txonly", countFrames},
		{"host-to-guest", "rxonly", writeFrames},
	} {
		for _, mergeable := range []string{"on", "off"} {
			b.Run(fmt.Sprintf("path=culvert-vhost-user/dir=%s/mergeable=%s", dir.name, mergeable), func(b *testing.B) {
				socket := socketPath(b)
				l, err := vhostuser.Listen(socket, vhostuser.Options{})
				require.NoError(b, err)
				defer l.Close()
				startTestpmd(b, testpmd, socket, mergeable, dir.mode)
				ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
				defer cancel()
				att, err := l.Accept(ctx)
				require.NoError(b, err)
				defer att.Close()
				q := att.QueuePairs()[0]
				dir.move(b, q, time.Now().Add(time.Second)) // for testpmd to be under way
				frames, took := 0, time.Duration(0)
				for b.Loop() {
					start := time.Now()
					frames += dir.move(b, q, start.Add(time.Duration(seconds)*time.Second))
					took += time.Since(start)
				}
				b.ReportMetric(float64(frames)/took.Seconds()/1e6, "Mframes/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// countFrames reads frames until end.
func countFrames(tb testing.TB, q datapath.QueuePair, end time.Time) (n int) {
	memory := [][]byte{make([]byte, datapath.MaxFrame)}
	get := func(int) [][]byte { return memory }
	frames := make([]datapath.Frame, 64)
	for time.Now().Before(end) {
		k, err := q.ReadBatch(frames, get)
		require.NoError(tb, err)
		n += k
	}
	return n
}

// writeFrames writes frames until end.
func writeFrames(tb testing.TB, q datapath.QueuePair, end time.Time) (n int) {
	frames := make([]datapath.Frame, 64)
	for i := range frames {
		frames[i] = datapath.Frame{Segs: [][]byte{make([]byte, frameSize)}, N: frameSize}
	}
	for time.Now().Before(end) {
		k, err := q.WriteBatch(frames)
		require.NoError(tb, err)
		n += k
		if k < len(frames) {
			select {
			case <-q.Room():
			case <-time.After(time.Until(end)):
			}
		}
	}
	return n
}

// startTestpmd starts DPDK's test program with a virtio-user port on our socket.
func startTestpmd(tb testing.TB, testpmd, socket, mergeable, mode string) {
	tb.Helper()
	mrg := map[string]string{"on": "1", "off": "0"}[mergeable]
	cmd := exec.Command(testpmd, "--no-huge", "-m", "256", "--no-pci", "-l", "0-1",
		"--vdev", "net_virtio_user0,path="+socket+",queue_size=1024,mrg_rxbuf="+mrg,
		"--", "--auto-start", "--forward-mode="+mode, "--total-num-mbufs=16384", "--txd=1024", "--rxd=1024",
		fmt.Sprintf("--txpkts=%d", frameSize))
	cmd.Env = append(cmd.Environ(), "RUNTIME_DIRECTORY="+tb.TempDir()) // or it leaves files under /run
	_, err := cmd.StdinPipe()                                          // it ends when that does
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
}
