package docker_test

import (
	"context"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/guest/guesttest"
)

// patience is how long a test waits for what is to happen at once.
const patience = 30 * time.Second

func mustClient(t testing.TB, endpoint string, files docker.TLSFiles) *docker.Client {
	t.Helper()
	c, err := docker.New(docker.Options{Endpoint: endpoint, TLS: files, Dial: new(net.Dialer).DialContext})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	return c
}

func mustList(t testing.TB, c *docker.Client) []docker.Container {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all, err := c.Containers(ctx)
	require.NoError(t, err)
	return all
}

// listError returns the error of a listing, which must fail.
func listError(t testing.TB, c *docker.Client) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	all, err := c.Containers(ctx)
	require.Error(t, err)
	require.Nil(t, all, "an error and a list")
	return err
}

// watching is a Watch under way.
type watching struct {
	subscribed chan struct{}
	events     chan docker.Event
	ended      chan error
	cancel     context.CancelFunc
}

func watch(t testing.TB, c *docker.Client) *watching {
	ctx, cancel := context.WithCancel(t.Context())
	w := &watching{make(chan struct{}, 16), make(chan docker.Event, 1<<14), make(chan error, 1), cancel}
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.ended <- c.Watch(ctx, func() { w.subscribed <- struct{}{} }, func(e docker.Event) { w.events <- e })
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func receive[T any](t testing.TB, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		require.FailNow(t, "waited in vain for "+what)
		panic("unreachable")
	}
}

func TestVersions(t *testing.T) {
	e := guesttest.NewEngine(t)
	e.Set(guesttest.Published(0, 8080, 80))
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for _, v := range []string{"1.24", "1.39", "1.40"} {
		e.SetVersion(v)
		assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" speaks version "+v+" of the API, and culvert needs 1.41, of Docker 20.10, or newer")
		w := watch(t, c)
		assert.ErrorContains(t, receive(t, w.ended, "the end"), "culvert needs 1.41")
	}
	e.SetVersion("")
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" answers, but not as a Docker engine does: it names no version of its API")
	for _, v := range []string{"1.41", "1.47", "1.99"} { // it is replaced while we run
		e.SetVersion(v)
		require.NoError(t, c.Close())
		assert.Len(t, mustList(t, c), 1, v)
	}
	e.SetVersion("1.41")
	assert.EqualError(t, listError(t, c), "engine at "+e.Endpoint()+" answered: client version 1.57 is too new. Maximum supported API version is 1.41")
	assert.Len(t, mustList(t, c), 1, "an older engine took its place")
}

func TestTLS(t *testing.T) {
	local, day := net.IPv4(127, 0, 0, 1), time.Now().Add(24*time.Hour)
	serve := func(certs *guesttest.Certs) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		e := guesttest.ServeEngine(t, l, certs.Server)
		e.Set(guesttest.Published(0, 8080, 80))
		return e.Endpoint()
	}
	good := guesttest.NewCerts(t, false, day, local)
	mutual := guesttest.NewCerts(t, true, day, local)
	plain := guesttest.NewEngine(t)
	for _, tt := range []struct {
		name     string
		endpoint string
		files    docker.TLSFiles
		want     string // of the error; none if empty
	}{
		{"good", serve(good), docker.TLSFiles{CA: good.CA}, ""},
		{"both ways", serve(mutual), docker.TLSFiles{CA: mutual.CA, Cert: mutual.Cert, Key: mutual.Key}, ""},
		{"no TLS of ours", serve(good), docker.TLSFiles{}, "speaks TLS; set docker.tls"},
		{"no TLS of its", plain.Endpoint(), docker.TLSFiles{CA: good.CA}, "does not speak TLS; leave docker.tls out"},
		{"another authority", serve(good), docker.TLSFiles{CA: mutual.CA}, "has a certificate of an authority that is not in docker.tls.ca"},
		{"the host's authorities", serve(mutual), docker.TLSFiles{Cert: mutual.Cert, Key: mutual.Key}, "has a certificate of an authority that is not in docker.tls.ca"},
		{"none of ours", serve(mutual), docker.TLSFiles{CA: mutual.CA}, "refuses our certificate, or that there is none"},
		{"another of ours", serve(mutual), docker.TLSFiles{CA: mutual.CA, Cert: good.Cert, Key: good.Key}, "refuses our certificate, or that there is none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := mustClient(t, tt.endpoint, tt.files)
			if tt.want == "" {
				assert.Len(t, mustList(t, c), 1)
				return
			}
			assert.ErrorContains(t, listError(t, c), "engine at "+tt.endpoint+" "+tt.want)
		})
	}
	for want, certs := range map[string]*guesttest.Certs{
		"has a certificate for another name: x509: certificate is valid for 10.0.2.2, not 127.0.0.1": guesttest.NewCerts(t, false, day, net.IPv4(10, 0, 2, 2)),
		"has a certificate that is not valid: x509: certificate has expired":                         guesttest.NewCerts(t, false, time.Now().Add(-time.Hour), local),
	} {
		endpoint := serve(certs)
		assert.ErrorContains(t, listError(t, mustClient(t, endpoint, docker.TLSFiles{CA: certs.CA})), "engine at "+endpoint+" "+want)
	}
}

