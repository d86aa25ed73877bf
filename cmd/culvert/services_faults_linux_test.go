package main_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/culvertnet/culvert/guest/guesttest"
)

// testServiceTakenPort is a port that another process has: the row names it. When
// that ends, the port is tried again within 30 s, which others watch
// meanwhile.
func testServiceTakenPort(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	taken, err := net.Listen("tcp", onLoopback(p))
	require.NoError(t, err)
	defer taken.Close()
	e.serve(t, "taken", p) // while this test and its cleanups last
	s := loadBalancer(t, "taken", fmt.Sprintf("%d/TCP", p))
	e.kube.Create(s)
	e.balance(t, "taken")
	e.within(t, time.Now(), time.Second, "failed, with the holder's name",
		e.is(t, fmt.Sprintf("taken:%d/TCP", p), "failed", fmt.Sprintf("(pid %d)", os.Getpid())))
	out, code := e.d.cli("kubernetes", "status")
	require.Zero(t, code, out)
	assert.Contains(t, out, fmt.Sprintf("default/taken %d/TCP: bind failed, retrying (", p))
	assert.LessOrEqual(t, e.said(fmt.Sprintf("taken:%d/TCP", p), "failed"), 1)
	require.NoError(t, taken.Close())
	e.retried = p
	e.released = time.Now()
	go func() { // which testServiceTakenPortFreed waits for
		for deadline := e.released.Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			if c, err := net.Dial("tcp", onLoopback(p)); err == nil {
				_ = c.Close()
				break
			}
		}
		e.freed <- time.Now()
	}()
}

func testServiceTakenPortFreed(t *testing.T, e *servicesEnv) {
	require.NotZero(t, e.retried, "there was no port to take")
	took := (<-e.freed).Sub(e.released)
	t.Logf("open %v after its release", took)
	assert.Less(t, took, 31*time.Second)
	e.serve(t, "freed", e.retried)
	require.NoError(t, reaches("tcp", e.retried, "freed")())
	assert.LessOrEqual(t, e.said(fmt.Sprintf("taken:%d/TCP", e.retried), "failed"), 1, "tries that change nothing are silent")
	e.kube.Delete("default", "taken")
}

// testServiceWatchCut cuts the connection to the API server 50 times, each time
// after an edit: edits arrive, and what was not edited is not touched (C-44).
func testServiceWatchCut(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 3)
	kept := e.forwarded(t, "stays", p)
	e.serve(t, "edited", p+1)
	e.serve(t, "edited", p+2)
	e.create(t, "edited", fmt.Sprintf("%d/TCP", p+1))
	e.balance(t, "edited")
	warned := strings.Count(e.d.logs.String(), "level=WARN")
	for range 50 {
		require.NotZero(t, e.way.cut(), "no connection to cut")
		since := time.Now()
		e.edit(t, "edited", fmt.Sprintf("%d/TCP", p+2))
		e.within(t, since, 2*time.Second, "an edit while the watch is cut", reaches("tcp", p+2, "edited"))
		kept.assertKept(t)
		since = time.Now() // of the watch that came back, and not of the listing
		e.edit(t, "edited", fmt.Sprintf("%d/TCP", p+1))
		e.within(t, since, time.Second, "an edit while it is not", reaches("tcp", p+1, "edited"))
	}
	require.NoError(t, e.apiAnswers(t)())
	assert.Equal(t, warned, strings.Count(e.d.logs.String(), "level=WARN"), "a failure that is made good is no warning")
}

// survives has the cluster be in some fault, in which no listener is touched, and
// then well again, of which the daemon takes note by itself.
func (e *servicesEnv) survives(t *testing.T, fault func(), why string, well func()) {
	t.Helper()
	p := e.ports(t, 2)
	kept := e.forwarded(t, "survives", p)
	fault()
	e.within(t, time.Now(), 5*time.Second, why, e.apiFails(t, why))
	e.kube.Patch("default", "survives", "{}") // for those whose server is there
	require.NoError(t, e.is(t, fmt.Sprintf("survives:%d/TCP", p), "forwarded", "")())
	kept.assertKept(t)
	t.Log(e.status(t).API.Detail)
	well()
	since := time.Now()
	e.within(t, since, 10*time.Second, "well again", e.apiAnswers(t))
	e.serve(t, "survives", p+1)
	kept.assertKept(t)
	e.edit(t, "survives", fmt.Sprintf("%d/TCP", p+1))
	e.within(t, time.Now(), 3*time.Second, "an edit", reaches("tcp", p+1, "survives"))
}

