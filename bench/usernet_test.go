package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

// User-mode networks: peers with a link of their own into the guest's namespace.

// Of linux/if_tun.h and linux/if.h.
const (
	iffTAP     = 0x2
	iffNoPI    = 0x1000
	iffLowerUp = 0x10000 // there is carrier
)

// hugeMTU is what pasta and slirp4netns take by themselves or advise: without
// offloads of the link a large MTU is what makes them fast.
const hugeMTU = 65520

// openPastaSplice is pasta for a client on loopback: it joins two sockets, with no
// link between.
//
//	client ── lo ── pasta ── lo of the guest ── server
func openPastaSplice(tb testing.TB) *bed {
	b := openPasta(tb)
	b.client = "127.0.0.1"
	return b
}

// openPastaTap is pasta for a client on any other address: it speaks TCP to the
// guest.
//
//	client ── pasta ── tap ── server
func openPastaTap(tb testing.TB) *bed { return openPasta(tb) }

func openPasta(tb testing.TB) *bed {
	tb.Helper()
	b := openVeth(tb) // pasta copies address and default route of a host with a network
	b.client, _, _ = strings.Cut(gateway, "/")
	require.NoError(tb, b.host.Do(func() error {
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(node)})
	}))
	b.guest, b.server = datapathtest.NewNetNS(tb), "0.0.0.0"
	ports := fmt.Sprintf("%d:%d", b.port, guestPort)
	netns, err := os.Open(b.guest.Path())
	require.NoError(tb, err)
	defer netns.Close()
	cmd := exec.Command(find(tb, "pasta"), "-f", "-q", "-4", "--runas", "0", "--config-net", "-t", ports, "-u", ports,
		"--netns", "/proc/self/fd/3", "--no-netns-quit")
	cmd.ExtraFiles = []*os.File{netns} // as it may not look into other processes
	b.start(tb, cmd)
	b.await(tb)
	// It takes clients before it has set up the guest's link, and a SYN that is lost
	// there it never sends again. Routes come last.
	require.Eventually(tb, func() bool {
		var routes []netlink.Route
		err := b.guest.Do(func() (err error) {
			routes, err = netlink.RouteList(nil, syscall.AF_INET)
			return err
		})
		return err == nil && slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Gw != nil })
	}, 10*time.Second, 10*time.Millisecond, "the guest gets no route")
	return b
}

// openSlirp4netns is what rootless Docker and Podman have used for years.
//
//	client ── lo ── slirp4netns ── tap ── server
func openSlirp4netns(tb testing.TB) *bed {
	tb.Helper()
	b := &bed{
		host: datapathtest.NewNetNS(tb), guest: datapathtest.NewNetNS(tb),
		server: "0.0.0.0", serverPort: guestPort, client: "127.0.0.1", port: publishedPort,
	}
	api := socketPath(tb)
	b.start(tb, exec.Command(find(tb, "slirp4netns"), "--configure", fmt.Sprintf("--mtu=%d", hugeMTU), "--disable-dns",
		"--api-socket="+api, "--netns-type=path", b.guest.Path(), "tap0"))
	forward := func(proto string, from, to int) error {
		var err error
		for range 1000 { // it takes one client at a time, and resets others
			var answer []byte
			if answer, err = askSlirp(api, map[string]any{
				"proto": proto, "host_addr": b.client, "host_port": from, "guest_port": to,
			}); err != nil {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			if !bytes.Contains(answer, []byte(`"return"`)) {
				return fmt.Errorf("slirp4netns: %s", answer)
			}
			return nil
		}
		return err
	}
	b.publish = func(port int) error { return forward("tcp", port, port) }
	for _, proto := range []string{"tcp", "udp"} {
		require.NoError(tb, forward(proto, b.port, guestPort))
	}
	b.await(tb)
	return b
}

// askSlirp asks slirp4netns for a port.
func askSlirp(api string, hostfwd map[string]any) ([]byte, error) {
	c, err := net.Dial("unix", api)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := json.NewEncoder(c).Encode(map[string]any{"execute": "add_hostfwd", "arguments": hostfwd}); err != nil {
		return nil, err
	}
	answer, err := io.ReadAll(c)
	if err == nil && len(answer) == 0 {
		err = io.ErrUnexpectedEOF
	}
	return answer, err
}

// openGvproxy is what Podman's and other machines use: gVisor's stack like ours,
// over the link that its own forwarder makes in the guest.
//
//	client ── lo ── gvproxy ── unix socket ┊ forwarder ── tap ── server
//	                                       ┊ guest namespace
func openGvproxy(tb testing.TB) *bed { return openGvproxyAt(tb, 1500) } // as everybody runs it

// openGvproxyAt is gvproxy with an MTU. Its own is 1500; a guest could be told of more.
func openGvproxyAt(tb testing.TB, mtu int) *bed {
	tb.Helper()
	const guest = "192.168.127.2" // the only guest it has an address for
	b := &bed{
		host: datapathtest.NewNetNS(tb), guest: datapathtest.NewNetNS(tb),
		server: guest, serverPort: guestPort, client: "127.0.0.1", port: publishedPort,
	}
	api := socketPath(tb)
	b.start(tb, exec.Command(find(tb, "gvproxy"), "-listen", "unix://"+api, "-ssh-port", "-1", "-mtu", strconv.Itoa(mtu)))
	awaitSocket(tb, api)
	require.NoError(tb, b.guest.Do(func() error {
		link := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tap0"}, Mode: iffTAP}
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, mtu)
	}))
	setUp(tb, b.guest, "tap0", guest+"/24")
	startProgram(tb, b.guest, exec.Command(find(tb, "vm"), "-url", "unix://"+api, "-preexisting", "-mtu", strconv.Itoa(mtu+14))) // of a frame
	require.Eventually(tb, func() bool {                                                                                         // the forwarder has opened it
		return b.guest.Do(func() error {
			link, err := netlink.LinkByName("tap0")
			if err == nil && link.Attrs().RawFlags&iffLowerUp == 0 {
				err = errors.New("no carrier")
			}
			return err
		}) == nil
	}, 10*time.Second, 10*time.Millisecond, "the forwarder does not come")
	client := http.Client{Transport: &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", api) },
	}}
	tb.Cleanup(client.CloseIdleConnections)
	expose := func(proto string, from, to int) error {
		body, err := json.Marshal(map[string]string{
			"local": addrPort(b.client, from), "remote": addrPort(guest, to), "protocol": proto,
		})
		if err != nil {
			return err
		}
		resp, err := client.Post("http://gvproxy/services/forwarder/expose", "application/json", bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body) // or the connection is not used again
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("gvproxy: %s", resp.Status)
		}
		return nil
	}
	b.publish = func(port int) error { return expose("tcp", port, port) }
	for _, proto := range []string{"tcp", "udp"} {
		require.NoError(tb, expose(proto, b.port, guestPort))
	}
	b.await(tb)
	return b
}
