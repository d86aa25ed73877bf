package main_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/datapath/datapathtest"
)

// A nameRow is what `culvert names -o json` says of one name.
type nameRow struct {
	Name      string
	VM        string
	Owners    []struct{ Kind, ID string }
	Addresses []string
}

// resolver asks the daemon's DNS server, as a program would that remembers
// nothing.
func (e *containersEnv) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, e.dns.String())
	}}
}

// lookup returns the IPv4 addresses of a name; none when there is no such name.
func (e *containersEnv) lookup(name string) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	ips, err := e.resolver().LookupNetIP(ctx, "ip4", name+".") // a name that is complete: no search list
	var dns *net.DNSError
	if errors.As(err, &dns) && dns.IsNotFound {
		return nil, nil
	}
	var addrs []string
	for _, ip := range ips {
		addrs = append(addrs, ip.String())
	}
	return addrs, err
}

// leadsTo complains unless the name leads to just these addresses.
func (e *containersEnv) leadsTo(name string, want ...string) func() error {
	return func() error {
		got, err := e.lookup(name)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("%s leads to %v, not %v", name, got, want)
		}
		return err
	}
}

// A rename moves the name and keeps the port (C-36, FB-082).
func testContainerRename(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	id, started := e.container(t, "--name", "before", "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	e.within(t, started, time.Second, "traffic", func() error { return echoes("tcp", onLoopback(port)) })
	require.NoError(t, e.leadsTo("before.culvert.internal", "127.0.0.1")())
	c := keep(t, port)
	e.docker(t, "rename", id, "after")
	renamed := e.heard.at(t, "rename", id)
	e.within(t, renamed, time.Second, "the new name", e.leadsTo("after.culvert.internal", "127.0.0.1"))
	require.NoError(t, e.leadsTo("before.culvert.internal")())
	c.assertKept(t)
}

// A container is meant by its name, and by what begins only its id (C-36).
func testContainerLs(t *testing.T, e *containersEnv) {
	port := e.ports(t, 2)
	web, _ := e.container(t, "--name", "web", "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	other, started := e.container(t, "-p", fmt.Sprintf("%d:%d", port+1, portEcho), "guestd")
	e.within(t, started, time.Second, "rows", func() error {
		if err := e.allForwarded(t, web, 1); err != nil {
			return err
		}
		return e.allForwarded(t, other, 1)
	})
	ls := func(args ...string) (ids []string) {
		out, code := e.d.cli(append([]string{"ls", "-o", "json"}, args...)...)
		require.Zero(t, code, out)
		var rows []row
		require.NoError(t, json.Unmarshal([]byte(out), &rows))
		for _, r := range rows {
			ids = append(ids, r.Owner.ID)
		}
		return ids
	}
	assert.Equal(t, []string{web}, ls("web"))
	assert.Equal(t, []string{web}, ls(web))
	assert.Equal(t, []string{web}, ls(web[:12]))
	if web[:4] != other[:4] {
		assert.Equal(t, []string{web}, ls(web[:4]))
	}
	assert.ElementsMatch(t, []string{web, other}, ls("--owner", "docker"))
	assert.Empty(t, ls("--owner", "config"))
	out, code := e.d.cli("ls", "nosuch")
	assert.Equal(t, 1, code, out)
	assert.Contains(t, out, "nosuch")
}

// dig gets what C-37 and C-38 promise.
func testContainerNames(t *testing.T, e *containersEnv) {
	port := e.ports(t, 1)
	id, started := e.container(t, "--name", "Shop_Web", "-p", fmt.Sprintf("%d:%d", port, portEcho),
		"--label", "com.docker.compose.project=shop", "--label", "com.docker.compose.service=db", "guestd")
	e.within(t, started, time.Second, "the name", e.leadsTo("shop_web.culvert.internal", "127.0.0.1"))
	for _, ask := range []struct {
		args   []string
		status string
		want   []string
	}{
		{[]string{"shop_web.culvert.internal", "A"}, "NOERROR", []string{"127.0.0.1"}},
		{[]string{"SHOP_web.Culvert.Internal", "A"}, "NOERROR", []string{"127.0.0.1"}},
		{[]string{"shop_web.culvert.internal", "AAAA"}, "NOERROR", []string{"::1"}},
		{[]string{"+tcp", "shop_web.culvert.internal", "A"}, "NOERROR", []string{"127.0.0.1"}},
		{[]string{"shop_web", "A"}, "NOERROR", []string{"127.0.0.1"}},
		{[]string{"db.shop.culvert.internal", "A"}, "NOERROR", []string{"127.0.0.1"}},
		{[]string{"anything.shop_web.culvert.internal", "A"}, "NOERROR", []string{"127.0.0.1"}},
		{[]string{"shop_web.culvert.internal", "MX"}, "NOERROR", nil},
		{[]string{"shop.culvert.internal", "A"}, "NOERROR", nil}, // there is something below it
		{[]string{"nosuch.culvert.internal", "A"}, "NXDOMAIN", nil},
		{[]string{"example.com", "A"}, "REFUSED", nil},
	} {
		status, answers := e.dig(t, ask.args...)
		assert.Equal(t, ask.status, status, "%v", ask.args)
		assert.Equal(t, ask.want, answers, "%v", ask.args)
	}
	status, answers := e.dig(t, "-x", "127.0.0.1")
	assert.Equal(t, "NOERROR", status)
	assert.Contains(t, answers, "shop_web.culvert.internal.")

	named := func() (names []string) {
		for _, n := range list[nameRow](t, e.d, "names") {
			if slices.ContainsFunc(n.Owners, func(o struct{ Kind, ID string }) bool { return o.Kind == "docker" && o.ID == id }) {
				names = append(names, n.Name)
				assert.Equal(t, "default", n.VM)
				assert.Equal(t, []string{"127.0.0.1", "::1"}, n.Addresses)
			}
		}
		return names
	}
	assert.ElementsMatch(t, []string{"shop_web", "db.shop"}, named())

	// A name goes with its container (FB-083).
	e.docker(t, "rm", "-f", id)
	e.within(t, e.heard.at(t, "die", id), time.Second, "no name", e.leadsTo("shop_web.culvert.internal"))
	assert.Empty(t, named())
}

// The system's own resolver, with a resolv.conf that only it sees: glibc asks
// port 53 of the daemon, as it would with systemd-resolved in between.
func testContainerResolver(t *testing.T, e *containersEnv) {
	for _, tool := range []string{"unshare", "getent"} {
		_, err := exec.LookPath(tool)
		datapathtest.Require(t, "netns", err == nil, tool+" is missing: apt-get install util-linux libc-bin")
	}
	port := e.ports(t, 1)
	id, started := e.container(t, "--name", "web", "-p", fmt.Sprintf("%d:%d", port, portEcho), "guestd")
	e.within(t, started, time.Second, "the name", e.leadsTo("web.culvert.internal", "127.0.0.1"))
	resolv := filepath.Join(t.TempDir(), "resolv.conf")
	require.NoError(t, os.WriteFile(resolv, []byte(fmt.Sprintf("nameserver %s\nsearch culvert.internal\n", e.dns.Addr())), 0o644))
	getent := func(database, name string) (string, error) {
		out, err := exec.Command("unshare", "--mount", "sh", "-c", `mount --bind "$1" /etc/resolv.conf && exec getent "$2" "$3"`,
			"sh", resolv, database, name).CombinedOutput()
		return string(out), err
	}
	for _, name := range []string{"web.culvert.internal", "web", "x.web.culvert.internal"} {
		out, err := getent("ahostsv4", name)
		require.NoError(t, err, "%s: %s", name, out)
		assert.Equal(t, "127.0.0.1", strings.Fields(out)[0], name)
	}
	out, err := getent("ahostsv6", "web.culvert.internal")
	require.NoError(t, err, out)
	assert.Equal(t, "::1", strings.Fields(out)[0])
	_, err = getent("ahostsv4", "nosuch.culvert.internal")
	assert.Error(t, err)
	e.docker(t, "rm", "-f", id)
	e.within(t, e.heard.at(t, "die", id), time.Second, "no name", func() error {
		if out, err := getent("ahostsv4", "web.culvert.internal"); err == nil {
			return fmt.Errorf("still %s", out)
		}
		return nil
	})
}

// With `address: loopback` each container has an address of its own, where its
// ports are at the container's own numbers: two of them at port 80 (C-37).
func testContainerOwnAddresses(t *testing.T, e *containersEnv) {
	e.restart(t, settings{address: "loopback"})
	port := e.ports(t, 2)
	const serve = `hostname >/www/index.html; exec httpd -f -p 80 -h /www`
	want := map[string]string{}
	for i, name := range []string{"red", "blue"} {
		id, started := e.container(t, "--name", name, "--hostname", name, "-p", fmt.Sprintf("%d:80", port+i), "guestd", "sh", "-c", serve)
		page := func(host string) error {
			client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
				DisableKeepAlives: true, DialContext: (&net.Dialer{Resolver: e.resolver()}).DialContext,
			}}
			resp, err := client.Get("http://" + host + "/")
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			got, err := io.ReadAll(resp.Body)
			if err == nil && string(got) != name+"\n" {
				err = fmt.Errorf("%s answers as %q", host, got)
			}
			return err
		}
		e.within(t, started, time.Second, name+" at port 80", func() error { return page(name + ".culvert.internal") })
		e.within(t, started, time.Second, name+" at its published port", func() error { return page(fmt.Sprintf("127.0.0.1:%d", port+i)) })
		addrs, err := e.lookup(name + ".culvert.internal")
		require.NoError(t, err)
		require.Len(t, addrs, 1)
		assert.True(t, strings.HasPrefix(addrs[0], "127.77."), addrs[0])
		want[name] = addrs[0]
		_, back := e.dig(t, "-x", addrs[0])
		assert.Equal(t, []string{name + ".culvert.internal."}, back)
		require.NoError(t, e.allForwarded(t, id, 2))
	}
	assert.NotEqual(t, want["red"], want["blue"])
}

