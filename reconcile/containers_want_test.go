package reconcile

import (
	"context"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestContainersWants: what a container asks for, row by row.
func TestContainersWants(t *testing.T) {
	const reached, other, dead = "172.17.0.2", "172.18.0.2", "10.9.9.9"
	for _, test := range []struct {
		name     string
		bindings []docker.Binding
		unusable []docker.Unusable
		addrs    []string
		lan      bool
		specs    []string
		notes    []string
	}{
		{name: "nothing"},
		{name: "C-12: the node address and the engine's own port", bindings: []docker.Binding{tcp(8080, 80)}, specs: []string{"8080:8080/tcp"}},
		{
			name:     "C-5 FB-056: twins are one row",
			bindings: []docker.Binding{at("0.0.0.0", tcp(8080, 80)), at("::", tcp(8080, 80)), tcp(8080, 80)},
			specs:    []string{"8080:8080/tcp"},
		},
		{
			name:     "twins with numbers of their own are two",
			bindings: []docker.Binding{at("0.0.0.0", tcp(49153, 80)), at("::", tcp(49154, 80))},
			specs:    []string{"49153:49153/tcp", "49154:49154/tcp"},
		},
		{
			name:     "FB-044: tcp and udp on one number",
			bindings: []docker.Binding{tcp(5053, 53), over("udp", tcp(5053, 53))},
			specs:    []string{"5053:5053/tcp", "5053:5053/udp"},
		},
		{
			name:     "C-34: ranges count one by one",
			bindings: []docker.Binding{tcp(6000, 7000), tcp(6001, 7001), tcp(6002, 7002)},
			specs:    []string{"6000:6000/tcp", "6001:6001/tcp", "6002:6002/tcp"},
		},
		{
			name:     "C-35 FB-061: on the guest's loopback of either family",
			bindings: []docker.Binding{at("127.0.0.1", tcp(8080, 80)), at("::1", tcp(8080, 81)), at("::ffff:127.0.0.2", tcp(8080, 82))},
			addrs:    []string{reached},
			specs:    []string{"127.0.0.1:8080:172.17.0.2:80/tcp", "[::1]:8080:172.17.0.2:81/tcp", "127.0.0.2:8080:172.17.0.2:82/tcp"},
		},
		{
			name:     "FB-086: by reachability, not order",
			bindings: []docker.Binding{at("127.0.0.1", tcp(8080, 80))}, addrs: []string{dead, other},
			specs: []string{"127.0.0.1:8080:172.18.0.2:80/tcp"},
		},
		{
			name:     "C-35: the guest lets nobody through",
			bindings: []docker.Binding{at("127.0.0.1", tcp(8080, 80)), tcp(9090, 90)}, addrs: []string{dead},
			specs: []string{"9090:9090/tcp"},
			notes: []string{"failed tcp 127.0.0.1:8080 10.9.9.9:80 published on the VM's own loopback, which nothing outside the VM reaches, and the container's own port 80 does not answer; publish without 127.0.0.1: -p 8080:80"},
		},
		{
			name:     "C-35: without an address of its own",
			bindings: []docker.Binding{at("::1", over("udp", tcp(53, 5353)))},
			notes:    []string{"failed udp [::1]:53 10.0.2.2:53 published on the VM's own loopback, which nothing outside the VM reaches, and the container's own port 5353 does not answer; publish without ::1: -p 53:5353/udp"},
		},
		{
			name:     "C-35: nothing can be said of a UDP port that is silent",
			bindings: []docker.Binding{at("127.0.0.1", over("udp", tcp(53, 53)))}, addrs: []string{dead},
			specs: []string{"127.0.0.1:53:10.9.9.9:53/udp"},
		},
		{
			name:     "an address that no packet can be meant for",
			bindings: []docker.Binding{at("127.0.0.1", tcp(8080, 80))}, addrs: []string{"127.0.0.1", "fe80::1", "224.0.0.1", "0.0.0.0"},
			notes: []string{"failed tcp 127.0.0.1:8080 10.0.2.2:8080 published on the VM's own loopback, which nothing outside the VM reaches, and the container's own port 80 does not answer; publish without 127.0.0.1: -p 8080:80"},
		},
		{
			name:     "C-6 FB-065: the guest's own address means the policy's",
			bindings: []docker.Binding{at("10.0.2.2", tcp(8080, 80)), at("0.0.0.0", tcp(8080, 80))},
			specs:    []string{"8080:8080/tcp"},
		},
		{
			name:     "C-6: no other address of the host's",
			bindings: []docker.Binding{at("192.0.2.1", tcp(8080, 80)), tcp(9090, 90)},
			specs:    []string{"9090:9090/tcp"},
			notes:    []string{"skipped tcp 192.0.2.1:8080 10.0.2.2:8080 host address 192.0.2.1 was asked for from inside the VM; only loopback is given to a VM unless exposeToLAN is on"},
		},
		{
			name:     "C-6: but with exposeToLAN, where the host has it",
			bindings: []docker.Binding{at("192.0.2.1", tcp(8080, 80)), at("192.0.2.2", tcp(8080, 80))}, lan: true,
			specs: []string{"192.0.2.1:8080:8080/tcp"},
			notes: []string{"skipped tcp 192.0.2.2:8080 10.0.2.2:8080 host address 192.0.2.2 was asked for from inside the VM; the host has no such address"},
		},
		{
			name:     "sctp",
			bindings: []docker.Binding{over("sctp", tcp(132, 132)), tcp(9090, 90)},
			specs:    []string{"9090:9090/tcp"},
			notes:    []string{"skipped sctp 127.0.0.1:132 10.0.2.2:132 sctp is not carried, only tcp and udp are"},
		},
		{
			name:     "C-34 FB-094: entries that lead nowhere",
			bindings: []docker.Binding{tcp(9090, 90)},
			unusable: []docker.Unusable{{Proto: "tcp", Port: 80, Reason: "no host port"}, {Proto: "udp", Port: 80, Reason: "no host port"}, {Reason: "impossible port"}},
			specs:    []string{"9090:9090/tcp"},
			notes:    []string{"skipped tcp  :80 no host port", "skipped udp  :80 no host port", "skipped    impossible port"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ct := run("a", 0, test.bindings...)
				ct.Unusable, ct.Addrs = test.unusable, nil
				for _, a := range test.addrs {
					ct.Addrs = append(ct.Addrs, netip.MustParseAddr(a))
				}
				b := newContainersBed(t, newEngine(ct), func(o *ContainersOptions) {
					o.Policy.ExposeToLAN = test.lan
					o.HostAddr = func(a netip.Addr) bool { return a == netip.MustParseAddr("192.0.2.1") }
					o.Reach = func(_ context.Context, to netip.AddrPort) error {
						switch to.Addr().String() {
						case reached:
							return nil
						case other:
							return fmt.Errorf("dial: %w", syscall.ECONNREFUSED) // C-35: it does not listen yet
						}
						return context.DeadlineExceeded
					}
				})
				var specs []string
				for _, row := range b.after(time.Second) {
					specs = append(specs, row[len("a "):])
				}
				assert.ElementsMatch(t, test.specs, specs)
				var notes []string
				for _, n := range b.loop.Notes() {
					notes = append(notes, fmt.Sprintf("%s %s %s %s %s", n.State, n.Protocol, n.Host, n.Guest, n.Detail))
				}
				assert.ElementsMatch(t, test.notes, notes)
				for _, s := range b.pub.rows[listener.Owner{Kind: listener.KindDocker, ID: "a", VM: "default"}] {
					assert.Equal(t, "default", s.Target.VM)
					assert.NoError(t, s.Validate())
				}
			})
		})
	}
}

