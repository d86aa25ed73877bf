package vhostuser

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// bootPatience is how long an emulated guest may take to do anything.
const bootPatience = 90 * time.Second

// A machine is a real QEMU as front-end, with a real Linux in it that runs a
// shell on its console.
type machine struct {
	cmd     *exec.Cmd
	console io.WriteCloser
	said    *logBuffer
	qmp     net.Conn
	answers *bufio.Reader
	words   int // said so far by the guest
}

// guestDir builds the test guest, or finds it built.
func guestDir(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a run without -short: it boots emulated VMs, which takes minutes")
	}
	_, err := exec.LookPath("qemu-system-x86_64")
	datapathtest.Require(t, "qemu", err == nil, "apt-get install qemu-system-x86")
	out, err := exec.Command("../../contrib/guest/build.sh").Output()
	datapathtest.Require(t, "qemu", err == nil, "contrib/install-deps.sh test, and contrib/guest/build.sh, which says what is missing")
	return strings.TrimSpace(string(out))
}

// mustBoot starts a machine whose NIC is ours. device adds to the properties of
// the NIC, netdev to those of its back-end.
func mustBoot(t *testing.T, dir, path, device, netdev string) *machine {
	t.Helper()
	qmp := filepath.Join(t.TempDir(), "qmp")
	m := &machine{said: &logBuffer{}}
	// vectors=0: QEMU 7.2 dereferences what only KVM makes when a vhost-user NIC
	// uses MSI-X under emulation.
	m.cmd = exec.Command("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "256",
		"-nodefaults", "-display", "none", "-serial", "stdio", "-qmp", "unix:"+qmp+",server=on,wait=off",
		"-kernel", filepath.Join(dir, "vmlinuz"), "-initrd", filepath.Join(dir, "initrd.gz"),
		"-append", "console=ttyS0 quiet panic=-1 rdinit=/bin/busybox -- sh",
		"-object", "memory-backend-memfd,id=m,size=256M,share=on", "-numa", "node,memdev=m",
		"-chardev", "socket,id=c,path="+path+",reconnect=1", "-netdev", "vhost-user,id=n0,chardev=c"+netdev,
		"-device", "virtio-net-pci,netdev=n0,vectors=0"+device)
	m.cmd.Stdout, m.cmd.Stderr = m.said, m.said
	var err error
	m.console, err = m.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, m.cmd.Start())
	t.Cleanup(func() {
		if m.qmp != nil {
			_ = m.qmp.Close()
		}
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait() // killed
	})
	require.Eventually(t, func() bool {
		m.qmp, err = net.Dial("unix", qmp)
		return err == nil
	}, bootPatience, 20*time.Millisecond, "%v", m.said)
	m.answers = bufio.NewReader(m.qmp)
	m.do(t, "qmp_capabilities")
	return m
}

// do executes a QMP command.
func (m *machine) do(t *testing.T, command string) {
	t.Helper()
	require.NoError(t, json.NewEncoder(m.qmp).Encode(map[string]string{"execute": command}))
	require.NoError(t, m.qmp.SetReadDeadline(time.Now().Add(bootPatience)))
	for {
		line, err := m.answers.ReadString('\n')
		require.NoError(t, err, m.said.String())
		require.NotContains(t, line, `"error"`)
		if strings.Contains(line, `"return"`) {
			return
		}
	}
}

// shell runs a command in the guest. The word that says that it is done is put
// together by the guest, so that its echo is not taken for it.
func (m *machine) shell(t *testing.T, command string) {
	t.Helper()
	m.words++
	want := fmt.Sprintf("done-%d-0", m.words)
	_, err := fmt.Fprintf(m.console, "%s; echo done-%d-$?\n", command, m.words)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return strings.Contains(m.said.String(), want) },
		bootPatience, 20*time.Millisecond, "%s\n%v", command, m.said)
}

// up brings the guest's NIC up after a boot.
func (m *machine) up(t *testing.T) {
	t.Helper()
	m.words++
	prompt := fmt.Sprintf("shell-%d", m.words)
	require.Eventually(t, func() bool { // the console of a kernel that boots swallows what is typed
		_, err := fmt.Fprintf(m.console, "echo shell-$((%d))\n", m.words)
		return err == nil && strings.Contains(m.said.String(), prompt)
	}, bootPatience, 500*time.Millisecond, "%v", m.said)
	m.shell(t, "/bin/busybox --install -s /bin; mount -t proc p /proc; mount -t sysfs s /sys; for ko in /modules/*.ko; do insmod $ko; done; "+
		addresses)
}

