package reconcile

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/culvertnet/culvert/guest/kube"
	"github.com/culvertnet/culvert/stack/listener"
)

const (
	// maxProtocol bounds what a cluster may call a protocol, which becomes part
	// of an owner's id.
	maxProtocol = 16
	// maxSourceRanges bounds the ranges of a Service: each client is compared
	// with all of them.
	maxSourceRanges = 256
)

// A ServicePort is a port of a Service: what the id of an owner of kind
// listener.KindKubernetes says.
type ServicePort struct {
	Namespace, Name string
	Port            uint16
	Protocol        string // "TCP", "UDP" or what the cluster says
}

// String returns the owner's id, "namespace/name:port/PROTO". A port's own name
// is not in it: renaming a port changes nothing (FB-106).
func (p ServicePort) String() string {
	return p.Namespace + "/" + p.Name + ":" + strconv.Itoa(int(p.Port)) + "/" + p.Protocol
}

// ParseServicePort reads an owner's id.
func ParseServicePort(id string) (p ServicePort, err error) {
	service, port, ok := strings.Cut(id, ":")
	namespace, name, ok2 := strings.Cut(service, "/")
	number, protocol, ok3 := strings.Cut(port, "/")
	n, err := strconv.ParseUint(number, 10, 16)
	if !ok || !ok2 || !ok3 || err != nil {
		return p, fmt.Errorf("%q is not of the form namespace/name:port/PROTO", id)
	}
	return ServicePort{namespace, name, uint16(n), protocol}, nil
}

// wantsOf returns what a Service wants, of at most limit ports.
func (s *Services) wantsOf(svc *kube.Service, limit int) []Want {
	wants := make([]Want, 0, min(len(svc.Ports), limit))
	allow, rangeErr := sourceRanges(svc.SourceRanges)
	to := s.reach(svc)
	asked := make(map[ServicePort]bool, cap(wants))
	for _, p := range svc.Ports {
		port := ServicePort{svc.Namespace, svc.Name, p.Number, p.Protocol}
		if port.Protocol == "" {
			port.Protocol = "TCP" // Kubernetes' default
		}
		switch {
		case len(wants) == limit:
			return wants
		case p.Number == 0 || !validProtocol(port.Protocol) || asked[port]:
			s.log.Debug("port of a Service ignored", "service", svc.Namespace+"/"+svc.Name, "port", p.Number, "protocol", quoted(p.Protocol))
			continue
		}
		asked[port] = true
		wants = append(wants, s.want(port, p, to, allow, rangeErr))
	}
	return wants
}

// want returns what one port wants.
func (s *Services) want(port ServicePort, p kube.Port, to way, allow listener.Prefixes, rangeErr error) Want {
	spec := listener.Spec{
		Host:   netip.AddrPortFrom(netip.Addr{}, p.Number), // the policy's, both families
		Ports:  1,
		Target: listener.Target{VM: s.opts.VM, Addr: netip.AddrPortFrom(to.addr, p.Number)},
		Allow:  allow,
	}
	state, detail := to.state, to.detail
	switch port.Protocol {
	case "TCP":
		spec.Proto = listener.TCP
	case "UDP":
		spec.Proto = listener.UDP
	default:
		state, detail = listener.Skipped, fmt.Sprintf("protocol %s not supported", port.Protocol)
	}
	switch {
	case spec.Proto == 0:
	case rangeErr != nil:
		state, detail = listener.Failed, rangeErr.Error()
	case to.nodePort && p.NodePort == 0:
		state, detail = listener.Skipped, "it has no node port, which reach: nodeport is led to (allocateLoadBalancerNodePorts is false)"
	case to.nodePort:
		spec.Target.Addr = netip.AddrPortFrom(netip.Addr{}, p.NodePort)
	}
	w := Want{Owner: listener.Owner{Kind: listener.KindKubernetes, ID: port.String(), VM: s.opts.VM}}
	if state != 0 {
		w.Notes = []Note{{Protocol: strings.ToLower(port.Protocol), Host: spec.HostString(s.opts.Policy), State: state, Detail: detail}}
		return w
	}
	w.Specs = []listener.Spec{spec}
	return w
}

