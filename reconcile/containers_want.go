package reconcile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/stack/listener"
)

// loopbacks are where names lead with `address: host`. Shared, never written to.
var loopbacks = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// want says what a container asks for.
func (r *containersRun) want(ct *docker.Container) Want {
	b := wantBuilder{
		containersRun: r, ct: ct, own: r.own[ct.ID],
		want: Want{Owner: r.owner(ct.ID)}, seen: make(map[listenerKey]netip.AddrPort, len(ct.Bindings)),
	}
	for _, binding := range ct.Bindings {
		b.binding(binding)
	}
	for _, u := range ct.Unusable {
		b.unusable(u)
	}
	b.names()
	return b.want
}

// A listenerKey is what makes a listener of one owner another than the next.
type listenerKey struct {
	proto listener.Proto
	host  netip.AddrPort
}

// A wantBuilder makes the Want of one container.
type wantBuilder struct {
	*containersRun
	ct   *docker.Container
	own  netip.Addr // the container's own loopback address; zero when it has none
	want Want
	seen map[listenerKey]netip.AddrPort // where the listeners so far lead
}

// binding makes a Spec of one port that the engine publishes, or a Note where
// that cannot be.
func (b *wantBuilder) binding(e docker.Binding) {
	node := netip.AddrPortFrom(netip.Addr{}, e.HostPort)
	spec := listener.Spec{Host: netip.AddrPortFrom(e.HostIP.Unmap(), e.HostPort), Ports: 1, Target: listener.Target{VM: b.VM, Addr: node}}
	switch e.Proto {
	case "tcp":
		spec.Proto = listener.TCP
	case "udp":
		spec.Proto = listener.UDP
	default:
		b.note(e, spec, listener.Skipped, e.Proto+" is not carried, only tcp and udp are")
		return
	}
	host, err := b.Policy.GuestHost(e.HostIP, b.HostAddr, func(a netip.Addr) bool { return a == b.Node })
	if err == nil && b.Addresses != nil && ownNetwork.Contains(host) {
		// The name of a container, also of another VM, may lead there.
		err = fmt.Errorf("host address %s was asked for from inside the VM; culvert gives the addresses of %s to containers itself", host, ownNetwork)
	}
	if err != nil {
		b.note(e, spec, listener.Skipped, err.Error())
		return
	}
	spec.Host = netip.AddrPortFrom(host, e.HostPort)
	if host.IsValid() && host.IsLoopback() && !b.pinned(e, &spec) {
		return
	}
	if err := spec.Validate(); err != nil {
		b.note(e, spec, listener.Skipped, err.Error())
		return
	}
	b.add(spec)
	if b.own.IsValid() {
		spec.Host = netip.AddrPortFrom(b.own, e.Port)
		if _, twice := b.seen[listenerKey{spec.Proto, spec.Host}]; !twice { // one container port at two host ports
			b.add(spec)
		}
	}
}

// add adds a spec, unless it is the twin of one that is there: an engine lists
// what it publishes for 0.0.0.0 and for :: (C-5).
func (b *wantBuilder) add(spec listener.Spec) {
	key := listenerKey{spec.Proto, spec.Host}
	if leads, there := b.seen[key]; there && leads == spec.Target.Addr {
		return
	}
	b.seen[key] = spec.Target.Addr
	b.want.Specs = append(b.want.Specs, spec)
}

// pinned leads spec, of a port that is published on the guest's own loopback, to
// the container itself (C-35). It is false when that cannot be, or not yet, which
// is noted then.
func (b *wantBuilder) pinned(e docker.Binding, spec *listener.Spec) bool {
	to, state := b.reach.choose(b.ct, e)
	if to.IsValid() {
		spec.Target.Addr = to
	}
	switch state {
	case answers:
		return true
	case unknown:
		b.note(e, *spec, listener.Pending,
			"published on the VM's own loopback; trying the container's own address")
		return false
	}
	b.note(e, *spec, listener.Failed, fmt.Sprintf(
		"published on the VM's own loopback, which nothing outside the VM reaches, and the container's own port %d does not answer; publish without %s: -p %d:%d%s",
		e.Port, e.HostIP.Unmap(), e.HostPort, e.Port, protoSuffix(spec.Proto)))
	b.want.Notes[len(b.want.Notes)-1].RetryAt = b.reach.nextRound()
	return false
}

// protoSuffix is what docker's -p takes after the ports.
func protoSuffix(p listener.Proto) string {
	if p == listener.TCP {
		return ""
	}
	return "/" + p.String()
}

// note notes that e is not published, which is what spec would have been.
func (b *wantBuilder) note(e docker.Binding, spec listener.Spec, state listener.State, detail string) {
	b.want.Notes = append(b.want.Notes, Note{
		Protocol: e.Proto, Host: spec.HostString(b.Policy), Guest: spec.GuestString(b.Node), State: state, Detail: detail,
	})
}

// unusable notes an entry of the engine that is no binding (C-34).
func (b *wantBuilder) unusable(u docker.Unusable) {
	n := Note{Protocol: u.Proto, State: listener.Skipped, Detail: u.Reason}
	if u.Port != 0 {
		n.Guest = fmt.Sprintf(":%d", u.Port)
	}
	b.want.Notes = append(b.want.Notes, n)
}

// names adds the container's names (C-37): its own, and Compose's.
func (b *wantBuilder) names() {
	addrs := loopbacks
	if b.own.IsValid() {
		addrs = []netip.Addr{b.own}
	} else if b.Addresses != nil {
		b.want.Notes = append(b.want.Notes, Note{
			Protocol: nameProtocol, State: listener.Failed,
			Detail: fmt.Sprintf("no loopback address of its own is left in %s; its names lead to %s", ownNetwork, loopbacks[0]),
		})
	}
	texts := []string{b.ct.Name}
	if b.ct.Service != "" && b.ct.Project != "" {
		texts = append(texts, b.ct.Service+"."+b.ct.Project)
	}
	for _, text := range texts {
		name, err := dnsName(text)
		if err != nil {
			b.want.Notes = append(b.want.Notes, Note{
				Protocol: nameProtocol, Host: strings.ToLower(text), State: listener.Skipped,
				Detail: fmt.Sprintf("%q is no name for DNS: %v", text, err),
			})
			continue
		}
		n := Name{Name: name, Addrs: addrs, Since: b.ct.Started}
		if !slices.ContainsFunc(b.want.Names, func(o Name) bool { return o.Name == name }) {
			b.want.Names = append(b.want.Names, n)
		}
	}
}

// nameProtocol stands in the place of a protocol in the row of a name that is
// not registered.
const nameProtocol = "dns"
