package main_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// newVhostUser is the VM whose NIC we are. queues is ",queues=N", or nothing for
// one pair of queues.
func newVhostUser(t *testing.T, queues string) *qemuBed {
	t.Helper()
	attach := "vhost-user:" + filepath.Join(shortTempDir(t), "vm.sock") + queues
	return newQEMU(t, attach, attach, "-action", "reboot=reset") // boot.sh's guests end there
}

// testReboot boots the guest anew under the same QEMU: the daemon's ports stay,
// and the guest's new kernel knows the old one's flows no more.
func testReboot(b *qemuBed) func(*testing.T, *env) {
	return func(t *testing.T, e *env) {
		hosts := e.hosts(t)
		c := e.dial(t, portEcho)
		mustEcho(t, c, "before")
		_, err := io.WriteString(b.keyboard, "reboot -f\n")
		require.NoError(t, err)
		require.Eventually(t, func() bool { return strings.Count(b.serial.String(), "guest ready") == 2 },
			time.Minute, 50*time.Millisecond, "the guest does not boot:\n%s", b.serial)
		e.assertBack(t, hosts)
		_, err = io.WriteString(c, "after")
		if err == nil {
			_, err = io.Copy(io.Discard, c)
		}
		require.True(t, isReset(err), "the client saw %v", err)
		require.Empty(t, each(40, 8, e.askLine))
	}
}

// needsEthtool is for tests that run ethtool(8) in the guest.
func (b *qemuBed) needsEthtool(t *testing.T) {
	t.Helper()
	out := b.sh(t, "[ ! -e /bin/ethtool ] || echo it has $((1)) ethtool")
	datapathtest.Require(t, "qemu", strings.Contains(out, "it has 1 ethtool"), "apt-get install ethtool, or contrib/install-deps.sh test")
}

// testOffloads has the guest's owner switch what its NIC is given to do, while a
// flow that was there before lives on.
func testOffloads(b *qemuBed) func(*testing.T, *env) {
	return func(t *testing.T, e *env) {
		b.needsEthtool(t)
		c := e.dial(t, portEcho)
		for _, step := range []struct{ set, want string }{
			{"tso off", "tcp-segmentation-offload: off"},
			{"tso on", "tcp-segmentation-offload: on"},
			{"tx off", "tx-checksumming: off"}, // and what needs it
			{"tx on sg on tso on", "tcp-segmentation-offload: on"},
			{"sg off", "scatter-gather: off"},
			{"sg on tso on gso off", "generic-segmentation-offload: off"},
			{"gso on", "generic-segmentation-offload: on"},
		} {
			t.Run(step.set, func(t *testing.T) {
				b.sh(t, "ethtool -K eth0 "+step.set)
				require.Contains(t, b.sh(t, "ethtool -k eth0"), step.want)
				require.NoError(t, e.fetch(16<<20))
				require.NoError(t, e.send(16<<20))
				testUDPEcho(t, e)
				mustEcho(t, c, step.set)
			})
		}
	}
}

// testChannels has the guest's owner take a pair of queues away and give it back,
// in the middle of transfers: none of them may hang, nor be cut off.
func testChannels(b *qemuBed) func(*testing.T, *env) {
	return func(t *testing.T, e *env) {
		b.needsEthtool(t)
		require.Contains(t, b.sh(t, "ethtool -l eth0 | grep Combined"), "2")
		c := e.dial(t, portEcho)
		for i, n := range []int{1, 2, 1, 2, 1, 2} {
			moving := make(chan []error)
			go func() {
				moving <- each(8, 8, func(i int) error {
					if i%2 == 0 {
						return e.fetch(8 << 20)
					}
					return e.send(8 << 20)
				})
			}()
			b.sh(t, fmt.Sprintf("ethtool -L eth0 combined %d", n))
			require.Empty(t, <-moving, "combined %d", n)
			require.Contains(t, b.sh(t, "ethtool -l eth0 | tail -1"), fmt.Sprint(n))
			require.Empty(t, each(40, 8, e.askLine))
			mustEcho(t, c, fmt.Sprintf("%d: combined %d", i, n))
		}
		testTransfer(t, e)
		testUDPEcho(t, e)
	}
}

// idleFor is how long a VM is watched doing nothing.
const idleFor = 5 * time.Second

// testIdle: a VM that does nothing, with a flow open, costs no processor time. A
// daemon that polled would take all of one, or at a millisecond's interval some
// tenths of a second; what remains is its probe and what the guest's kernel says
// by itself.
func testIdle(t *testing.T, e *env) {
	mustEcho(t, e.dial(t, portEcho), "idle from now on")
	time.Sleep(time.Second) // for what came before to be over
	before := e.d.cpu(t)
	time.Sleep(idleFor)
	used := e.d.cpu(t) - before
	t.Logf("%v in %v", used, idleFor)
	if !raceEnabled {
		assert.LessOrEqual(t, used, idleFor/20)
	}
}

// cpu returns the processor time that the daemon has used, to 10 ms
// (proc_pid_stat(5), fields 14 and 15; USER_HZ is 100).
func (d *daemon) cpu(t *testing.T) (used time.Duration) {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.cmd.Process.Pid))
	require.NoError(t, err)
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:])) // from the third on
	for _, f := range fields[14-3 : 16-3] {
		ticks, err := strconv.Atoi(f)
		require.NoError(t, err)
		used += time.Duration(ticks) * 10 * time.Millisecond
	}
	return used
}
