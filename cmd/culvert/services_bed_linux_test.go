package main_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/guesttest"
)

// A serviceBed is a guest with a real API server on the node's port 6443, and
// beside it a way to the same that can be cut, on port 6444. Servers are this
// process's own, with sockets in the guest's namespace.
//
//	host ── daemon ══ tap's file side │ csvcPID 10.0.2.2/24 ── kube-apiserver, etcd, servers
//	                                  │ svc0    10.99.0.1/24 ── 10.99.0.2, another host's servers
type serviceBed struct {
	ns, behind *datapathtest.NetNS // behind the node, which routes
	ifname     string
	kube       *guesttest.Kube
	admin      *http.Client
	way        *apiWay
}

const (
	nodeAddr    = "10.0.2.2"
	cardAddr    = "10.99.0.1" // the node's on its other card
	foreignAddr = "10.99.0.2" // reached by the node
	apiPort     = 6444        // of the way that can be cut
)

func newServiceBed(t *testing.T) *serviceBed {
	t.Helper()
	_, err := exec.LookPath("ip")
	datapathtest.Require(t, "netns", err == nil, "apt-get install iproute2, or contrib/install-deps.sh test")
	datapathtest.Require(t, "netns", os.Geteuid() == 0, "run as root")
	_, err = os.Stat("/dev/net/tun")
	datapathtest.Require(t, "tun", err == nil, "modprobe tun")
	b := &serviceBed{ns: datapathtest.NewNetNS(t), behind: datapathtest.NewNetNS(t), ifname: fmt.Sprintf("csvc%d", os.Getpid())}
	inNetNS(t, b.ns, "ip", "link", "add", "svc0", "type", "veth", "peer", "name", "eth0", "netns", b.behind.Path())
	inNetNS(t, b.ns, "ip", "addr", "add", cardAddr+"/24", "dev", "svc0")
	inNetNS(t, b.ns, "ip", "link", "set", "svc0", "up")
	inNetNS(t, b.ns, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
	inNetNS(t, b.behind, "ip", "addr", "add", foreignAddr+"/24", "dev", "eth0")
	inNetNS(t, b.behind, "ip", "link", "set", "eth0", "up")
	inNetNS(t, b.behind, "ip", "route", "add", "default", "via", cardAddr)

	b.kube = guesttest.NewKube(t, guesttest.KubeOptions{NS: b.ns, Addrs: []net.IP{net.ParseIP(nodeAddr)}})
	b.admin = b.client(t, b.kube.Kubeconfig(guesttest.KubeAdmin, ""))
	b.way = newAPIWay(t, b)
	return b
}

func (b *serviceBed) spec() string { return "tap:" + b.ifname + ",netns=" + b.ns.Path() }

// boot sets the interface up, once the daemon has put it there.
func (b *serviceBed) boot(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return nsenter(b.ns, "ip", "link", "show", b.ifname) == nil },
		20*time.Second, 20*time.Millisecond, "the daemon puts no %s into the namespace", b.ifname)
	inNetNS(t, b.ns, "ip", "addr", "add", nodePrefix, "dev", b.ifname)
	inNetNS(t, b.ns, "ip", "link", "set", b.ifname, "up")
	inNetNS(t, b.ns, "ip", "route", "add", "default", "via", gateway)
}

// unplug deletes the interface alone; API server and servers live on.
func (b *serviceBed) unplug(t *testing.T) {
	t.Helper()
	inNetNS(t, b.ns, "ip", "link", "del", b.ifname)
}

func inNetNS(t *testing.T, ns *datapathtest.NetNS, args ...string) {
	t.Helper()
	require.NoError(t, nsenter(ns, args...))
}

