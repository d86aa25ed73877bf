package reconcile

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/culvertnet/culvert/guest/kube"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fakeCluster is a cluster that says what it is given, and cannot be followed
// any more when it is told to.
type fakeCluster struct {
	say  chan kube.Update
	fail chan error
}

var (
	_ cluster = (*fakeCluster)(nil)
	_ cluster = (*kube.Client)(nil)
	_ Source  = (*Services)(nil)
)

func newFakeCluster() *fakeCluster {
	return &fakeCluster{say: make(chan kube.Update), fail: make(chan error)}
}

func (c *fakeCluster) Endpoint() string { return "https://10.0.2.2:6443" }

func (c *fakeCluster) Follow(ctx context.Context, told func(kube.Update)) error {
	for {
		select {
		case u := <-c.say:
			told(u)
		case err := <-c.fail:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// list says that these are all Services there are, and waits until that has
// been heard of.
func (c *fakeCluster) list(services ...kube.Service) {
	c.say <- kube.Update{Services: services}
	synctest.Wait()
}

const clusterVM = "vm"

var (
	clusterNode    = netip.MustParseAddr("10.0.2.2")
	clusterGateway = netip.MustParseAddr("10.0.2.1")
)

func newServices(tb testing.TB, c cluster, change ...func(*ServicesOptions)) (*Services, *logBuffer) {
	tb.Helper()
	log, lines := newLog()
	o := ServicesOptions{
		VM: clusterVM, Generation: 1, Cluster: c,
		Node: clusterNode, Gateway: clusterGateway, Log: log,
	}
	for _, f := range change {
		f(&o)
	}
	return NewServices(o), lines
}

func nodePorts(o *ServicesOptions) { o.Reach = ReachNodePort }

// inCluster runs f with a loop that follows a cluster.
func inCluster(t *testing.T, pub Publisher, f func(t *testing.T, l *Loop, s *Services, c *fakeCluster, log *logBuffer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		logger, _ := newLog()
		l := NewLoop(pub, logger)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx) }()
		c := newFakeCluster()
		s, log := newServices(t, c)
		l.AddSource(clusterVM, 1, s)
		f(t, l, s, c, log)
		cancel()
		require.NoError(t, <-ended)
	})
}

// since is the age of the cluster's objects: seconds after it was made.
func since(seconds int) time.Time { return time.Unix(1700000000+int64(seconds), 0) }

// balanced makes a Service of type LoadBalancer that k3s' servicelb has
// published on the node. Ports are "80", "80/UDP" or "80/TCP=30080" with a
// NodePort.
func balanced(tb testing.TB, name string, ports ...string) kube.Service {
	tb.Helper()
	svc := kube.Service{
		Namespace: "default", Name: name, UID: "uid-" + name, Created: since(0), LoadBalancer: true,
		Ingress: []kube.Ingress{{IP: clusterNode.String(), Mode: "VIP"}},
	}
	for _, text := range ports {
		p := kube.Port{Protocol: "TCP"}
		text, nodePort, _ := strings.Cut(text, "=")
		text, proto, _ := strings.Cut(text, "/")
		if proto != "" {
			p.Protocol = proto
		}
		_, err := fmt.Sscan(text, &p.Number)
		require.NoError(tb, err)
		if nodePort != "" {
			_, err = fmt.Sscan(nodePort, &p.NodePort)
			require.NoError(tb, err)
		}
		svc.Ports = append(svc.Ports, p)
	}
	return svc
}

// with returns svc with a change.
func with(svc kube.Service, change func(*kube.Service)) kube.Service {
	change(&svc)
	return svc
}

func aged(svc kube.Service, seconds int) kube.Service {
	svc.Created = since(seconds)
	return svc
}

// lines writes wants as "id spec" or "id state: detail".
func lines(wants []Want) []string {
	texts := []string{}
	for _, w := range wants {
		for _, s := range w.Specs {
			texts = append(texts, w.Owner.ID+" "+s.String())
		}
		for _, n := range w.Notes {
			texts = append(texts, w.Owner.ID+" "+n.State.String()+": "+n.Detail)
		}
	}
	return texts
}

