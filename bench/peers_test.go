package bench

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

// peerPaths are what people use in place of culvert. Those over veth have no VM to
// reach, only a namespace; the others end, as culvert does, at a link of Ethernet.
var peerPaths = []path{
	{"nft-dnat", true, openDNAT},
	{"docker-proxy", true, openDockerProxy},
	{"socat", true, openSocat},
	{"pasta-splice", true, openPastaSplice},
	{"pasta-tap", true, openPastaTap},
	{"slirp4netns", true, openSlirp4netns},
	{"gvproxy", true, openGvproxy},
}

// gvproxyHuge is gvproxy with an MTU like those that pasta and slirp4netns have. It is
// faster so, and its makers advise nothing of the kind.
var gvproxyHuge = path{"gvproxy-65500", true, func(tb testing.TB) *bed { return openGvproxyAt(tb, 65_500) }}

// openVeth is the two namespaces that a veth pair joins, with no relay yet.
func openVeth(tb testing.TB) *bed {
	tb.Helper()
	b := &bed{
		host: datapathtest.NewNetNS(tb), guest: datapathtest.NewNetNS(tb),
		server: node, serverPort: guestPort, client: "127.0.0.1", port: publishedPort,
	}
	to, err := os.Open(b.guest.Path())
	require.NoError(tb, err)
	defer to.Close()
	require.NoError(tb, b.host.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "veth0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(to.Fd())),
		})
	}))
	setUp(tb, b.host, "veth0", gateway)
	setUp(tb, b.guest, "eth0", node+"/24")
	return b
}

// openDNAT is a published port of Docker's without docker-proxy.
//
//	client ── nftables ── veth ── server
func openDNAT(tb testing.TB) *bed {
	b := openVeth(tb)
	b.client, _, _ = strings.Cut(gateway, "/")
	rules := new(strings.Builder)
	fmt.Fprint(rules, "table ip nat {\nchain output {\ntype nat hook output priority -100\n")
	for _, proto := range []string{"tcp", "udp"} {
		fmt.Fprintf(rules, "ip daddr %s %s dport %d dnat to %s\n", b.client, proto, b.port, b.inGuest())
	}
	fmt.Fprint(rules, "}\n}\n")
	cmd := exec.Command(find(tb, "nft"), "-f", "-")
	cmd.Stdin = strings.NewReader(rules.String())
	said := new(console)
	cmd.Stdout, cmd.Stderr = said, said
	require.NoError(tb, b.host.Do(cmd.Start))
	if err := cmd.Wait(); err != nil {
		leaveOut(tb, fmt.Sprintf("nft: %v: %s", err, said))
	}
	return b
}

// openDockerProxy is a published port of Docker's as seen from its host.
//
//	client ── lo ── docker-proxy ── veth ── server
func openDockerProxy(tb testing.TB) *bed {
	b := openVeth(tb)
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	require.NoError(tb, err)
	defer null.Close()
	for _, proto := range []string{"tcp", "udp"} {
		cmd := exec.Command(find(tb, "docker-proxy"), "-proto", proto, "-host-ip", b.client, "-host-port", fmt.Sprint(b.port),
			"-container-ip", b.server, "-container-port", fmt.Sprint(guestPort))
		cmd.ExtraFiles = []*os.File{null} // where it tells dockerd that it runs
		b.start(tb, cmd)
	}
	b.await(tb)
	return b
}

// openSocat is a relay of ten words.
//
//	client ── lo ── socat ── veth ── server
func openSocat(tb testing.TB) *bed {
	b := openVeth(tb)
	for _, proto := range []string{"TCP4", "UDP4"} {
		b.start(tb, exec.Command(find(tb, "socat"), "-b", "262144",
			fmt.Sprintf("%s-LISTEN:%d,bind=%s,fork,reuseaddr", proto, b.port, b.client), proto+":"+b.inGuest()))
	}
	b.await(tb)
	b.single = "is one process a connection"
	return b
}

// find returns where a program is.
func find(tb testing.TB, name string) string {
	tb.Helper()
	path, err := look(name)
	if err != nil {
		leaveOut(tb, fmt.Sprintf("%v; contrib/install-deps.sh bench installs it", err))
	}
	return path
}

// look looks for a program among the system's and in the cache.
func look(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	cache := os.Getenv("CULVERT_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		cache = filepath.Join(user, "culvert")
	}
	if path, inCache := exec.LookPath(filepath.Join(cache, "bin", name)); inCache == nil {
		return path, nil
	}
	return "", err
}

// start starts a process of the bed's relay on its host. What it says is shown if
// the benchmark fails.
func (b *bed) start(tb testing.TB, cmd *exec.Cmd) {
	tb.Helper()
	startProgram(tb, b.host, cmd)
	b.relay = append(b.relay, cmd.Process.Pid)
}

// startProgram starts one in ns that ends with the benchmark, and so do those that
// it starts.
func startProgram(tb testing.TB, ns *datapathtest.NetNS, cmd *exec.Cmd) {
	tb.Helper()
	said := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = said, said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(tb, ns.Do(cmd.Start))
	tb.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait() // killed
		if tb.Failed() {
			tb.Logf("%s: %s", cmd, said)
		}
	})
}

// await waits until the bed's relay has both its ports.
func (b *bed) await(tb testing.TB) {
	tb.Helper()
	awaitBound(tb, b.host, "tcp", b.port)
	awaitBound(tb, b.host, "udp", b.port)
}

// peerVersions describes the peers in benchstat's form of configuration lines.
// Debian's tell less of themselves than their packages do.
func peerVersions() []string {
	var lines []string
	for _, pkg := range []string{"nftables", "docker.io", "socat", "passt", "slirp4netns"} {
		out, err := exec.Command("dpkg-query", "-W", "-f", "${Version}", pkg).Output()
		if err == nil && len(out) > 0 {
			lines = append(lines, pkg+": "+string(out))
		}
	}
	if path, err := look("gvproxy"); err == nil {
		if out, err := exec.Command(path, "-version").Output(); err == nil {
			lines = append(lines, "gvproxy: "+strings.TrimPrefix(strings.TrimSpace(string(out)), "gvproxy version "))
		}
	}
	return lines
}

// addrPort is net.JoinHostPort for a port in number.
func addrPort(addr string, port int) string { return net.JoinHostPort(addr, fmt.Sprint(port)) }

// awaitSocket waits until a program listens on a socket.
func awaitSocket(tb testing.TB, path string) {
	tb.Helper()
	require.Eventually(tb, func() bool {
		c, err := net.Dial("unix", path)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, 10*time.Second, 10*time.Millisecond, "nobody listens on %s", path)
}