func nsenter(ns *datapathtest.NetNS, args ...string) error {
	out, err := exec.Command("nsenter", append([]string{"--net=" + ns.Path()}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// client is one of the API server's, with a kubeconfig's credentials.
func (b *serviceBed) client(t *testing.T, kubeconfig string) *http.Client {
	t.Helper()
	conf, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	conf.Dial = b.kube.DialContext
	c, err := rest.HTTPClientFor(conf)
	require.NoError(t, err)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// api asks the API server as its admin. It may be called by any goroutine.
func (b *serviceBed) api(method, path string, body any) (answer []byte, err error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequest(method, "https://127.0.0.1:6443"+path, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := b.admin.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	return answer, err
}

// etcd asks etcd, whose gateway takes JSON.
func (b *serviceBed) etcd(t *testing.T, path string, body, answer any) {
	t.Helper()
	text, err := json.Marshal(body)
	require.NoError(t, err)
	client := &http.Client{Transport: &http.Transport{DialContext: b.kube.DialContext, DisableKeepAlives: true}}
	resp, err := client.Post("http://127.0.0.1:2379/v3"+path, "application/json", bytes.NewReader(text))
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode, path)
	require.NoError(t, json.NewDecoder(resp.Body).Decode(answer))
}

// An apiWay is a way to the API server that can be cut.
type apiWay struct {
	listener net.Listener
	mu       sync.Mutex
	open     map[net.Conn]struct{}
	wg       sync.WaitGroup
}

func newAPIWay(t *testing.T, b *serviceBed) *apiWay {
	t.Helper()
	w := &apiWay{open: make(map[net.Conn]struct{})}
	require.NoError(t, b.ns.Do(func() (err error) {
		w.listener, err = net.Listen("tcp", fmt.Sprintf(":%d", apiPort))
		return err
	}))
	w.wg.Go(func() {
		for {
			c, err := w.listener.Accept()
			if err != nil {
				return
			}
			w.wg.Go(func() { w.join(c, b.kube.DialContext) })
		}
	})
	t.Cleanup(func() {
		_ = w.listener.Close()
		w.cut()
		w.wg.Wait()
	})
	return w
}

func (w *apiWay) join(client net.Conn, dial func(context.Context, string, string) (net.Conn, error)) {
	defer client.Close()
	server, err := dial(context.Background(), "tcp", "127.0.0.1:6443")
	if err != nil {
		return
	}
	defer server.Close()
	w.mu.Lock()
	w.open[client] = struct{}{}
	w.mu.Unlock()
	w.wg.Go(func() {
		_, _ = io.Copy(server, client)
		_ = server.Close()
	})
	_, _ = io.Copy(client, server)
	w.mu.Lock()
	delete(w.open, client)
	w.mu.Unlock()
}

// cut resets every connection, and returns how many there were.
func (w *apiWay) cut() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.open {
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}
	return len(w.open)
}

// A server is one of the cluster's, TCP and UDP: it echoes, but answers "who\n"
// with its name.
type server struct {
	name string
	tcp  net.Listener
	udp  net.PacketConn
	mu   sync.Mutex
	open map[net.Conn]struct{}
	wg   sync.WaitGroup
}

// serve starts a server in a namespace, until the test ends or close is called.
func serve(t *testing.T, ns *datapathtest.NetNS, name, addr string, port int) *server {
	t.Helper()
	s := &server{name: name + "\n", open: make(map[net.Conn]struct{})}
	at := net.JoinHostPort(addr, fmt.Sprint(port))
	require.NoError(t, ns.Do(func() (err error) {
		if s.tcp, err = net.Listen("tcp4", at); err == nil {
			s.udp, err = net.ListenPacket("udp4", at)
		}
		return err
	}))
	s.wg.Go(s.accept)
	s.wg.Go(s.packets)
	t.Cleanup(s.close)
	return s
}

// serve starts a server of the node's.
func (b *serviceBed) serve(t *testing.T, name string, port int) *server {
	t.Helper()
	return serve(t, b.ns, name, nodeAddr, port)
}

func (s *server) accept() {
	for {
		c, err := s.tcp.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.open[c] = struct{}{}
		s.mu.Unlock()
		s.wg.Go(func() {
			defer func() {
				_ = c.Close()
				s.mu.Lock()
				delete(s.open, c)
				s.mu.Unlock()
			}()
			buf := make([]byte, 4096)
			for {
				n, err := c.Read(buf)
				if err != nil {
					return
				}
				if _, err := c.Write(s.answer(buf[:n])); err != nil {
					return
				}
			}
		})
	}
}

func (s *server) packets() {
	buf := make([]byte, 4096)
	for {
		n, from, err := s.udp.ReadFrom(buf)
		if err != nil {
			return
		}
		_, _ = s.udp.WriteTo(s.answer(buf[:n]), from)
	}
}

func (s *server) answer(to []byte) []byte {
	if string(to) == "who\n" {
		return []byte(s.name)
	}
	return to
}

// close ends the server. Closing one that has ended does nothing.
func (s *server) close() {
	_ = s.tcp.Close()
	_ = s.udp.Close()
	s.mu.Lock()
	for c := range s.open {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// who asks the server behind a host port for its name.
func who(network, addr string) (string, error) {
	c, err := net.DialTimeout(network, addr, 5*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	patience := 5 * time.Second
	if network == "udp" {
		patience = 200 * time.Millisecond // what was lost is not sent again
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, "who\n"); err != nil {
		return "", err
	}
	name, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSuffix(name, "\n"), err
}

// reaches complains unless the host port leads to the server of that name, over
// both of the host's loopback addresses.
func reaches(network string, port int, name string) func() error {
	return func() error {
		for _, host := range []string{"127.0.0.1", "::1"} {
			got, err := who(network, net.JoinHostPort(host, fmt.Sprint(port)))
			if err != nil {
				return err
			}
			if got != name {
				return fmt.Errorf("%s port %d leads to %q, not to %q", network, port, got, name)
			}
		}
		return nil
	}
}

// replaceFile puts text where from is read, at once and whole.
func replaceFile(t *testing.T, path string, text []byte) {
	t.Helper()
	next := filepath.Join(filepath.Dir(path), "next")
	require.NoError(t, os.WriteFile(next, text, 0o600))
	require.NoError(t, os.Rename(next, path))
}