// TestContainersOrder: C-3, of two that want one port the one that was started
// first asks first.
func TestContainersOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(run("c", 1, tcp(80, 80)), run("a", 2, tcp(80, 80)), run("b", 2, tcp(80, 80)), run("d", 0, tcp(80, 80)))
		b := newContainersBed(t, e)
		b.after(time.Second)
		assert.Equal(t, []string{"publish d", "publish c", "publish a", "publish b"}, b.pub.takeCalls())
	})
}

// TestContainersNames: C-37, C-32.
func TestContainersNames(t *testing.T) {
	web, alias := run("web", 0, tcp(8080, 80), tcp(8081, 80), over("udp", tcp(8080, 53))), run("alias", 1)
	web.Name, alias.Name = "My_Web.1", "alias"
	alias.Project, alias.Service = "Shop", "DB"
	bad := run("bad", 2, tcp(9090, 90))
	bad.Name = "a..b"
	bad.Project, bad.Service = "shop", "db"

	t.Run("host", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newContainersBed(t, newEngine(web, alias, bad))
			b.after(time.Second)
			both := "[127.0.0.1 ::1]"
			for name, want := range map[string]string{
				"my_web.1": both, "x.my_web.1": both, "1": "[]", "alias": both, "db.shop": both, "db": "no such name", "a..b": "no such name",
			} {
				assert.Equal(t, want, leads(b.loop.Names(), name), name)
			}
			assert.Equal(t, "bad", b.loop.Names().Views()[1].Owners[0].ID, "a shared name leads to the newest")
			notes := b.loop.Notes()
			require.Len(t, notes, 1)
			assert.Equal(t, `"a..b" is no name for DNS: a part between dots is empty`, notes[0].Detail)
			b.stop("alias")
			b.after(time.Second)
			assert.Equal(t, "no such name", leads(b.loop.Names(), "alias"), "C-32: reclaimed like any other")
			assert.Equal(t, both, leads(b.loop.Names(), "db.shop"), "another has it")
			b.loop.DropVM("default")
			assert.Empty(t, b.loop.Names().Views())
		})
	})

	t.Run("loopback", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			addresses := NewAddresses()
			b := newContainersBed(t, newEngine(web, alias, bad), func(o *ContainersOptions) { o.Addresses = addresses })
			rows := b.after(time.Second)
			own := b.src.ownAddress(t, addresses, "web")
			for _, want := range []string{
				"web 8080:8080/tcp", "web 8081:8081/tcp", "web 8080:8080/udp",
				"web " + own + ":53:8080/udp",
				"web " + own + ":80:8080/tcp", // one of the two host ports that lead there
			} {
				assert.Contains(t, rows, want)
			}
			assert.Len(t, rows, 5+2)
			assert.Equal(t, "["+own+"]", leads(b.loop.Names(), "my_web.1"))
			aliased := b.src.ownAddress(t, addresses, "alias")
			assert.Equal(t, "["+aliased+"]", leads(b.loop.Names(), "alias"))
			assert.NotEqual(t, own, aliased)

			// Freed with the owner, the same when it is back.
			b.stop("web", "alias")
			b.after(time.Second)
			assert.Len(t, addresses.held, 1)
			b.start(web)
			assert.Contains(t, b.after(time.Second), "web "+own+":80:8080/tcp")
			b.loop.DropVM("default")
			b.after(time.Second)
			assert.Empty(t, addresses.held)
			assert.Empty(t, addresses.taken)
		})
	})

	t.Run("none left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			addresses := NewAddresses()
			for i := range ownAddresses {
				addresses.taken[uint16(i+1)] = dockerOwner("other")
			}
			b := newContainersBed(t, newEngine(web), func(o *ContainersOptions) { o.Addresses = addresses })
			assert.Len(t, b.after(time.Second), 3)
			assert.Equal(t, "[127.0.0.1 ::1]", leads(b.loop.Names(), "my_web.1"))
			require.Len(t, b.loop.Notes(), 1)
			assert.Equal(t, "no loopback address of its own is left in 127.77.0.0/16; its names lead to 127.0.0.1", b.loop.Notes()[0].Detail)
		})
	})
}

