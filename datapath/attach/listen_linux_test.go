package attach

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/socketfile"
)

// patience bounds what should happen at once.
const patience = 10 * time.Second

// A logBuffer is where a test's log goes.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func mustListen(t *testing.T, spec string, o Options) Listener {
	t.Helper()
	s, err := ParseSpec(spec)
	require.NoError(t, err)
	l, err := Listen(s, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, l.Close())
		assert.NoError(t, l.Close(), "closing again")
	})
	return l
}

func mustAccept(t *testing.T, l Listener) datapath.Attachment {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a, err := l.Accept(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, a.Close()) })
	return a
}

// accept calls Accept in the background.
func accept(ctx context.Context, l Listener) <-chan error {
	done := make(chan error, 1)
	go func() {
		a, err := l.Accept(ctx)
		if err == nil {
			err = a.Close()
		}
		done <- err
	}()
	return done
}

func lend(int) [][]byte { return [][]byte{make([]byte, 64), make([]byte, datapath.MaxFrame)} }

func frame(n int, seq uint32) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	binary.BigEndian.PutUint32(b[n-4:], seq)
	return b
}

// mustRead reads n frames, and ends the attachment if they do not come.
func mustRead(t *testing.T, a datapath.Attachment, n int) (all [][]byte) {
	t.Helper()
	defer time.AfterFunc(patience, func() { _ = a.Close() }).Stop()
	frames := make([]datapath.Frame, 8)
	for len(all) < n {
		k, err := a.QueuePairs()[0].ReadBatch(frames, lend)
		require.NoError(t, err)
		for _, f := range frames[:k] {
			all = append(all, bytes.Join(f.Segs, nil)[:f.N])
		}
	}
	return all
}

func write(a datapath.Attachment, frames ...[]byte) error {
	for _, b := range frames {
		for {
			n, err := a.QueuePairs()[0].WriteBatch([]datapath.Frame{{Segs: [][]byte{b}, N: len(b)}})
			if err != nil {
				return err
			}
			if n == 1 {
				break
			}
			<-a.QueuePairs()[0].Room()
		}
	}
	return nil
}

func TestEverySocketListener(t *testing.T) {
	dir := t.TempDir()
	for name, spec := range map[string]string{
		"qemu unix":      "qemu:unix:" + filepath.Join(dir, "q"),
		"qemu tcp":       "qemu:tcp:127.0.0.1:" + freePort(t),
		"qemu unix dial": "qemu:unix:" + filepath.Join(dir, "nothing") + ",dial",
		"qemu tcp dial":  "qemu:tcp:127.0.0.1:" + freePort(t) + ",dial",
		"unixgram":       "unixgram:" + filepath.Join(dir, "g"),
		"vhost-user":     "vhost-user:" + filepath.Join(dir, "v") + ",queues=2",
		"tap":            "tap:culvert0,netns=" + filepath.Join(dir, "nothing"),
		"memory":         "memory",
	} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			l := mustListen(t, spec, Options{Memory: func(ctx context.Context) (datapath.Attachment, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}})
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, <-accept(ctx, l), context.DeadlineExceeded)
			waiting := accept(context.Background(), l)
			require.NoError(t, l.Close())
			require.ErrorIs(t, <-waiting, datapath.ErrClosed)
			require.ErrorIs(t, <-accept(context.Background(), l), datapath.ErrClosed)
		})
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Empty(t, left)
}