// Where a Service leads follows from what its ingress says (C-42, FB-109).
func TestFB109Ingress(t *testing.T) {
	const (
		pending   = "default/web:80/TCP pending: waiting for the cluster's load balancer: no ingress address yet"
		node      = "default/web:80/TCP 80:80/tcp"
		foreign   = "default/web:80/TCP 80:192.168.5.7:80/tcp"
		skipped   = "default/web:80/TCP skipped: the cluster's load balancer reports "
		proxyMode = skipped + "192.168.5.7, which is not the node's, with ipMode Proxy: the node leads nothing there by itself; reach: nodeport does without"
	)
	type list = []kube.Ingress
	for _, c := range []struct {
		name    string
		ingress list
		want    string
	}{
		{"none", nil, pending},
		{"an empty entry", list{{}, {Mode: "VIP"}}, pending},
		{"the node's IP", list{{IP: "10.0.2.2"}}, node},
		{"the node's IP by proxy, as servicelb says", list{{IP: "10.0.2.2", Mode: "Proxy"}}, node},
		{"the node's IP in IPv6 clothes", list{{IP: "::ffff:10.0.2.2"}}, node},
		{"both of the node's addresses", list{{IP: "fd00::2"}, {IP: "10.0.2.2"}}, node},
		{"a host name", list{{Hostname: "k3s-server"}}, node},
		{"a host name that is an IP", list{{Hostname: "192.168.5.7"}}, foreign},
		{"a host name that is the node's IP", list{{Hostname: "10.0.2.2"}}, node},
		{"both: the IP decides", list{{IP: "192.168.5.7", Hostname: "k3s-server"}}, foreign},
		{"another IP", list{{IP: "192.168.5.7"}}, foreign},
		{"several nodes", list{{IP: "192.168.5.7"}, {IP: "192.168.5.8"}, {IP: "10.0.2.2"}}, node},
		{"several others", list{{IP: "192.168.5.9"}, {IP: "192.168.5.7"}, {IP: "192.168.5.8"}}, foreign},
		{"an IP before a host name", list{{Hostname: "lb"}, {IP: "192.168.5.7"}}, foreign},
		{"both families", list{{IP: "fd00::7"}, {IP: "192.168.5.7"}}, foreign},
		{"IPv6 alone", list{{IP: "fd00::7"}}, skipped + "fd00::7, and this version reaches the guest over IPv4 only"},
		{"IPv6 and a host name", list{{IP: "fd00::7"}, {Hostname: "k3s-server"}}, node},
		{"a proxy elsewhere", list{{IP: "192.168.5.7", Mode: "Proxy"}}, proxyMode},
		{"a proxy elsewhere beside a VIP", list{{IP: "192.168.5.6", Mode: "Proxy"}, {IP: "192.168.5.7", Mode: "VIP"}}, foreign},
		{"loopback", list{{IP: "127.0.0.1"}}, skipped + "127.0.0.1, the guest's own loopback, which no packet from outside reaches"},
		{"IPv6 loopback", list{{IP: "::1"}}, skipped + "::1, the guest's own loopback, which no packet from outside reaches"},
		{"unspecified", list{{IP: "0.0.0.0"}}, skipped + "0.0.0.0, which is no single host's address"},
		{"multicast", list{{IP: "224.0.0.1"}}, skipped + "224.0.0.1, which is no single host's address"},
		{"broadcast", list{{IP: "255.255.255.255"}}, skipped + "255.255.255.255, which is no single host's address"},
		{"culvert itself", list{{IP: "10.0.2.1"}}, skipped + "10.0.2.1, culvert's own address on the VM's link"},
		{"no address", list{{IP: "10.0.2"}}, skipped + `"10.0.2", which is no IP address`},
		{"no address beside one", list{{IP: "x"}, {IP: "192.168.5.7"}}, foreign},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, _ := newServices(t, newFakeCluster())
			svc := with(balanced(t, "web", "80"), func(svc *kube.Service) { svc.Ingress = c.ingress })
			wants, _, _ := s.wants([]kube.Service{svc})
			assert.Equal(t, []string{c.want}, lines(wants))
			slices.Reverse(svc.Ingress)
			wants, _, _ = s.wants([]kube.Service{svc})
			assert.Equal(t, []string{c.want}, lines(wants), "in the other order")
		})
	}
}