// TestOwnAddressesAreNotAskedFor: a guest must not take the place where the name
// of another VM's container leads, nor wait in line for it.
func TestOwnAddressesAreNotAskedFor(t *testing.T) {
	answers := func(context.Context, netip.AddrPort) error { return nil }
	synctest.Test(t, func(t *testing.T) {
		thief := run("thief", 0, at("127.77.1.2", tcp(80, 8080)), at("::ffff:127.77.1.3", tcp(80, 8080)), at("127.76.1.2", tcp(80, 8080)))
		thief.Addrs = []netip.Addr{netip.MustParseAddr("172.17.0.2")}
		addresses := NewAddresses()
		b := newContainersBed(t, newEngine(thief), func(o *ContainersOptions) { o.Addresses, o.Reach = addresses, answers })
		rows := b.after(time.Second)
		own := b.src.ownAddress(t, addresses, "thief")
		assert.ElementsMatch(t, []string{"thief 127.76.1.2:80:172.17.0.2:8080/tcp", "thief " + own + ":8080:172.17.0.2:8080/tcp"}, rows)
		require.Len(t, b.loop.Notes(), 2)
		assert.Equal(t, listener.Skipped, b.loop.Notes()[0].State)
		assert.Equal(t, "host address 127.77.1.2 was asked for from inside the VM; culvert gives the addresses of 127.77.0.0/16 to containers itself", b.loop.Notes()[0].Detail)
	})
	synctest.Test(t, func(t *testing.T) { // where names lead elsewhere they are addresses like others
		ct := run("a", 0, at("127.77.1.2", tcp(80, 8080)))
		ct.Addrs = []netip.Addr{netip.MustParseAddr("172.17.0.2")}
		b := newContainersBed(t, newEngine(ct), func(o *ContainersOptions) { o.Reach = answers })
		assert.Equal(t, []string{"a 127.77.1.2:80:172.17.0.2:8080/tcp"}, b.after(time.Second))
	})
}

// ownAddress returns the address that a container has.
func (c *Containers) ownAddress(t *testing.T, a *Addresses, id string) string {
	t.Helper()
	addr, ok := a.Acquire(c.owner(id))
	require.True(t, ok)
	a.Release(c.owner(id))
	return addr.String()
}