const addresses = "ip link set eth0 up && ip addr add 198.18.0.2/24 dev eth0"

// A pinger is the other station on the guest's link.
type pinger struct {
	a     datapath.Attachment
	ended chan error
	done  sync.WaitGroup

	mu    sync.Mutex
	guest []byte // its address
	got   map[uint16]int
}

var (
	ourMAC = []byte{2, 0, 0, 0, 0, 1}
	ourIP  = []byte{198, 18, 0, 1}
	itsIP  = []byte{198, 18, 0, 2}
)

func newPinger(t *testing.T, a datapath.Attachment) *pinger {
	p := &pinger{a: a, got: make(map[uint16]int), ended: make(chan error, len(a.QueuePairs()))}
	for _, qp := range a.QueuePairs() {
		p.done.Go(func() { p.ended <- p.run(qp) })
	}
	t.Cleanup(func() {
		assert.NoError(t, a.Close())
		p.done.Wait()
	})
	return p
}

func (p *pinger) run(qp datapath.QueuePair) error {
	frames := make([]datapath.Frame, 32)
	for {
		n, err := qp.ReadBatch(frames, lend)
		if err != nil {
			return err
		}
		for _, f := range frames[:n] {
			p.take(bytes.Join(f.Segs, nil)[:f.N])
		}
	}
}

// take learns the guest's address and notes the answers to our pings. A checksum
// may be partial: it is not looked at.
func (p *pinger) take(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch etherType := binary.BigEndian.Uint16(b[12:]); {
	case etherType == 0x0806 && len(b) >= 42 && bytes.Equal(b[28:32], itsIP):
		p.guest = bytes.Clone(b[22:28])
	case etherType == 0x0800 && len(b) >= 42 && b[23] == 1 && b[34] == 0: // an ICMP echo reply
		p.got[binary.BigEndian.Uint16(b[40:])] = len(b)
	}
}

func (p *pinger) mac() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.guest
}

func (p *pinger) write(pair int, b []byte) error {
	_, err := p.a.QueuePairs()[pair].WriteBatch([]datapath.Frame{{Segs: [][]byte{b}, N: len(b)}})
	return err
}