// What else a Service says decides as well (C-40, C-41, C-45).
func TestServiceWants(t *testing.T) {
	cluster := func(o *ServicesOptions) {}
	type edit = func(*kube.Service)
	for _, c := range []struct {
		name    string
		options func(*ServicesOptions)
		ports   []string
		edit    edit
		want    []string
	}{
		{"FB-104: a left-over status", cluster, []string{"80"}, func(s *kube.Service) { s.LoadBalancer = false }, []string{}},
		{"no ports", cluster, nil, nil, []string{}},
		{"FB-105: one number in two protocols", cluster, []string{"53", "53/UDP"}, nil, []string{"default/web:53/TCP 53:53/tcp", "default/web:53/UDP 53:53/udp"}},
		{"FB-107: protocols nobody carries", cluster, []string{"80", "3868/SCTP", "9/WARP"}, nil, []string{
			"default/web:80/TCP 80:80/tcp",
			"default/web:3868/SCTP skipped: protocol SCTP not supported", "default/web:9/WARP skipped: protocol WARP not supported",
		}},
		{"no protocol is TCP", cluster, []string{"80"}, func(s *kube.Service) { s.Ports[0].Protocol = "" }, []string{"default/web:80/TCP 80:80/tcp"}},
		{"what can be no part of a key", cluster, []string{"80/a:b", "80/" + strings.Repeat("X", 17), "0", "81", "81"}, nil, []string{"default/web:81/TCP 81:81/tcp"}},
		{"FB-113: a range that cannot be read", cluster, []string{"80", "9/SCTP"}, func(s *kube.Service) { s.SourceRanges = []string{"10.0.0.0/8", "10.9"} }, []string{
			`default/web:80/TCP failed: loadBalancerSourceRanges: "10.9" is no address prefix`, "default/web:9/SCTP skipped: protocol SCTP not supported",
		}},
		{"FB-113: ranges without end", cluster, []string{"80"}, func(s *kube.Service) { s.SourceRanges = make([]string, 257) }, []string{
			"default/web:80/TCP failed: loadBalancerSourceRanges has 257 entries, more than 256",
		}},
		{"reach: nodeport", nodePorts, []string{"80=30080", "53/UDP=30053"}, func(s *kube.Service) { s.Ingress = nil }, []string{
			"default/web:80/TCP 80:30080/tcp", "default/web:53/UDP 53:30053/udp",
		}},
		{"reach: nodeport without one", nodePorts, []string{"80"}, nil, []string{
			"default/web:80/TCP skipped: it has no node port, which reach: nodeport is led to (allocateLoadBalancerNodePorts is false)",
		}},
		{"a node port is not what else is dialled", cluster, []string{"80=30080"}, nil, []string{"default/web:80/TCP 80:80/tcp"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, _ := newServices(t, newFakeCluster(), c.options)
			svc := balanced(t, "web", c.ports...)
			if c.edit != nil {
				c.edit(&svc)
			}
			wants, _, left := s.wants([]kube.Service{svc})
			assert.Equal(t, c.want, lines(wants))
			assert.Zero(t, left)
			for _, w := range wants {
				assert.Equal(t, clusterVM, w.Owner.VM)
				assert.Equal(t, listener.KindKubernetes, w.Owner.Kind)
				for _, spec := range w.Specs {
					assert.NoError(t, spec.Validate())
					assert.Equal(t, clusterVM, spec.Target.VM)
				}
				for _, n := range w.Notes {
					assert.NotEmpty(t, n.Host)
					assert.Zero(t, n.RetryAt, "only a bind is tried again")
				}
			}
		})
	}
}

// C-45: who may connect is the listener's to check.
func TestFB113SourceRanges(t *testing.T) {
	for _, c := range []struct {
		ranges []string
		want   listener.Prefixes
	}{
		{nil, ""},
		{[]string{"10.9.0.0/16"}, "10.9.0.0/16"},
		{[]string{" 10.9.1.2/16 ", "fd00::/8", "10.9.0.0/16"}, "10.9.0.0/16,fd00::/8"},
		{[]string{"10.9.0.0/16", "0.0.0.0/0"}, ""},
		{[]string{"::/0"}, ""},
	} {
		s, _ := newServices(t, newFakeCluster())
		wants, _, _ := s.wants([]kube.Service{with(balanced(t, "web", "80"), func(s *kube.Service) { s.SourceRanges = c.ranges })})
		require.Len(t, wants[0].Specs, 1)
		assert.Equal(t, c.want, wants[0].Specs[0].Allow, c.ranges)
	}
}

