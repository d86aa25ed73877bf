package guesttest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	corev1 "k8s.io/api/core/v1"
)

// The bed is etcd and kube-apiserver in the guest's network namespace, and
// nothing else: no controller, no kubelet, no load balancer. What those would
// do to a Service, its test does: SetIngress is servicelb.
//
// Both are started by one thread, which lives inside the namespace for as long
// as the bed. They die with it (PR_SET_PDEATHSIG), so also when the test's
// process is killed.

// Users of a Kube's API server, by what they may do.
const (
	KubeAdmin  = "admin"  // everything
	KubeViewer = "viewer" // list and watch Services everywhere: what the product needs
	KubeLister = "lister" // list Services, but not watch them
	KubeNobody = "nobody" // nothing
)

// KubeOptions say where an API server runs. The zero value is one by itself.
type KubeOptions struct {
	// NS is the guest's network namespace; a new one if nil. The ports 2379, 2380
	// and 6443 are taken in it, the last on all its addresses.
	NS *datapathtest.NetNS
	// Addrs are addresses beside loopback that the certificate is for.
	Addrs []net.IP
	// Args are further arguments for kube-apiserver.
	Args []string
}

// A Kube is a real API server that runs in a network namespace. Its methods are
// called from the test's goroutine, DialContext from any; they fail the test.
type Kube struct {
	tb    testing.TB
	o     KubeOptions
	bin   string // directory of the programs
	dir   string
	certs *Certs
	ca    []byte // PEM
	http  *http.Client
	start chan func() // for the thread
	done  chan error

	etcd, server *exec.Cmd // nil while they do not run
}

// NewKube starts an API server, and returns when it answers. The test's end ends
// it. Without root or the programs the test is skipped (Require "kube").
func NewKube(tb testing.TB, o KubeOptions) *Kube {
	tb.Helper()
	datapathtest.Require(tb, "kube", os.Geteuid() == 0, "run as root")
	bin, err := builtKube()
	datapathtest.Require(tb, "kube", err == nil, fmt.Sprint(err))
	if o.NS == nil {
		o.NS = datapathtest.NewNetNS(tb)
	}
	k := &Kube{tb: tb, o: o, bin: bin, dir: tb.TempDir(), start: make(chan func()), done: make(chan error, 1)}
	go func() {
		k.done <- o.NS.Do(func() error {
			for start := range k.start {
				start()
			}
			return nil
		})
	}()
	tb.Cleanup(k.remove)
	k.writeFiles()
	k.Start()
	return k
}

// builtKube is where contrib/kube/build.sh has put its programs.
func builtKube() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir != "/" {
		script := filepath.Join(dir, "contrib/kube/build.sh")
		if _, err := os.Stat(script); err == nil {
			var stderr bytes.Buffer
			cmd := exec.Command(script, "-n")
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				return "", errors.New(strings.TrimSpace(stderr.String()))
			}
			return strings.TrimSpace(string(out)), nil
		}
		dir = filepath.Dir(dir)
	}
	return "", errors.New("contrib/kube/build.sh is in no directory above")
}

// writeFiles writes what the API server reads: certificates, and tokens, which
// are the users' names.
func (k *Kube) writeFiles() {
	k.tb.Helper()
	k.certs = NewCerts(k.tb, false, time.Now().Add(24*time.Hour), append([]net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}, k.o.Addrs...)...)
	var err error
	if k.ca, err = os.ReadFile(k.certs.CA); err != nil {
		k.tb.Fatal(err)
	}
	tokens := KubeAdmin + "," + KubeAdmin + ",0,system:masters\n"
	for i, user := range []string{KubeViewer, KubeLister, KubeNobody} {
		tokens += fmt.Sprintf("%s,%s,%d\n", user, user, i+1)
	}
	if err := os.WriteFile(k.path("tokens"), []byte(tokens), 0o600); err != nil {
		k.tb.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(k.ca)
	k.http = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DialContext: k.DialContext, TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}}
}

// Start starts etcd, unless it runs, and the API server, and returns when it
// answers and knows its users.
func (k *Kube) Start() {
	k.tb.Helper()
	if k.etcd == nil {
		k.etcd = k.run("etcd", "--data-dir", k.path("data"), "--unsafe-no-fsync",
			"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
			"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380",
			"--initial-cluster", "default=http://127.0.0.1:2380")
	}
	k.server = k.run("kube-apiserver", append([]string{
		"--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", "--secure-port=6443", "--cert-dir=" + k.dir,
		"--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none", // no kubelets who would look for it
		"--tls-cert-file=" + k.certs.Cert, "--tls-private-key-file=" + k.certs.Key,
		"--token-auth-file=" + k.path("tokens"), "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes", "--service-account-key-file=" + k.certs.Key,
		"--service-account-signing-key-file=" + k.certs.Key,
		"--service-cluster-ip-range=10.43.0.0/16,fd43::/112",
		// Else Stop takes a minute while anybody watches.
		"--shutdown-delay-duration=0s", "--shutdown-watch-termination-grace-period=1s",
	}, k.o.Args...)...)
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := errors.Join(k.try("GET", "/readyz", "", nil, nil), k.try("GET", "/api/v1/namespaces/default", "", nil, nil))
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			k.tb.Fatalf("kube-apiserver does not answer: %v", err)
		}
		time.Sleep(100 * time.Millisecond) // it tells nobody
	}
	k.grant(KubeViewer, "list", "watch")
	k.grant(KubeLister, "list")
}

