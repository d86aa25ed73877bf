package kube

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var discard = slog.New(slog.DiscardHandler)

// selfSigned is a certificate valid from then until then, and its key, as PEM.
func selfSigned(t *testing.T, from, to time.Time) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "me"}, NotBefore: from, NotAfter: to}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// What cannot be used is one sentence that names the file.
func TestNewRefusesKubeconfigs(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kubeconfig")
	now := time.Now()
	old, oldKey := selfSigned(t, now.AddDate(-1, 0, 0), time.Date(2024, 5, 6, 0, 0, 0, 0, time.UTC))
	young, youngKey := selfSigned(t, now.AddDate(1, 0, 0), now.AddDate(2, 0, 0))
	b64 := base64.StdEncoding.EncodeToString
	user := func(text string) func() {
		return func() { writeKubeconfig(t, path, "https://10.0.2.2:6443", old, text) }
	}
	write := func(text string) func() {
		return func() { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	}
	for want, prepare := range map[string]func(){
		"no such file or directory":                       func() { _ = os.Remove(path) },
		"it has no cluster and no user":                   write(""),
		"it is no kubeconfig: ":                           write("\x00\xff: ["),
		`credentials of user "me" come from a program`:    user(`{"exec":{"command":"aws","apiVersion":"client.authentication.k8s.io/v1","interactiveMode":"Never"}}`),
		`credentials of user "me" come from a program or`: user(`{"auth-provider":{"name":"oidc"}}`),
		"unable to read client-cert " + dir + "/none.crt": user(`{"client-certificate":"none.crt","client-key":"none.key"}`),
		"the client certificate expired on 2024-05-06":    user(fmt.Sprintf(`{"client-certificate-data":%q,"client-key-data":%q}`, b64(old), b64(oldKey))),
		"the client certificate is valid only from ":      user(fmt.Sprintf(`{"client-certificate-data":%q,"client-key-data":%q}`, b64(young), b64(youngKey))),
		"private key does not match public key":           user(fmt.Sprintf(`{"client-certificate-data":%q,"client-key-data":%q}`, b64(old), b64(youngKey))),
		"unable to load root certificates":                func() { writeKubeconfig(t, path, "https://10.0.2.2:6443", []byte("x"), "") },
		`"ftp://" is no server's URL`:                     func() { writeKubeconfig(t, path, "ftp://", old, "") },
		"is a directory":                                  func() { _ = os.Remove(path); require.NoError(t, os.Mkdir(path, 0o700)) },
	} {
		require.NoError(t, os.RemoveAll(path))
		prepare()
		_, err := New(Options{Kubeconfig: path})
		require.ErrorContains(t, err, want)
		require.Regexp(t, `^kubeconfig `+path+`: .+$`, err.Error())
	}
}

// Names are checked against the kubeconfig's server, whatever is dialled, and
// every kind of credential that needs no program is sent.
func TestClientCredentials(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "token"), []byte("from-file\n"), 0o600))
	cert, key := selfSigned(t, time.Unix(0, 0), time.Now().AddDate(1, 0, 0)) // a bubble begins in 2000
	b64 := base64.StdEncoding.EncodeToString
	for user, want := range map[string]string{
		`{"token":"secret"}`:                "Bearer secret",
		`{"tokenFile":"` + dir + `/token"}`: "Bearer from-file",
		`{"username":"u","password":"p"}`:   "Basic " + b64([]byte("u:p")),
		fmt.Sprintf(`{"client-certificate-data":%q,"client-key-data":%q}`, b64(cert), b64(key)): "CN=me",
	} {
		bubble(t, func(t *testing.T, f *fakeAPI) {
			f.server.TLS.ClientAuth = tls.RequestClientCert
			got := make(chan string, 10)
			f.list = func(w http.ResponseWriter, r *http.Request) bool {
				said := r.Header.Get("Authorization")
				for _, c := range r.TLS.PeerCertificates {
					said += c.Subject.String()
				}
				got <- said
				return false
			}
			f.follow(f.kubeconfig(user))
			require.Equal(t, want, <-got)
		})
	}
}

