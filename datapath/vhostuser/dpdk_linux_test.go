package vhostuser

import (
	"bytes"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// mustTestpmd starts DPDK's test program with a virtio-user port on our socket:
// a front-end and a driver that polls, and so never wants to be called.
func mustTestpmd(t *testing.T, path, mergeable, mode string) *logBuffer {
	t.Helper()
	testpmd, err := exec.LookPath("dpdk-testpmd")
	datapathtest.Require(t, "dpdk", err == nil, "apt-get install dpdk-dev")
	said := &logBuffer{}
	cmd := exec.Command(testpmd, "--no-huge", "-m", "256", "--no-pci", "-l", "0-1",
		"--vdev", "net_virtio_user0,path="+path+",queue_size=1024,mrg_rxbuf="+mergeable,
		"--", "--auto-start", "--forward-mode="+mode, "--total-num-mbufs=16384", "--txd=1024", "--rxd=1024")
	cmd.Stdout, cmd.Stderr = said, said
	cmd.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+t.TempDir()) // or it leaves files under /run
	stdin, err := cmd.StdinPipe()                                    // it ends when that does
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	return said
}

// TestDPDK: another front-end and another driver than QEMU and Linux. Frames of
// all lengths come back as they were sent, but for their addresses.
func TestDPDK(t *testing.T) {
	for _, mergeable := range []string{"1", "0"} {
		t.Run("mergeable "+mergeable, func(t *testing.T) {
			datapathtest.Leaks(t)
			l := mustListen(t, Options{})
			said := mustTestpmd(t, l.path, mergeable, "macswap")
			a := mustAccept(t, l)
			// What comes before it forwards it throws away: ask until one is back, and
			// tell those that ask from the rest by their length.
			back := make(chan []byte)
			go func() {
				defer close(back)
				frames := make([]datapath.Frame, 8)
				for {
					n, err := a.QueuePairs()[0].ReadBatch(frames, lend)
					if err != nil {
						return
					}
					for _, f := range frames[:n] {
						back <- f.Segs[0][:f.N]
					}
				}
			}()
			next := func(within time.Duration) []byte {
				select {
				case b := <-back:
					return b
				case <-time.After(within):
					return nil
				}
			}
			const asking = 60
			for deadline := time.Now().Add(patience); next(20*time.Millisecond) == nil; {
				require.True(t, time.Now().Before(deadline), said.String())
				_, err := write(a, frame(asking, 0))
				require.NoError(t, err)
			}
			for n := asking + 1; n <= 1514; n += 7 {
				sent := frame(n, uint32(n))
				copy(sent, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5})
				require.NoError(t, writeAll(a, sent))
				got := next(patience)
				for len(got) == asking {
					got = next(patience)
				}
				want := bytes.Join([][]byte{sent[6:12], sent[:6], sent[12:]}, nil)
				require.True(t, bytes.Equal(want, got), "%d bytes came back as %d\n%v", n, len(got), said)
			}
			require.NoError(t, a.Close())
			for range back { // until the reader has left
			}
		})
	}
}

// TestDPDKFlood: a driver that sends as fast as it can. The rate is logged, not
// judged.
func TestDPDKFlood(t *testing.T) {
	datapathtest.Leaks(t)
	l := mustListen(t, Options{})
	mustTestpmd(t, l.path, "1", "txonly")
	a := mustAccept(t, l)
	memory := [][]byte{make([]byte, 2048)}
	frames := make([]datapath.Frame, 64)
	const enough = 1_000_000
	start, n := time.Now(), 0
	for n < enough {
		k, err := a.QueuePairs()[0].ReadBatch(frames, func(int) [][]byte { return memory })
		require.NoError(t, err)
		for _, f := range frames[:k] {
			if f.N != 64 {
				require.Equal(t, 64, f.N)
			}
		}
		n += k
	}
	t.Logf("%.1f million frames of 64 bytes a second", float64(n)/time.Since(start).Seconds()/1e6)
	require.Empty(t, a.Stats().AllDrops())
}