func TestServicePort(t *testing.T) {
	for _, p := range []ServicePort{{"default", "web", 80, "TCP"}, {"kube-system", "dns", 65535, "SCTP"}} {
		got, err := ParseServicePort(p.String())
		require.NoError(t, err)
		assert.Equal(t, p, got)
	}
	for _, id := range []string{"", "default/web", "default/web:80", "web:80/TCP", "default/web:65536/TCP", "default/web:x/TCP"} {
		_, err := ParseServicePort(id)
		assert.Error(t, err, id)
	}
}

// tablePublisher is a Publisher that gives ports as the Forwarder does, by the
// listener.Table.
type tablePublisher struct {
	mu    sync.Mutex
	table *listener.Table
	rows  map[listener.Owner][]listener.Spec
}

func newTablePublisher() *tablePublisher {
	return &tablePublisher{table: listener.NewTable(listener.Policy{}), rows: make(map[listener.Owner][]listener.Spec)}
}

func (p *tablePublisher) Publish(_ context.Context, o listener.Owner, specs []listener.Spec) []listener.Outcome {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.table.Claim(o, specs)
	p.rows[o] = specs
	if len(specs) == 0 {
		delete(p.rows, o)
	}
	return make([]listener.Outcome, len(specs))
}

func (p *tablePublisher) Withdraw(ctx context.Context, o listener.Owner) { p.Publish(ctx, o, nil) }

func (p *tablePublisher) Owners() []listener.Owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	owners := []listener.Owner{}
	for o := range p.rows {
		owners = append(owners, o)
	}
	return owners
}

// open returns who has its ports, and whom the others wait for: "default/a:80/TCP"
// and "default/b:80/TCP after default/a:80/TCP", sorted.
func (p *tablePublisher) open() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := []string{}
	for o, specs := range p.rows {
		for _, s := range specs {
			line := o.ID
			var conflict *listener.ConflictError
			if errors.As(p.table.Conflict(o, s), &conflict) {
				line += " after " + conflict.Holder.Owner.ID
			}
			all = append(all, line)
		}
	}
	slices.Sort(all)
	return all
}

// FB-100: the older Service has the port, in whatever order they are listed and
// however often the daemon starts anew.
func TestFB100OlderFirst(t *testing.T) {
	a, b, c := aged(balanced(t, "a", "80"), 1), balanced(t, "b", "80"), aged(balanced(t, "c", "80"), 1)
	services := []kube.Service{a, b, c}
	for i := range 12 {
		rand.New(rand.NewPCG(100, uint64(i))).Shuffle(3, func(i, j int) { services[i], services[j] = services[j], services[i] })
		pub := newTablePublisher()
		inCluster(t, pub, func(t *testing.T, _ *Loop, _ *Services, cl *fakeCluster, _ *logBuffer) {
			cl.list(services...)
			assert.Equal(t, []string{"default/a:80/TCP after default/b:80/TCP", "default/b:80/TCP", "default/c:80/TCP after default/b:80/TCP"}, pub.open())
			cl.list(a, c) // of one second: by name
			assert.Equal(t, []string{"default/a:80/TCP", "default/c:80/TCP after default/a:80/TCP"}, pub.open())
		})
	}
}

// A live forward is never evicted, not by an older Service either; FB-101: who
// waits takes over, and who comes back waits.
func TestFB101NoTheft(t *testing.T) {
	a, b := balanced(t, "a", "80"), aged(balanced(t, "b", "80"), 1)
	waiting := with(a, func(s *kube.Service) { s.Ingress = nil })
	pub := newTablePublisher()
	inCluster(t, pub, func(t *testing.T, l *Loop, _ *Services, c *fakeCluster, _ *logBuffer) {
		c.list(waiting, b)
		assert.Equal(t, []string{"default/b:80/TCP"}, pub.open(), "a pending Service takes no port")
		require.Len(t, l.Notes(), 1)
		assert.Equal(t, listener.Pending, l.Notes()[0].State)

		c.list(a, b)
		assert.Equal(t, []string{"default/a:80/TCP after default/b:80/TCP", "default/b:80/TCP"}, pub.open())
		assert.Empty(t, l.Notes())

		c.list(a)
		assert.Equal(t, []string{"default/a:80/TCP"}, pub.open())
		c.list(a, b)
		assert.Equal(t, []string{"default/a:80/TCP", "default/b:80/TCP after default/a:80/TCP"}, pub.open())
	})
}