// run starts a program of the bed.
func (k *Kube) run(name string, args ...string) *exec.Cmd {
	k.tb.Helper()
	log, err := os.OpenFile(k.path(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		k.tb.Fatalf("open log: %v", err)
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(filepath.Join(k.bin, name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	k.start <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		k.tb.Fatalf("start %s: %v", name, err)
	}
	return cmd
}

// grant lets user do verbs with Services.
func (k *Kube) grant(user string, verbs ...string) {
	k.tb.Helper()
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	meta := map[string]any{"name": user}
	for path, object := range map[string]map[string]any{
		"clusterroles": {"metadata": meta, "rules": []any{map[string]any{"apiGroups": []string{""}, "resources": []string{"services"}, "verbs": verbs}}},
		"clusterrolebindings": {"metadata": meta,
			"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
			"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}}},
	} {
		if err := k.try("POST", rbac+path, "application/json", object, nil); err != nil && !strings.Contains(err.Error(), "already exists") {
			k.tb.Fatalf("grant %v to %s: %v", verbs, user, err)
		}
	}
}

// Stop ends the API server as its supervisor does, by SIGTERM, and returns when
// it has ended. etcd goes on.
func (k *Kube) Stop() { k.end(&k.server, syscall.SIGTERM) }

// Kill ends the API server by SIGKILL.
func (k *Kube) Kill() { k.end(&k.server, syscall.SIGKILL) }

// Reset is a cluster that is restored from nothing: the API server and etcd end,
// what they knew is deleted, and both start again. Resource versions are lower
// than they were.
func (k *Kube) Reset() {
	k.tb.Helper()
	k.Kill()
	k.end(&k.etcd, syscall.SIGKILL)
	if err := os.RemoveAll(k.path("data")); err != nil {
		k.tb.Fatalf("delete etcd's data: %v", err)
	}
	k.Start()
}

func (k *Kube) end(cmd **exec.Cmd, signal syscall.Signal) {
	if *cmd == nil {
		return
	}
	_ = (*cmd).Process.Signal(signal)
	_ = (*cmd).Wait() // it was ended: an error is to be expected
	*cmd = nil
}

func (k *Kube) remove() {
	for _, name := range []string{"etcd", "kube-apiserver"} {
		if log, err := os.ReadFile(k.path(name + ".log")); err == nil && k.tb.Failed() {
			k.tb.Logf("the end of %s's log:\n%s", name, log[max(0, len(log)-4<<10):])
		}
	}
	k.Kill()
	k.end(&k.etcd, syscall.SIGKILL)
	close(k.start)
	if err := <-k.done; err != nil {
		k.tb.Errorf("leave network namespace: %v", err)
	}
}

// Kubeconfig writes one for user, who finds the server at 127.0.0.1:6443 as in
// k3s' own, and returns its path. Another server is said as its URL.
func (k *Kube) Kubeconfig(user, server string) string {
	k.tb.Helper()
	if server == "" {
		server = "https://127.0.0.1:6443"
	}
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "default",
		"clusters": []any{map[string]any{"name": "default", "cluster": map[string]any{"server": server, "certificate-authority-data": k.ca}}},
		"users":    []any{map[string]any{"name": user, "user": map[string]any{"token": user}}},
		"contexts": []any{map[string]any{"name": "default", "context": map[string]any{"cluster": "default", "user": user}}},
	})
	path := filepath.Join(k.tb.TempDir(), "kubeconfig")
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		k.tb.Fatalf("write kubeconfig: %v", err)
	}
	return path
}

// DialContext dials inside the guest's namespace.
func (k *Kube) DialContext(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = k.o.NS.Do(func() error {
		conn, err = new(net.Dialer).DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}

// Create makes a Service and returns it as the API server has it.
func (k *Kube) Create(s corev1.Service) corev1.Service {
	k.tb.Helper()
	return k.do("POST", services(s.Namespace, ""), "application/json", s)
}

// Patch changes a Service by a JSON merge patch: Patch("default", "web",
// `{"spec":{"type":"ClusterIP"}}`).
func (k *Kube) Patch(namespace, name, patch string) corev1.Service {
	k.tb.Helper()
	return k.do("PATCH", services(namespace, name), "application/merge-patch+json", json.RawMessage(patch))
}

// SetIngress says where a Service can be reached, as the cluster's load balancer
// does.
func (k *Kube) SetIngress(namespace, name string, ingress ...corev1.LoadBalancerIngress) corev1.Service {
	k.tb.Helper()
	if ingress == nil {
		ingress = []corev1.LoadBalancerIngress{}
	}
	return k.do("PATCH", services(namespace, name)+"/status", "application/merge-patch+json",
		map[string]any{"status": map[string]any{"loadBalancer": map[string]any{"ingress": ingress}}})
}

// Delete deletes a Service.
func (k *Kube) Delete(namespace, name string) {
	k.tb.Helper()
	if err := k.try("DELETE", services(namespace, name), "", nil, nil); err != nil {
		k.tb.Fatal(err)
	}
}

func services(namespace, name string) string {
	path := "/api/v1/namespaces/" + namespace + "/services"
	if name != "" {
		path += "/" + name
	}
	return path
}

func (k *Kube) do(method, path, contentType string, body any) (s corev1.Service) {
	k.tb.Helper()
	if err := k.try(method, path, contentType, body, &s); err != nil {
		k.tb.Fatal(err)
	}
	return s
}

// try asks the API server as its admin.
func (k *Kube) try(method, path, contentType string, body, answer any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequest(method, "https://127.0.0.1:6443"+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+KubeAdmin)
	req.Header.Set("Content-Type", contentType)
	resp, err := k.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err = io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
	}
	if err == nil && answer != nil {
		err = json.Unmarshal(text, answer)
	}
	return err
}

func (k *Kube) path(name string) string { return filepath.Join(k.dir, name) }