// An account that may do nothing (C-44).
func testServiceRefused(t *testing.T, e *servicesEnv) {
	e.survives(t, func() {
		e.credentials(t, guesttest.KubeNobody)
		e.way.cut()
	}, "README shows the Role", func() { e.credentials(t, guesttest.KubeViewer) })
}

// A server whose certificate nobody knows, and one that does not know the token.
func testServiceUntrusted(t *testing.T, e *servicesEnv) {
	with := func(change func(text string) string) {
		text, err := os.ReadFile(e.kubeconfig)
		require.NoError(t, err)
		replaceFile(t, e.kubeconfig, []byte(change(string(text))))
		e.way.cut()
	}
	back := func() { e.credentials(t, guesttest.KubeViewer) }
	t.Run("certificate", func(t *testing.T) {
		other, err := os.ReadFile(guesttest.NewCerts(t, false, time.Now().Add(time.Hour)).CA)
		require.NoError(t, err)
		e.survives(t, func() {
			with(func(text string) string {
				return strings.Replace(text, e.authority(t), base64.StdEncoding.EncodeToString(other), 1)
			})
		}, "signed by unknown authority", back)
	})
	t.Run("token", func(t *testing.T) {
		e.survives(t, func() {
			with(func(text string) string { return strings.Replace(text, `"token":"`, `"token":"not-`, 1) })
		}, "does not accept the credentials", back)
	})
}

// authority is the cluster's, as a kubeconfig has it.
func (e *servicesEnv) authority(t *testing.T) string {
	t.Helper()
	conf, err := clientcmd.LoadFromFile(e.kubeconfig)
	require.NoError(t, err)
	for _, c := range conf.Clusters {
		return base64.StdEncoding.EncodeToString(c.CertificateAuthorityData)
	}
	require.FailNow(t, "no cluster")
	return ""
}

// An account that may not watch is served by listing every 2 s (C-39).
func testServiceNoWatch(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	kept := e.forwarded(t, "polled", p)
	e.credentials(t, guesttest.KubeLister)
	e.way.cut()
	e.serve(t, "polled", p+1)
	for i := range 4 {
		since := time.Now()
		to := []string{fmt.Sprintf("%d/TCP", p)}
		if i%2 == 0 {
			to = append(to, fmt.Sprintf("%d/TCP", p+1))
		}
		e.edit(t, "polled", to...)
		if i%2 == 0 {
			e.within(t, since, 4*time.Second, "opened", reaches("tcp", p+1, "polled"))
		} else {
			e.within(t, since, 4*time.Second, "closed", bindable(p+1, 1))
		}
		kept.assertKept(t)
		require.NoError(t, e.apiAnswers(t)())
	}
	e.credentials(t, guesttest.KubeViewer)
	e.passes(t) // it is seen by who lists anew, and then watches
}