// FB-102: a Service made again under its name is another one: it does not have
// its predecessor's place before one that waits, whichever of the events got
// lost. 200 random histories.
func TestFB102MadeAgain(t *testing.T) {
	for seed := range 200 {
		random := rand.New(rand.NewPCG(102, uint64(seed)))
		a, b := balanced(t, "a", "80"), aged(balanced(t, "b", "80"), 1)
		again := with(aged(a, 2), func(s *kube.Service) {
			s.UID = "another"
			s.Ports = slices.Clone(s.Ports)
			if random.IntN(2) == 0 {
				s.Ports = append(s.Ports, kube.Port{Number: 81, Protocol: "TCP"})
			}
		})
		pub := newTablePublisher()
		inCluster(t, pub, func(t *testing.T, _ *Loop, _ *Services, c *fakeCluster, _ *logBuffer) {
			shuffled := func(services ...kube.Service) []kube.Service {
				random.Shuffle(len(services), func(i, j int) { services[i], services[j] = services[j], services[i] })
				return services
			}
			c.list(shuffled(a, b)...)
			require.Equal(t, []string{"default/a:80/TCP", "default/b:80/TCP after default/a:80/TCP"}, pub.open())
			switch random.IntN(3) {
			case 0: // the deletion is seen
				c.list(b)
			case 1: // it is made again before its load balancer knows it
				c.list(shuffled(with(again, func(s *kube.Service) { s.Ingress = nil }), b)...)
			}
			c.list(shuffled(again, b)...)
			want := []string{"default/a:80/TCP after default/b:80/TCP", "default/b:80/TCP"}
			if len(again.Ports) == 2 {
				want = []string{"default/a:80/TCP after default/b:80/TCP", "default/a:81/TCP", "default/b:80/TCP"}
			}
			require.Equal(t, want, pub.open(), "seed %d", seed)
			c.list(again)
			require.NotContains(t, pub.open(), "default/a:80/TCP after default/b:80/TCP")
			require.Contains(t, pub.open(), "default/a:80/TCP", "exactly one listener, the new one's")
		})
	}
}

// A Service that is made again together with one that is older than it now and
// one that is younger: in one listing the oldest has the port.
func TestFB102MadeAgainAmongNewOnes(t *testing.T) {
	a := balanced(t, "a", "81")
	again := with(aged(balanced(t, "a", "80"), 5), func(s *kube.Service) { s.UID = "another" })
	pub := newTablePublisher()
	inCluster(t, pub, func(t *testing.T, _ *Loop, _ *Services, c *fakeCluster, _ *logBuffer) {
		c.list(a)
		c.list(aged(balanced(t, "young", "80"), 6), again)
		assert.Equal(t, []string{"default/a:80/TCP", "default/young:80/TCP after default/a:80/TCP"}, pub.open())
	})
	pub = newTablePublisher()
	inCluster(t, pub, func(t *testing.T, _ *Loop, _ *Services, c *fakeCluster, _ *logBuffer) {
		c.list(a)
		c.list(aged(balanced(t, "old", "80"), 4), again)
		assert.Equal(t, []string{"default/a:80/TCP after default/old:80/TCP", "default/old:80/TCP"}, pub.open())
	})
}

