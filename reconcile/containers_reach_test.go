package reconcile

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestContainersPinned: C-35 over time.
func TestContainersPinned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := netip.MustParseAddr("10.1.1.2"), netip.MustParseAddr("172.17.0.2")
		up := map[netip.Addr]bool{}
		var mu sync.Mutex
		asked, under, most := 0, 0, 0
		set := func(a netip.Addr, is bool) { mu.Lock(); up[a] = is; mu.Unlock() }
		ct := run("a", 0, at("127.0.0.1", tcp(8080, 80)))
		ct.Addrs = []netip.Addr{first, second}
		b := newContainersBed(t, newEngine(ct), func(o *ContainersOptions) {
			o.Reach = func(ctx context.Context, to netip.AddrPort) error {
				mu.Lock()
				asked++
				under++
				most = max(most, under)
				is := up[to.Addr()]
				mu.Unlock()
				defer func() { mu.Lock(); under--; mu.Unlock() }()
				if is {
					return nil
				}
				<-ctx.Done() // a firewall that drops
				return ctx.Err()
			}
		})
		state := func() string {
			var s string
			for _, n := range b.loop.Notes() {
				s += n.State.String()
			}
			return s
		}
		assert.Empty(t, b.after(500*time.Millisecond))
		assert.Equal(t, "pending", state(), "as long as it is not known")
		assert.Empty(t, b.after(time.Second))
		assert.Equal(t, "failed", state())
		assert.WithinDuration(t, time.Now().Add(containersEvery), b.loop.Notes()[0].RetryAt, 3*time.Second)

		set(second, true)
		assert.Equal(t, []string{"a 127.0.0.1:8080:172.17.0.2:80/tcp"}, b.after(32*time.Second))
		assert.Equal(t, "", state())
		set(first, true)
		b.pub.takeCalls()
		assert.Equal(t, []string{"a 127.0.0.1:8080:172.17.0.2:80/tcp"}, b.after(50*time.Second), "what answers stays")
		set(second, false)
		b.after(30 * time.Second)
		set(second, true)
		assert.Equal(t, []string{"a 127.0.0.1:8080:172.17.0.2:80/tcp"}, b.after(70*time.Second), "one miss is none")
		assert.NotContains(t, b.pub.takeCalls(), "withdraw a")
		set(second, false)
		assert.Equal(t, []string{"a 127.0.0.1:8080:10.1.1.2:80/tcp"}, b.after(65*time.Second))
		set(first, false)
		assert.Empty(t, b.after(65*time.Second))
		assert.Equal(t, "failed", state())
		mu.Lock()
		assert.Less(t, asked, 2*13, "a round each 30 s, and one at set-up")
		mu.Unlock()

		// The engine is away as its VM is paused: nothing is asked, nothing closes.
		set(first, true)
		require.Len(t, b.after(35*time.Second), 1)
		set(first, false)
		b.set(func() { b.fails = errBoom })
		assert.Len(t, b.after(time.Hour), 1)
		b.set(func() { b.fails = nil })

		// Many at once: so many at a time.
		many := run("many", 1)
		for i := range 200 {
			many.Bindings = append(many.Bindings, at("127.0.0.1", tcp(uint16(10000+i), uint16(1000+i))))
		}
		many.Addrs = []netip.Addr{second}
		set(second, true)
		set(first, true)
		b.start(many)
		assert.Len(t, b.after(5*time.Second), 201)
		assert.LessOrEqual(t, most, reachAtOnce)
	})
}

// TestContainersFB086: in whatever order the addresses come, the one that answers
// is dialled; with 50 shuffles and no word of the probes' in between.
func TestContainersFB086(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		internal, bridge := netip.MustParseAddr("10.1.1.2"), netip.MustParseAddr("172.17.0.2")
		ct := run("a", 0, at("127.0.0.1", tcp(8080, 80)), tcp(9090, 90))
		ct.Addrs = []netip.Addr{internal, bridge}
		e := newEngine(ct)
		b := newContainersBed(t, e, func(o *ContainersOptions) {
			o.Reach = func(_ context.Context, to netip.AddrPort) error {
				if to.Addr() == bridge {
					return nil
				}
				return syscall.EHOSTUNREACH
			}
		})
		random := rand.New(rand.NewPCG(86, 1))
		for range 50 {
			ct.Addrs = slices.Clone(ct.Addrs)
			random.Shuffle(2, func(i, j int) { ct.Addrs[i], ct.Addrs[j] = ct.Addrs[j], ct.Addrs[i] })
			e.start(ct)
			assert.Equal(t, []string{"a 127.0.0.1:8080:172.17.0.2:80/tcp", "a 9090:9090/tcp"}, b.after(time.Second))
		}
		assert.Zero(t, b.log.lines("withdrawn"))
	})
}

// TestContainersFB091: containers that swapped their addresses are reached at
// those of the listing.
func TestContainersFB091(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, c := run("a", 0, at("127.0.0.1", tcp(8080, 80))), run("c", 1, at("127.0.0.1", tcp(8081, 80)))
		c.Addrs = []netip.Addr{netip.MustParseAddr("172.17.0.3")}
		e := newEngine(a, c)
		b := newContainersBed(t, e, func(o *ContainersOptions) {
			o.Reach = func(context.Context, netip.AddrPort) error { return nil }
		})
		assert.Equal(t, []string{"a 127.0.0.1:8080:172.17.0.2:80/tcp", "c 127.0.0.1:8081:172.17.0.3:80/tcp"}, b.after(time.Second))
		e.cut(true)
		a.Addrs, c.Addrs = c.Addrs, a.Addrs
		e.set(func() { e.running["a"], e.running["c"] = a, c })
		e.cut(false)
		assert.Equal(t, []string{"a 127.0.0.1:8080:172.17.0.3:80/tcp", "c 127.0.0.1:8081:172.17.0.2:80/tcp"}, b.after(time.Second))
	})
}