// testServiceREADME applies what README says is enough, and uses its kubeconfig.
// The token is bound to README's Secret, which in a whole cluster would hold one
// itself: the controller that fills it is not in the bed.
func testServiceREADME(t *testing.T, e *servicesEnv) {
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	blocks := strings.Split(string(readme), "```")
	block := func(what string) string {
		i := slices.IndexFunc(blocks, func(b string) bool { return strings.HasPrefix(b, "yaml\n") && strings.Contains(b, what) })
		require.GreaterOrEqual(t, i, 0, "no block with %s", what)
		return strings.TrimPrefix(blocks[i], "yaml\n")
	}
	_, err = e.api(http.MethodPost, "/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": "kube-system"}})
	if err != nil {
		require.Contains(t, err.Error(), "already exists")
	}
	paths := map[string]string{
		"ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts", "Secret": "/api/v1/namespaces/kube-system/secrets",
		"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
		"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	}
	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(block("kind: ClusterRoleBinding")), 4096); ; {
		var object map[string]any
		if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		kind, _ := object["kind"].(string)
		path, ok := paths[kind]
		require.True(t, ok, "README has a %q more than once, or one this test does not know", kind)
		delete(paths, kind)
		_, err := e.api(http.MethodPost, path, object)
		require.NoError(t, err)
	}
	require.Empty(t, paths, "README does not have them")
	answer, err := e.api(http.MethodPost, "/api/v1/namespaces/kube-system/serviceaccounts/culvert/token", map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
		"spec": map[string]any{"boundObjectRef": map[string]any{"apiVersion": "v1", "kind": "Secret", "name": "culvert"}}})
	require.NoError(t, err)
	var token struct{ Status struct{ Token string } }
	require.NoError(t, json.Unmarshal(answer, &token))
	require.NotEmpty(t, token.Status.Token)

	p := e.ports(t, 2)
	kept := e.forwarded(t, "readme", p)
	kubeconfig := block("kind: Config")
	kubeconfig = strings.Replace(kubeconfig, "token: TOKEN", "token: "+token.Status.Token, 1)
	kubeconfig = strings.Replace(kubeconfig, "certificate-authority-data: CA", "certificate-authority-data: "+e.authority(t), 1)
	replaceFile(t, e.kubeconfig, []byte(kubeconfig))
	e.way.cut() // its server is the API server itself
	e.within(t, time.Now(), 5*time.Second, "README's kubeconfig", func() error {
		if s := e.status(t); s.API.Endpoint != "https://127.0.0.1:6443" || !s.API.Reachable {
			return fmt.Errorf("%+v", s.API)
		}
		return nil
	})
	kept.assertKept(t)
	e.serve(t, "readme", p+1)
	since := time.Now()
	e.edit(t, "readme", fmt.Sprintf("%d/TCP", p+1))
	e.within(t, since, time.Second, "README's Role lets culvert watch", reaches("tcp", p+1, "readme"))

	client := e.client(t, e.kubeconfig)
	for _, more := range []string{"/api/v1/secrets", "/api/v1/pods", "/api/v1/namespaces/kube-system/secrets/culvert"} {
		resp, err := client.Get("https://127.0.0.1:6443" + more)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, http.StatusForbidden, resp.StatusCode, "%s is more than culvert needs", more)
	}
	e.credentials(t, guesttest.KubeViewer) // which a watch takes note of
	e.within(t, time.Now(), 12*time.Second, "the file has changed", func() error {
		if s := e.status(t); s.API.Endpoint != fmt.Sprintf("https://127.0.0.1:%d", apiPort) || !s.API.Reachable {
			return fmt.Errorf("%+v", s.API)
		}
		return nil
	})
}

// A watch from a version that etcd has forgotten: what is true is listed anew.
func testServiceFB115(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	kept := e.forwarded(t, "old", p)
	e.serve(t, "new", p+1)
	e.way.cut()
	e.create(t, "new", fmt.Sprintf("%d/TCP", p+1))
	e.balance(t, "new")
	var now struct{ Header struct{ Revision string } }
	e.etcd(t, "/kv/range", map[string]any{"key": base64.StdEncoding.EncodeToString([]byte("/"))}, &now)
	require.NotEmpty(t, now.Header.Revision)
	e.etcd(t, "/kv/compaction", map[string]any{"revision": now.Header.Revision, "physical": true}, &now)
	e.kube.Kill() // its cache would remember what etcd does not
	e.kube.Start()
	since := time.Now()
	e.within(t, since, 10*time.Second, "the state is the list's", reaches("tcp", p+1, "new"))
	kept.assertKept(t)
	since = time.Now()
	e.edit(t, "new", fmt.Sprintf("%d/TCP", p+1), "9/SCTP")
	e.within(t, since, 2*time.Second, "watched again", e.is(t, "new:9/SCTP", "skipped", ""))
}

// testServiceServerKilled has no API server for a while.
func testServiceServerKilled(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 1)
	kept := e.forwarded(t, "alone", p)
	e.kube.Kill()
	e.within(t, time.Now(), 5*time.Second, "failures", e.apiFails(t, "cut the connection"))
	require.NoError(t, e.is(t, fmt.Sprintf("alone:%d/TCP", p), "forwarded", "")())
	kept.assertKept(t)
	e.kube.Start()
	e.within(t, time.Now(), 15*time.Second, "well again", e.apiAnswers(t))
	kept.assertKept(t)
	since := time.Now()
	e.kube.Delete("default", "alone")
	e.within(t, since, 2*time.Second, "deleted", bindable(p, 1))
}

// testServiceReset is a cluster that is restored from nothing: its resource
// versions are lower, and a complete listing says that no Service is there.
func testServiceReset(t *testing.T, e *servicesEnv) {
	p := e.ports(t, 2)
	kept := e.forwarded(t, "past", p)
	e.kube.Reset()
	e.within(t, time.Now(), 15*time.Second, "what is no more is closed", bindable(p, 1))
	kept.assertReset(t)
	e.serve(t, "future", p+1)
	e.create(t, "future", fmt.Sprintf("%d/TCP", p+1))
	since := time.Now()
	e.balance(t, "future")
	e.within(t, since, time.Second, "followed again", reaches("tcp", p+1, "future"))
}