// FB-103: the type decides; the rest of the object does not matter. FB-106: the
// name of a port is a label.
func TestFB103FB106Edits(t *testing.T) {
	pub := newPublisher()
	inCluster(t, pub, func(t *testing.T, l *Loop, _ *Services, c *fakeCluster, _ *logBuffer) {
		web := balanced(t, "web", "80", "53/UDP")
		open := []string{"default/web:53/UDP 53:53/udp", "default/web:80/TCP 80:80/tcp"}
		for range 20 {
			c.list(web)
			assert.Equal(t, open, pub.has())
			c.list(with(web, func(s *kube.Service) { s.LoadBalancer = false }))
			assert.Empty(t, pub.has())
		}
		c.list(web)
		pub.takeCalls()

		renamed := with(web, func(s *kube.Service) { s.Ports = slices.Clone(s.Ports); s.Ports[0].Name = "http" })
		c.list(renamed)
		assert.Empty(t, pub.takeCalls(), "nothing is touched")

		moved := with(web, func(s *kube.Service) { s.Ports = slices.Clone(s.Ports); s.Ports[0].Number = 8080 })
		c.list(moved)
		assert.Equal(t, []string{"withdraw default/web:80/TCP", "publish default/web:8080/TCP"}, pub.takeCalls(), "the other port is not touched")

		c.list(with(moved, func(s *kube.Service) { s.Ingress = []kube.Ingress{{IP: "192.168.5.7"}} }))
		assert.Equal(t, []string{"default/web:53/UDP 53:192.168.5.7:53/udp", "default/web:8080/TCP 8080:192.168.5.7:8080/tcp"}, pub.has())
		c.list(with(moved, func(s *kube.Service) { s.Ingress = nil }))
		assert.Empty(t, pub.has())
		assert.Len(t, l.Notes(), 2)
		c.list()
		assert.Empty(t, l.Notes())
	})
}

// FB-110: with reach: nodeport a NodePort that changes leads on.
func TestFB110NodePortChanges(t *testing.T) {
	s, _ := newServices(t, newFakeCluster(), nodePorts)
	spec := func(port string) listener.Spec {
		wants, _, _ := s.wants([]kube.Service{balanced(t, "web", port)})
		return wants[0].Specs[0]
	}
	before, after := spec("80=30080"), spec("80=30081")
	assert.NotEqual(t, before, after)
	assert.Equal(t, "80:30081/tcp", after.String())
}

// C-44: what fails changes nothing, is said at the 15th time in a row, and is
// over when it is.
func TestC44Failures(t *testing.T) {
	pub := newPublisher()
	inCluster(t, pub, func(t *testing.T, _ *Loop, s *Services, c *fakeCluster, log *logBuffer) {
		assert.Equal(t, ServicesStatus{Endpoint: "https://10.0.2.2:6443", Detail: "not asked yet"}, s.Status())
		web := balanced(t, "web", "80")
		c.list(web)
		good := s.Status()
		assert.True(t, good.Reachable)
		assert.Equal(t, time.Now(), good.LastGood)
		pub.takeCalls()

		for i := range 40 {
			time.Sleep(2 * time.Second)
			c.say <- kube.Update{Err: errors.New("services is forbidden" + strings.Repeat("!", 1000)), Failures: i + 1}
			synctest.Wait()
			want := 0
			if i+1 >= 15 {
				want = 1
			}
			assert.Equal(t, want, log.lines("level=WARN"), i)
			assert.Equal(t, i+1, s.Status().Failures)
		}
		assert.False(t, s.Status().Reachable)
		assert.Contains(t, s.Status().Detail, "forbidden")
		assert.Less(t, len(s.Status().Detail), 300)
		assert.Equal(t, good.LastGood, s.Status().LastGood)
		for _, call := range pub.takeCalls() {
			assert.Equal(t, "publish default/web:80/TCP", call, "only the loop's own resync, which touches nothing")
		}
		assert.Equal(t, []string{"default/web:80/TCP 80:80/tcp"}, pub.has())

		c.list(web)
		assert.Equal(t, 1, log.lines("level=INFO", "answers again"))
		assert.True(t, s.Status().Reachable)
		assert.Zero(t, s.Status().Failures)
		c.list(web)
		assert.Equal(t, 1, log.lines("level=INFO"))

		c.say <- kube.Update{Err: errBoom, Failures: 1}
		c.list(web)
		assert.Equal(t, 1, log.lines("level=WARN"), "a few failures are not worth a word")
		assert.Equal(t, 1, log.lines("level=INFO"))
	})
}