// mustPing pings until there was an answer to each length, through each pair.
func (p *pinger) mustPing(t *testing.T, m *machine) {
	t.Helper()
	p.mu.Lock()
	p.guest = nil
	p.mu.Unlock()
	who := bytes.Join([][]byte{bytes.Repeat([]byte{0xff}, 6), ourMAC, {8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, ourMAC, ourIP, make([]byte, 6), itsIP}, nil)
	require.Eventually(t, func() bool { return p.write(0, who) != nil || p.mac() != nil },
		bootPatience, 20*time.Millisecond, "%v", m.said)
	answer := bytes.Join([][]byte{p.mac(), ourMAC, {8, 6, 0, 1, 8, 0, 6, 4, 0, 2}, ourMAC, ourIP, p.mac(), itsIP}, nil)
	seq := uint16(0)
	for pair := range p.a.QueuePairs() {
		for _, n := range []int{60, 61, 590, 1514} {
			seq++
			p.mu.Lock()
			delete(p.got, seq)
			p.mu.Unlock()
			ping := echo(p.mac(), seq, n)
			require.Eventually(t, func() bool {
				if p.write(0, answer) != nil || p.write(pair, ping) != nil {
					return true
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				return p.got[seq] == n
			}, bootPatience, 20*time.Millisecond, "%d bytes through pair %d\n%v", n, pair, m.said)
			require.NoError(t, p.write(0, answer))
		}
	}
}

// echo returns an ICMP echo request of n bytes.
func echo(to []byte, seq uint16, n int) []byte {
	b := make([]byte, n)
	copy(b, to)
	copy(b[6:], ourMAC)
	binary.BigEndian.PutUint16(b[12:], 0x0800)
	ip := b[14:]
	ip[0], ip[8], ip[9] = 0x45, 64, 1
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
	copy(ip[12:], ourIP)
	copy(ip[16:], itsIP)
	binary.BigEndian.PutUint16(ip[10:], onesComplement(ip[:20]))
	icmp := ip[20:]
	icmp[0] = 8
	binary.BigEndian.PutUint16(icmp[6:], seq)
	binary.BigEndian.PutUint16(icmp[2:], onesComplement(icmp))
	return b
}

// onesComplement is the internet checksum (RFC 1071).
func onesComplement(b []byte) uint16 {
	sum := uint32(0)
	for i, v := range b {
		if i%2 == 0 {
			sum += uint32(v) << 8
		} else {
			sum += uint32(v)
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// TestQEMULife: a real front-end and a real driver, through what a VM lives
// through. One attachment serves all of it.
func TestQEMULife(t *testing.T) {
	dir := guestDir(t)
	datapathtest.Leaks(t)
	log := &logBuffer{}
	l := mustListen(t, Options{Log: log.logger()})
	m := mustBoot(t, dir, l.path, "", "")
	m.up(t)
	p := newPinger(t, mustAccept(t, l))
	p.mustPing(t, m)

	m.shell(t, "echo virtio0 >/sys/bus/virtio/drivers/virtio_net/unbind")
	m.shell(t, "echo virtio0 >/sys/bus/virtio/drivers/virtio_net/bind; sleep 0.5; "+addresses)
	p.mustPing(t, m)

	m.shell(t, "ip link set eth0 down; ip link set eth0 mtu 9000; ip link set eth0 up")
	p.mustPing(t, m)

	m.do(t, "stop")
	m.do(t, "cont")
	p.mustPing(t, m)

	for range 2 {
		m.do(t, "system_reset")
		m.up(t)
		p.mustPing(t, m)
	}
	assert.Empty(t, p.ended)
	assert.Empty(t, log.String(), "nothing to say about a front-end that is as it should be")

	// A back-end that was away (FB-133): the front-end comes back, and the driver
	// notices nothing.
	require.NoError(t, p.a.Close())
	require.NoError(t, l.Close())
	time.Sleep(time.Second)
	l, err := Listen(l.path, Options{Log: log.logger()})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	p = newPinger(t, mustAccept(t, l))
	p.mustPing(t, m)

	// Killed, and another one started: the next life.
	require.NoError(t, m.cmd.Process.Kill())
	require.ErrorIs(t, <-p.ended, datapath.ErrPeerGone)
	require.NoError(t, p.a.Close())
	m = mustBoot(t, dir, l.path, "", "")
	m.up(t)
	newPinger(t, mustAccept(t, l)).mustPing(t, m)
}

// TestQEMUFeatures: what a VM's owner can refuse, and two pairs of queues.
func TestQEMUFeatures(t *testing.T) {
	dir := guestDir(t)
	for name, test := range map[string]struct {
		device, netdev string
		to, from       []string
		pairs          int
	}{
		"two pairs":        {",mq=on", ",queues=2", []string{"csum", "tso4", "tso6", "ecn"}, []string{"csum", "tso4", "tso6", "ecn"}, 2},
		"no offloads":      {",csum=off,guest_csum=off", "", []string{}, []string{}, 1},
		"no TSO4":          {",guest_tso4=off,host_tso4=off,guest_ecn=off,host_ecn=off", "", []string{"csum", "tso6"}, []string{"csum", "tso6"}, 1},
		"no MRG_RXBUF":     {",mrg_rxbuf=off", "", []string{"csum", "tso4", "tso6", "ecn"}, []string{"csum", "tso4", "tso6", "ecn"}, 1},
		"plain rings":      {",event_idx=off,indirect_desc=off,mrg_rxbuf=off,guest_tso4=off,guest_tso6=off,guest_ecn=off", "", []string{"csum"}, []string{"csum", "tso4", "tso6", "ecn"}, 1},
		"legacy":           {",disable-modern=on,disable-legacy=off", "", []string{"csum", "tso4", "tso6", "ecn"}, []string{"csum", "tso4", "tso6", "ecn"}, 1},
		"jumbo by QEMU":    {",host_mtu=9000,rx_queue_size=1024,tx_queue_size=1024", "", []string{"csum", "tso4", "tso6", "ecn"}, []string{"csum", "tso4", "tso6", "ecn"}, 1},
		"one of two pairs": {"", "", []string{"csum", "tso4", "tso6", "ecn"}, []string{"csum", "tso4", "tso6", "ecn"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			datapathtest.Leaks(t)
			l := mustListen(t, Options{Queues: 2})
			m := mustBoot(t, dir, l.path, test.device, test.netdev)
			m.up(t)
			a := mustAccept(t, l)
			assert.Equal(t, test.to, a.Info().ToGuest.Names())
			assert.Equal(t, test.from, a.Info().FromGuest.Names())
			assert.Len(t, a.QueuePairs(), test.pairs)
			newPinger(t, a).mustPing(t, m)
		})
	}
}