func TestOptionsThatAreRefused(t *testing.T) {
	certs := guesttest.NewCerts(t, false, time.Now().Add(time.Hour))
	other := guesttest.NewCerts(t, false, time.Now().Add(time.Hour))
	dial := new(net.Dialer).DialContext
	const tcp = "tcp://10.0.2.2:2375"
	for _, tt := range []struct {
		o    docker.Options
		want string
	}{
		{docker.Options{Endpoint: "10.0.2.2:2375"}, `endpoint "10.0.2.2:2375": it is tcp://IP:PORT or unix:///PATH`},
		{docker.Options{Endpoint: ""}, `endpoint "": it is tcp://IP:PORT or unix:///PATH`},
		{docker.Options{Endpoint: "http://10.0.2.2:2375"}, `"http" is not tcp or unix`},
		{docker.Options{Endpoint: "tcp://engine:2375"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "tcp://10.0.2.2"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "tcp://10.0.2.2:0"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "tcp://10.0.2.2:2375/v1"}, "after tcp:// comes an IP address and a port"},
		{docker.Options{Endpoint: "unix://docker.sock"}, "after unix:// comes the absolute path of a socket"},
		{docker.Options{Endpoint: "unix:///" + strings.Repeat("x", 107)}, "of at most 107 bytes"},
		{docker.Options{Endpoint: "unix:///a", TLS: docker.TLSFiles{CA: certs.CA}}, "docker.tls is for tcp endpoints"},
		{docker.Options{Endpoint: tcp}, "nothing to dial it with"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{CA: "/nowhere/ca.pem"}}, "docker.tls.ca: open /nowhere/ca.pem: no such file or directory"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{CA: certs.Key}}, "holds no certificate in PEM"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{Cert: certs.Cert}}, "cert and key are given together"},
		{docker.Options{Endpoint: tcp, Dial: dial, TLS: docker.TLSFiles{Cert: certs.Cert, Key: other.Key}}, "private key does not match public key"},
	} {
		_, err := docker.New(tt.o)
		assert.ErrorContains(t, err, tt.want)
	}
	assert.NoError(t, docker.ValidateEndpoint("tcp://[fd00::2]:2376"))
	assert.NoError(t, docker.ValidateEndpoint("unix:///run/docker.sock"))
}

// Close ends what is under way, and leaves nothing; the client goes on with what
// is there then.
func TestClose(t *testing.T) {
	datapathtest.Leaks(t)
	e := guesttest.NewEngine(t)
	e.Set(guesttest.Published(0, 8080, 80))
	c := mustClient(t, e.Endpoint(), docker.TLSFiles{})
	for _, kind := range []string{"ping", "list", "inspect"} {
		require.NoError(t, c.Close())
		held := guesttest.Hold()
		e.FaultIn(kind, held.In)
		ended := make(chan error, 1)
		go func() {
			_, err := c.Containers(t.Context())
			ended <- err
		}()
		receive(t, held.Arrived, kind)
		require.NoError(t, c.Close())
		assert.ErrorIs(t, receive(t, ended, "the end of "+kind), os.ErrClosed, kind)
		held.Release()
		e.Fault(nil)
	}
	w := watch(t, c)
	receive(t, w.subscribed, "the stream")
	require.NoError(t, c.Close())
	assert.ErrorIs(t, receive(t, w.ended, "the end"), os.ErrClosed)
	assert.Len(t, mustList(t, c), 1)

	e.Close()
	assert.ErrorContains(t, listError(t, c), "refused the connection")
}

// A dial that hangs ends with Close too.
func TestCloseWhileDialling(t *testing.T) {
	datapathtest.Leaks(t)
	dialling := make(chan struct{}, 1)
	c, err := docker.New(docker.Options{Endpoint: "tcp://10.0.2.2:2375", Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		assert.Equal(t, "tcp 10.0.2.2:2375", network+" "+addr)
		dialling <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := c.Containers(t.Context())
		ended <- err
	}()
	receive(t, dialling, "the dial")
	require.NoError(t, c.Close())
	assert.ErrorIs(t, receive(t, ended, "the end"), os.ErrClosed)
}