// A cluster that cannot be followed, as with a kubeconfig that cannot be read,
// is said in the status and tried again; a Service that was made again meanwhile
// is known for that.
func TestServicesRunAgain(t *testing.T) {
	a, b := balanced(t, "a", "80"), aged(balanced(t, "b", "80"), 1)
	pub := newTablePublisher()
	inCluster(t, pub, func(t *testing.T, _ *Loop, s *Services, c *fakeCluster, log *logBuffer) {
		c.list(a, b)
		for range 20 {
			c.fail <- errors.New("read kubeconfig: no such file")
			synctest.Wait()
			assert.Equal(t, "read kubeconfig: no such file", s.Status().Detail)
		}
		assert.Equal(t, 20, s.Status().Failures)
		assert.Equal(t, 1, log.lines("level=WARN"))
		assert.Equal(t, []string{"default/a:80/TCP", "default/b:80/TCP after default/a:80/TCP"}, pub.open())
		a.UID, a.Created = "another", since(2)
		c.list(a, b)
		assert.Equal(t, []string{"default/a:80/TCP after default/b:80/TCP", "default/b:80/TCP"}, pub.open())
	})
}

// However many ports a cluster has, only so many are published, the oldest
// Services', and that is said once.
func TestServicesBounded(t *testing.T) {
	big := func(name string, age int) kube.Service {
		svc := aged(balanced(t, name), age)
		for i := range 15000 {
			svc.Ports = append(svc.Ports, kube.Port{Number: uint16(i + 1), Protocol: "TCP"})
		}
		return svc
	}
	s, log := newServices(t, newFakeCluster())
	out := make(chan Snapshot, 1)
	for range 3 {
		s.listed(t.Context(), []kube.Service{aged(balanced(t, "last", "1/UDP", "2/UDP"), 3), big("second", 2), big("first", 1)}, out)
		snap := <-out
		require.Len(t, snap.Wants, maxServicePorts)
		assert.Equal(t, "default/first:1/TCP", snap.Wants[0].Owner.ID)
		assert.Equal(t, "default/second:5000/TCP", snap.Wants[maxServicePorts-1].Owner.ID)
		assert.Equal(t, "the Services have 10002 ports more than the 20000 that are published", s.Status().Detail)
		assert.True(t, s.Status().Reachable)
	}
	assert.Equal(t, 1, log.lines("level=WARN"))
	s.listed(t.Context(), nil, out)
	assert.Empty(t, (<-out).Wants)
	assert.Empty(t, s.Status().Detail)
}

// A name that is listed twice counts once.
func TestServicesListedTwice(t *testing.T) {
	s, _ := newServices(t, newFakeCluster())
	wants, uids, _ := s.wants([]kube.Service{aged(balanced(t, "web", "81"), 1), balanced(t, "web", "80")})
	assert.Equal(t, []string{"default/web:80/TCP 80:80/tcp"}, lines(wants), "the older")
	assert.Len(t, uids, 1)
}

// C-43: when `culvert kubernetes stop` returns nothing is open, and nothing
// opens after, whatever the cluster says meanwhile. 200 rounds.
func TestC43HoldRaces(t *testing.T) {
	pub := newPublisher()
	inCluster(t, pub, func(t *testing.T, l *Loop, _ *Services, c *fakeCluster, _ *logBuffer) {
		services := make([]kube.Service, 8)
		for round := range 200 {
			for i := range services {
				services[i] = balanced(t, fmt.Sprint("s", i), fmt.Sprint(1000+10*i+round%3))
			}
			stop := make(chan struct{})
			var saying sync.WaitGroup
			saying.Go(func() {
				for i := 0; ; i++ {
					select {
					case c.say <- kube.Update{Services: services[:i%len(services)]}:
					case <-stop:
						return
					}
				}
			})
			var holding sync.WaitGroup
			for range 2 { // two users at once
				holding.Go(func() {
					l.Hold(clusterVM, ServicesName, true)
					assert.Empty(t, pub.Owners(), "when it returns")
				})
			}
			holding.Wait()
			for range 10 {
				c.say <- kube.Update{Services: services}
				assert.Empty(t, pub.Owners(), "after it returned")
			}
			l.Resync()
			close(stop)
			saying.Wait()
			c.list(services...)
			require.Empty(t, pub.Owners())
			assert.True(t, l.Held(clusterVM, ServicesName))

			l.Hold(clusterVM, ServicesName, false)
			require.Len(t, pub.Owners(), len(services), "what was said last counts again")
		}
	})
}