func TestClientServerNames(t *testing.T) {
	for _, c := range []struct{ server, name, err string }{
		{server: "https://127.0.0.1:6443"},
		{server: "https://example.com:6443"},
		{server: "https://127.0.0.2:6443", err: "API server at https://127.0.0.2:6443 cannot be trusted: x509: certificate is valid for 127.0.0.1, ::1, not 127.0.0.2"},
		{server: "https://127.0.0.2:6443", name: "example.com"},
		{server: "https://127.0.0.1:6443", name: "other.org", err: "cannot be trusted: x509: certificate is valid for example.com, *.example.com, not other.org"},
	} {
		bubble(t, func(t *testing.T, f *fakeAPI) {
			ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})
			path := writeKubeconfig(t, filepath.Join(t.TempDir(), "k"), c.server, ca, "")
			if c.name != "" {
				text, err := os.ReadFile(path)
				require.NoError(t, err)
				text = []byte(strings.Replace(string(text), `"server":`, `"tls-server-name":"`+c.name+`","server":`, 1))
				require.NoError(t, os.WriteFile(path, text, 0o600))
			}
			f.addr = "" // whatever is dialled
			w := f.follow(path)
			time.Sleep(500 * time.Millisecond)
			_, u := w.told()
			if c.err == "" {
				require.NoError(t, u.Err)
				return
			}
			require.ErrorContains(t, u.Err, c.err)
		})
	}
}

// A certificate that nobody signed is not believed.
func TestClientUnknownAuthority(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		other, _ := selfSigned(t, time.Now(), time.Now().AddDate(1, 0, 0))
		path := writeKubeconfig(t, filepath.Join(t.TempDir(), "k"), "https://127.0.0.1:6443", other, "")
		w := f.follow(path)
		time.Sleep(500 * time.Millisecond)
		_, u := w.told()
		require.EqualError(t, u.Err, "API server at https://127.0.0.1:6443 cannot be trusted: its certificate is signed by unknown authority, not by the one in "+path)
	})
}

// A server that sends its clients elsewhere, perhaps to the host's loopback, is
// not followed there.
func TestClientFollowsNoRedirect(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.list = func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
			return true
		}
		w := f.follow(f.kubeconfig(""))
		time.Sleep(500 * time.Millisecond)
		_, u := w.told()
		require.EqualError(t, u.Err, "API server at https://127.0.0.1:6443 answers 302: the answer is HTTP status 302")
	})
}

// Close drops connections in use, and those being made.
func TestClientCloseDropsConnections(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Minute)
		require.NoError(t, w.client.Close())
		time.Sleep(100 * time.Millisecond)
		_, u := w.told()
		require.Error(t, u.Err)
		time.Sleep(5 * time.Second)
		_, u = w.told()
		require.NoError(t, u.Err, "it makes new ones when it is used again")
	})
	dialling := make(chan struct{})
	c := newConns(func(ctx context.Context, _, _ string) (net.Conn, error) {
		close(dialling)
		<-ctx.Done()
		return nil, ctx.Err()
	})
	done := make(chan error, 1)
	go func() {
		_, err := c.Dial(context.Background(), "tcp", "x")
		done <- err
	}()
	<-dialling
	c.close()
	require.ErrorIs(t, <-done, context.Canceled)
}

func TestSentences(t *testing.T) {
	path := writeKubeconfig(t, filepath.Join(t.TempDir(), "k"), "https://10.0.2.2:6443", nil, "")
	c, err := New(Options{Kubeconfig: path})
	require.NoError(t, err)
	require.Equal(t, "https://10.0.2.2:6443", c.Endpoint())
	forbidden := `services is forbidden: User "u" cannot list resource "services" in API group "" at the cluster scope`
	for want, err := range map[string]error{
		"refused the connection":                  &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)},
		"cut the connection":                      &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)},
		"did not answer in time":                  context.DeadlineExceeded,
		"cannot be found: lookup x: no such host": &net.DNSError{Err: "no such host", Name: "x"},
		"refuses: " + forbidden + " (README shows the Role that is enough)": statusError(metav1.Status{Message: forbidden}, 403),
		"does not accept the credentials in " + path:                        statusError(metav1.Status{Message: "Unauthorized"}, 401),
		"answers 503: apiserver is shutting down":                           statusError(metav1.Status{Message: "apiserver is\nshutting\x1bdown", Code: 200}, 503),
		"did not answer as it should: surprise":                             errors.New("surprise"),
	} {
		require.EqualError(t, c.sentence(err), "API server at https://10.0.2.2:6443 "+want)
		require.ErrorIs(t, c.sentence(err), err)
	}
}
