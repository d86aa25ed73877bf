package netstack

import (
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/tap"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

func init() { flowGuests = append(flowGuests, flowGuest{"linux", openLinuxGuest}) }

// A linuxConn is a connection of a Linux guest's.
type linuxConn struct{ *net.TCPConn }

func (c linuxConn) reset() {
	_ = c.SetLinger(0)
	_ = c.Close()
}

type linuxListener struct{ *net.TCPListener }

func (l linuxListener) Accept() (flowConn, error) {
	c, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return linuxConn{c}, c.SetDeadline(time.Now().Add(flowPatience))
}

// openLinuxGuest makes a namespace of the host's kernel the guest, behind a tap.
func openLinuxGuest(t testing.TB, _ int) (datapath.Attachment, func(uint16) (flowListener, error)) {
	_, err := os.Stat("/dev/net/tun")
	datapathtest.Require(t, "tun", err == nil, "modprobe tun")
	ns := datapathtest.NewNetNS(t)
	att, err := tap.Open(tap.Config{Name: "guest0", NetNS: ns.Path(), MTU: 1500})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, att.Close()) })
	require.NoError(t, ns.Do(func() error {
		link, err := netlink.LinkByName("guest0")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(guestAddr.String())
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	}))
	return att, func(port uint16) (l flowListener, err error) {
		err = ns.Do(func() error {
			n, err := net.Listen("tcp4", fmt.Sprint(guestAddr.Addr(), ":", port))
			if err == nil {
				l = linuxListener{n.(*net.TCPListener)}
			}
			return err
		})
		return l, err
	}
}