// FuzzService: whatever a Service says, what is published of it can be, leads to
// no address of the host's or culvert's, and has ids that are keys.
func FuzzService(f *testing.F) {
	f.Add("10.0.2.2", "", "VIP", "TCP", "10.0.0.0/8", uint16(80), uint16(30080))
	f.Add("", "node", "", "SCTP", "", uint16(1), uint16(0))
	f.Add("fe80::1%eth0", "10.0.2.1", "Proxy", "", "::/0", uint16(0), uint16(1))
	f.Add("::ffff:127.0.0.1", "x", "", "UDP", "1.2.3.4/33", uint16(65535), uint16(1))
	f.Fuzz(func(t *testing.T, ip, host, mode, protocol, sources string, number, nodePort uint16) {
		svc := kube.Service{
			Namespace: "n", Name: "s", LoadBalancer: true, SourceRanges: []string{sources},
			Ports:   []kube.Port{{Protocol: protocol, Number: number, NodePort: nodePort}, {Protocol: "UDP", Number: number}},
			Ingress: []kube.Ingress{{IP: ip, Mode: mode}, {Hostname: host}},
		}
		for _, reach := range []string{ReachAuto, ReachNodePort} {
			s, _ := newServices(t, newFakeCluster(), func(o *ServicesOptions) { o.Reach = reach })
			wants, _, _ := s.wants([]kube.Service{svc})
			for _, w := range wants {
				p, err := ParseServicePort(w.Owner.ID)
				require.NoError(t, err)
				require.Equal(t, w.Owner.ID, p.String())
				require.Equal(t, 1, len(w.Specs)+len(w.Notes))
				for _, n := range w.Notes {
					require.Less(t, len(n.Detail), 500)
					require.NotEmpty(t, n.Detail)
				}
				for _, spec := range w.Specs {
					require.NoError(t, spec.Validate())
					to := spec.Target.Addr.Addr()
					require.False(t, to.IsLoopback() || to == clusterGateway || to.Is6())
				}
			}
		}
	})
}

// cluster2000 is a cluster of 2 000 Services.
func cluster2000(tb testing.TB) []kube.Service {
	services := make([]kube.Service, 2000)
	for i := range services {
		services[i] = aged(balanced(tb, fmt.Sprint("service-", i), fmt.Sprint(10000+i)), i%100)
	}
	return services
}

// BenchmarkServices is what a listing of 2 000 Services costs until it is a
// Snapshot.
func BenchmarkServices(b *testing.B) {
	s, _ := newServices(b, nil)
	services := cluster2000(b)
	out := make(chan Snapshot, 2)
	b.ReportAllocs()
	for b.Loop() {
		s.listed(b.Context(), services, out)
		<-out
	}
}

// BenchmarkLoopServices is what an edit of one Service of 2 000 costs the loop,
// until the Publisher has been told, and what their first listing does.
func BenchmarkLoopServices(b *testing.B) {
	s, _ := newServices(b, nil)
	services := cluster2000(b)
	out := make(chan Snapshot, 1)
	s.listed(b.Context(), services, out)
	all := <-out
	services[1000].Ports[0].Number = 9999
	s.listed(b.Context(), services, out)
	edited := <-out
	log, _ := newLog()
	start := func() *Loop {
		l := NewLoop(newTablePublisher(), log)
		l.followed[sourceKey{clusterVM, ServicesName}] = &followed{generation: 1}
		return l
	}
	b.Run("first", func(b *testing.B) {
		for b.Loop() {
			err := start().Apply(b.Context(), all)
			require.NoError(b, err)
		}
	})
	b.Run("edit", func(b *testing.B) {
		l := start()
		err := l.Apply(b.Context(), all)
		require.NoError(b, err)
		for i := 0; b.Loop(); i++ {
			snap := all
			if i%2 == 0 {
				snap = edited
			}
			err := l.Apply(b.Context(), snap)
			require.NoError(b, err)
		}
	})
}