// freePort returns a TCP port of 127.0.0.1 that was free just now. It lies below
// those that the kernel gives to clients, of which one could take it meanwhile.
func freePort(t *testing.T) string {
	t.Helper()
	for range 100 {
		port := fmt.Sprint(10_000 + rand.IntN(20_000))
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
	require.FailNow(t, "no port is free")
	return ""
}

// TestFB122SocketPath: a file that a dead daemon left is replaced; a live one's
// socket is not stolen, whatever kind either is, and the error names it.
func TestFB122SocketPath(t *testing.T) {
	datapathtest.Leaks(t)
	path := filepath.Join(t.TempDir(), "vm.sock")
	specs := []string{"qemu:unix:" + path, "unixgram:" + path, "vhost-user:" + path}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	stale.SetUnlinkOnClose(false)
	require.NoError(t, stale.Close())
	require.FileExists(t, path)
	for _, s := range specs {
		l := mustListen(t, s, Options{})
		for _, other := range specs {
			spec, err := ParseSpec(other)
			require.NoError(t, err)
			second, err := Listen(spec, Options{})
			require.ErrorIs(t, err, socketfile.ErrInUse)
			assert.ErrorContains(t, err, path)
			assert.Nil(t, second)
		}
		require.FileExists(t, path)
		require.NoError(t, l.Close())
		require.NoFileExists(t, path)
	}
}

// TestFB116TwoStarts: of two daemons started at once exactly one gets the path.
func TestFB116TwoStarts(t *testing.T) {
	datapathtest.Leaks(t)
	spec, err := ParseSpec("qemu:unix:" + filepath.Join(t.TempDir(), "vm.sock"))
	require.NoError(t, err)
	for range 50 {
		got := make(chan Listener, 4)
		for range cap(got) {
			go func() {
				l, err := Listen(spec, Options{})
				if err != nil {
					assert.ErrorIs(t, err, socketfile.ErrInUse)
				}
				got <- l
			}()
		}
		var won []Listener
		for range cap(got) {
			if l := <-got; l != nil {
				won = append(won, l)
			}
		}
		require.Len(t, won, 1)
		require.NoError(t, won[0].Close())
	}
}

func TestListenRefuses(t *testing.T) {
	for spec, want := range map[string]error{
		"packet:eth0":               datapath.ErrUnsupported,
		"memory":                    nil,
		"qemu:unix:/nonexistent/s":  os.ErrNotExist,
		"unixgram:/nonexistent/s":   os.ErrNotExist,
		"vhost-user:/nonexistent/s": os.ErrNotExist,
		"qemu:tcp:192.0.2.1:5000":   unix.EADDRNOTAVAIL,
	} {
		t.Run(spec, func(t *testing.T) {
			datapathtest.Leaks(t)
			s, err := ParseSpec(spec)
			require.NoError(t, err)
			l, err := Listen(s, Options{})
			require.ErrorContains(t, err, "attach "+spec)
			assert.Nil(t, l)
			if want != nil {
				assert.ErrorIs(t, err, want)
			}
		})
	}
	_, err := Listen(Spec{}, Options{})
	assert.ErrorContains(t, err, "unknown transport")
}

func TestMemory(t *testing.T) {
	datapathtest.Leaks(t)
	guests := make(chan datapath.Attachment, 1)
	broken := errors.New("out of order")
	fail := false
	l := mustListen(t, "memory", Options{Memory: func(context.Context) (datapath.Attachment, error) {
		if fail {
			return nil, broken
		}
		ours, guest := memory.Pair(memory.Options{})
		guests <- guest
		return ours, nil
	}})
	a, guest := mustAccept(t, l), <-guests
	require.NoError(t, write(a, frame(60, 1)))
	assert.Equal(t, [][]byte{frame(60, 1)}, mustRead(t, guest, 1))
	require.NoError(t, guest.Close())
	fail = true
	assert.ErrorIs(t, <-accept(t.Context(), l), broken)
}

// TestTapWaitsForItsNamespace: no error while the namespace does not exist; the
// wait is said once; then the tap is there, and again after each end.
func TestTapWaitsForItsNamespace(t *testing.T) {
	_, err := os.Stat("/dev/net/tun")
	datapathtest.Require(t, "tun", err == nil, "load the driver with `modprobe tun`")
	datapathtest.Leaks(t)
	ns := datapathtest.NewNetNS(t)
	path := filepath.Join(t.TempDir(), "ns")
	var log logBuffer
	l := mustListen(t, "tap:culvert0,netns="+path, Options{MTU: 9000, Log: slog.New(slog.NewTextHandler(&log, nil))})

	accepted := make(chan datapath.Attachment)
	go func() {
		a, err := l.Accept(t.Context())
		assert.NoError(t, err)
		accepted <- a
	}()
	select {
	case <-accepted:
		require.Fail(t, "there is no namespace")
	case <-time.After(3 * retryEvery):
	}
	assert.Equal(t, 1, strings.Count(log.String(), "waiting for the transport"), log.String())
	require.NoError(t, os.Symlink(ns.Path(), path))
	a := <-accepted
	assert.Equal(t, "culvert0", a.Info().Name)
	require.NoError(t, ns.Do(func() error {
		nic, err := net.InterfaceByName("culvert0")
		if err == nil && nic.MTU != 9000 {
			err = fmt.Errorf("MTU is %d", nic.MTU)
		}
		return err
	}))
	require.NoError(t, a.Close())
	require.NoError(t, mustAccept(t, l).Close())
}

// TestTapSaysWhatIsWrongAtOnce: what waiting does not mend is returned.
func TestTapSaysWhatIsWrongAtOnce(t *testing.T) {
	_, err := os.Stat("/dev/net/tun")
	datapathtest.Require(t, "tun", err == nil, "load the driver with `modprobe tun`")
	notANamespace := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(notANamespace, nil, 0o600))
	l := mustListen(t, "tap:culvert0,netns="+notANamespace, Options{})
	_, err = l.Accept(t.Context())
	require.ErrorContains(t, err, notANamespace)
}