// validProtocol reports whether a protocol can be part of an id: letters and
// digits.
func validProtocol(name string) bool {
	for _, c := range []byte(name) {
		if (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return name != "" && len(name) <= maxProtocol
}

// A way is where a Service is reached, or why it is not.
type way struct {
	addr     netip.Addr     // in the guest; the zero address means the node's
	nodePort bool           // at the port's NodePort, not its number
	state    listener.State // zero when it is reached
	detail   string
}

// reach says where a Service is reached (C-42). Each entry of its ingress is
// decided by what the API says, no name is resolved (FB-109):
//
//   - by its IP where it has one, or a host name that is an IP: the node when it
//     is the node's address, and else the address to dial, unless it is one that
//     cannot be meant. An IPv6 address of the node's is none of these: servicelb
//     reports it alone for a Service that has no IPv4, and dialling the node over
//     IPv4 would reach nobody.
//   - by its host name alone: that is the node. The load balancers that report
//     names of their own are those of clouds, in no VM.
//
// Of several entries the node comes first, then the lowest address, so that
// their order does not matter, then the host name. A Service without any has not
// been published by the cluster's load balancer yet.
func (s *Services) reach(svc *kube.Service) way {
	if s.opts.Reach == ReachNodePort {
		return way{nodePort: true}
	}
	var foreign netip.Addr
	var named bool
	var obstacle error
	for _, in := range svc.Ingress {
		text := in.IP
		if text == "" {
			text = in.Hostname
		}
		addr, err := netip.ParseAddr(text)
		addr = addr.Unmap()
		switch {
		case text == "":
			continue
		case err != nil && in.IP == "":
			named = true
			continue
		case err != nil:
			err = fmt.Errorf("the cluster's load balancer reports %s, which is no IP address", quoted(text))
		case addr == s.opts.Node:
			return way{}
		default:
			err = s.foreign(addr, in.Mode)
		}
		switch {
		case err != nil && obstacle == nil:
			obstacle = err
		case err == nil && (!foreign.IsValid() || addr.Less(foreign)):
			foreign = addr
		}
	}
	switch {
	case foreign.IsValid():
		return way{addr: foreign}
	case named:
		return way{}
	case obstacle != nil:
		return way{state: listener.Skipped, detail: obstacle.Error()}
	}
	return way{state: listener.Pending, detail: "waiting for the cluster's load balancer: no ingress address yet"}
}

// foreign says why an ingress address that is not the node's is not dialled.
func (s *Services) foreign(addr netip.Addr, mode string) error {
	const reports = "the cluster's load balancer reports %s, "
	switch {
	case addr.IsLoopback():
		return fmt.Errorf(reports+"the guest's own loopback, which no packet from outside reaches", addr)
	case addr.IsUnspecified(), addr.IsMulticast(), addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf(reports+"which is no single host's address", addr)
	case addr == s.opts.Gateway:
		return fmt.Errorf(reports+"culvert's own address on the VM's link", addr)
	case !addr.Is4():
		return fmt.Errorf(reports+"and this version reaches the guest over IPv4 only", addr)
	case mode == "Proxy":
		return fmt.Errorf(reports+"which is not the node's, with ipMode Proxy: the node leads nothing there by itself; reach: nodeport does without", addr)
	}
	return nil
}

// sourceRanges reads loadBalancerSourceRanges. One that allows all addresses of
// a family allows everybody, as Kubernetes has it: a host port is reached by
// either. None at all does too. A range that cannot be read is an error, for
// leaving it out could let in whom it was to keep out (FB-113).
func sourceRanges(texts []string) (listener.Prefixes, error) {
	if len(texts) > maxSourceRanges {
		return "", fmt.Errorf("loadBalancerSourceRanges has %d entries, more than %d", len(texts), maxSourceRanges)
	}
	all := false
	ranges := make([]netip.Prefix, len(texts))
	for i, text := range texts {
		var err error
		if ranges[i], err = netip.ParsePrefix(strings.TrimSpace(text)); err != nil {
			return "", fmt.Errorf("loadBalancerSourceRanges: %s is no address prefix", quoted(text))
		}
		all = all || ranges[i].Bits() == 0
	}
	if all {
		return "", nil
	}
	return listener.MakePrefixes(ranges...), nil
}

// quoted is the beginning of a text of the guest's, for a sentence.
func quoted(text string) string { return strconv.Quote(clip(text, 60)) }

// clip bounds a text of the guest's.
func clip(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	for limit > 0 && !utf8.RuneStart(text[limit]) {
		limit--
	}
	return text[:limit] + "…"
}