// A name that two containers have leads to the newest of them, and to the other
// when that one goes (C-37); nobody who asks meanwhile is told anything else.
func testContainerAlias(t *testing.T, e *containersEnv) {
	e.restart(t, settings{address: "loopback"})
	const shared = "api.shop.culvert.internal"
	own := func(name string) (id, addr string) {
		id, started := e.container(t, "--name", name, "--label", "com.docker.compose.project=shop",
			"--label", "com.docker.compose.service=api", "guestd")
		e.within(t, started, time.Second, name, func() error {
			addrs, err := e.lookup(name + ".culvert.internal")
			if err != nil || len(addrs) != 1 {
				return fmt.Errorf("%v: %w", addrs, err)
			}
			addr = addrs[0]
			return nil
		})
		return id, addr
	}
	first, firstAddr := own("api-1")
	require.NoError(t, e.leadsTo(shared, firstAddr)())

	// Somebody who asks all the time.
	var answers []string
	var failed error
	stop := background(t, func() {
		got, err := e.lookup(shared)
		answers, failed = append(answers, strings.Join(got, ",")), errors.Join(failed, err)
	})
	second, secondAddr := own("api-2")
	assert.NotEqual(t, firstAddr, secondAddr)
	assert.NoError(t, e.leadsTo(shared, secondAddr)())
	e.docker(t, "kill", second)
	e.within(t, e.heard.at(t, "die", second), time.Second, "the name falls back", e.leadsTo(shared, firstAddr))
	stop()
	require.NoError(t, failed)
	answers = slices.Compact(answers)
	assert.Equal(t, []string{firstAddr, secondAddr, firstAddr}, answers)

	e.docker(t, "kill", first)
	e.within(t, e.heard.at(t, "die", first), time.Second, "the name is gone", e.leadsTo(shared))
}