// TestRealQEMU joins both socket transports by a hub inside a real QEMU, without
// a guest:
//
//	qemu:unix:…  ══ -netdev stream ── hub 0 ── -netdev dgram ══  unixgram:…
//
// What one attachment writes the other reads, in QEMU's own framing. In the
// second half QEMU listens and is dialled; it is killed and started again under
// the same listeners.
func TestRealQEMU(t *testing.T) {
	qemu, err := exec.LookPath("qemu-system-x86_64")
	datapathtest.Require(t, "qemu", err == nil, "apt-get install qemu-system-x86")
	for _, server := range []string{"off", "on"} {
		t.Run("server="+server, func(t *testing.T) {
			datapathtest.Leaks(t)
			dir := t.TempDir()
			stream, dgram, own := filepath.Join(dir, "stream"), filepath.Join(dir, "dgram"), filepath.Join(dir, "qemu")
			streamSpec := "qemu:unix:" + stream
			if server == "on" {
				streamSpec += ",dial"
			}
			sl, dl := mustListen(t, streamSpec, Options{}), mustListen(t, "unixgram:"+dgram, Options{})
			for range 2 {
				cmd := exec.Command(qemu, "-machine", "none", "-nodefaults", "-display", "none",
					"-netdev", "stream,id=s,server="+server+",addr.type=unix,addr.path="+stream,
					"-netdev", "dgram,id=d,local.type=unix,local.path="+own+",remote.type=unix,remote.path="+dgram,
					"-netdev", "hubport,id=h0,hubid=0,netdev=s", "-netdev", "hubport,id=h1,hubid=0,netdev=d")
				var said logBuffer
				cmd.Stdout, cmd.Stderr = &said, &said
				require.NoError(t, cmd.Start())
				defer func() { _ = cmd.Process.Kill() }()
				s := mustAccept(t, sl)
				// A datagram attachment begins with what QEMU sends it.
				first := frame(60, 0)
				require.NoError(t, write(s, first))
				d := mustAccept(t, dl)
				require.Equal(t, [][]byte{first}, mustRead(t, d, 1))

				for _, dir := range []struct{ from, to datapath.Attachment }{{s, d}, {d, s}} {
					var want [][]byte
					for i, n := range []int{14, 60, 64, 65, 1514, 9014, 65534, 65550, 100} {
						want = append(want, frame(n, uint32(i)))
					}
					wrote := make(chan error, 1)
					go func() { wrote <- write(dir.from, want...) }()
					require.Equal(t, want, mustRead(t, dir.to, len(want)), said.String())
					require.NoError(t, <-wrote)
				}
				assert.Empty(t, s.Stats().AllDrops())
				assert.Empty(t, d.Stats().AllDrops())

				require.NoError(t, cmd.Process.Kill())
				_ = cmd.Wait() // killed
				_, err := s.QueuePairs()[0].ReadBatch(make([]datapath.Frame, 1), lend)
				require.ErrorIs(t, err, datapath.ErrPeerGone)
				require.ErrorIs(t, write(d, frame(60, 0)), datapath.ErrPeerGone)
				require.NoError(t, s.Close())
				require.NoError(t, d.Close())
				_ = os.Remove(own) // QEMU's own, which it does not replace
			}
		})
	}
}
