package daemon

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"

	"github.com/culvertnet/culvert/datapath/attach"
)

var vmName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)

func checkName(name string) error {
	if !vmName.MatchString(name) {
		return fmt.Errorf("%q is not a VM's name: 1 to 63 letters, digits, '-', '_' or '.', the first a letter or digit", name)
	}
	return nil
}

func (r *reader) vm(path string, f *fileVM, before []VMConfig) (*VMConfig, error) {
	vm := &VMConfig{VMLink: VMLink{Name: f.Name, MTU: defaultMTU, TCP: tcpPromoted}}
	if vm.Name == "" {
		vm.Name = defaultName
	}
	if err := checkName(vm.Name); err != nil {
		return nil, r.at(path+".name", err)
	}
	if slices.ContainsFunc(before, func(o VMConfig) bool { return o.Name == vm.Name }) {
		if f.Name == "" {
			return nil, r.at(path, fmt.Errorf("there is a VM named %q already, as one without a name is: give this one a name", vm.Name))
		}
		return nil, r.at(path+".name", fmt.Errorf("there is a VM named %q already", vm.Name))
	}
	if f.Attach == "" {
		return nil, r.at(path, fmt.Errorf("VM %q has no attach spec", vm.Name))
	}
	var err error
	if vm.Attach, err = attach.ParseSpec(f.Attach); err != nil {
		return nil, r.at(path+".attach", err)
	}
	if err := checkAttach(vm.Attach, before); err != nil {
		return nil, r.at(path+".attach", err)
	}
	for _, later := range []struct {
		key string
		set bool
	}{
		{"node6", f.Node6 != ""}, {"gateway6", f.Gateway6 != ""},
	} {
		if later.set {
			return nil, r.at(path+"."+later.key, errLater)
		}
	}
	if err := r.link(path, f, vm); err != nil {
		return nil, err
	}
	if f.QMP != "" {
		if err := checkSocketPath(f.QMP); err != nil {
			return nil, r.at(path+".qmp", err)
		}
		vm.QMP = f.QMP
	}
	if f.TCP != "" {
		if vm.TCP = f.TCP; vm.TCP != tcpNetstack && vm.TCP != tcpPromoted {
			return nil, r.at(path+".tcp", fmt.Errorf("%q is none of %s, %s", f.TCP, tcpPromoted, tcpNetstack))
		}
	}
	if err := r.docker(path+".docker", f.Docker, vm); err != nil {
		return nil, err
	}
	if err := r.kubernetes(path+".kubernetes", f.Kubernetes, vm); err != nil {
		return nil, err
	}
	for i, text := range f.Publish {
		spec, err := parsePublish(text, vm.Name)
		if err != nil {
			return nil, r.at(fmt.Sprintf("%s.publish[%d]", path, i), err)
		}
		vm.Publish = append(vm.Publish, spec)
	}
	return vm, nil
}

// link reads the addresses of a VM's link.
func (r *reader) link(path string, f *fileVM, vm *VMConfig) error {
	node, gateway := f.Node, f.Gateway
	if node == "" {
		node = defaultNode
	}
	if gateway == "" {
		gateway = defaultGateway
	}
	var err error
	if vm.Node, err = netip.ParseAddr(node); err != nil || !vm.Node.Is4() {
		return r.at(path+".node", fmt.Errorf("%q is not an IPv4 address", node))
	}
	if vm.Gateway, err = netip.ParsePrefix(gateway); err != nil || !vm.Gateway.Addr().Is4() {
		return r.at(path+".gateway", fmt.Errorf("%q is not an IPv4 address with its prefix length, such as %s", gateway, defaultGateway))
	}
	if err := checkLink(vm.Node, vm.Gateway); err != nil {
		key := ".node"
		if f.Node == "" {
			key = ".gateway"
		}
		return r.at(path+key, err)
	}
	if f.MTU != "" {
		if vm.MTU, err = strconv.Atoi(f.MTU); err != nil || vm.MTU < minMTU || vm.MTU > maxMTU {
			return r.at(path+".mtu", fmt.Errorf("%q is not a whole number between %d and %d", f.MTU, minMTU, maxMTU))
		}
	}
	return nil
}

func checkLink(node netip.Addr, gateway netip.Prefix) error {
	switch {
	case !gateway.Contains(node):
		return fmt.Errorf("node %s is not in the gateway's network %s", node, gateway.Masked())
	case node == gateway.Addr():
		return fmt.Errorf("node and gateway are both %s", node)
	case !node.IsGlobalUnicast() && !node.IsLinkLocalUnicast():
		return fmt.Errorf("node %s is not an address a host can have", node)
	case !gateway.Addr().IsGlobalUnicast() && !gateway.Addr().IsLinkLocalUnicast():
		return fmt.Errorf("gateway %s is not an address a host can have", gateway.Addr())
	}
	if gateway.Bits() < 31 {
		for _, a := range []netip.Addr{node, gateway.Addr()} {
			if a == gateway.Masked().Addr() || a == lastAddr(gateway) {
				return fmt.Errorf("%s is the network's or the broadcast address of %s", a, gateway.Masked())
			}
		}
	}
	return nil
}

// lastAddr returns the last address of an IPv4 prefix.
func lastAddr(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		a[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(a)
}

// checkAttach says whether one of other VMs has this attachment: an interface or
// a socket is one VM's. Only the demo's has no place.
func checkAttach(spec attach.Spec, others []VMConfig) error {
	for _, o := range others {
		if spec.Address != "" && spec.Address == o.Attach.Address && spec.Network == o.Attach.Network && spec.NetNS == o.Attach.NetNS {
			return fmt.Errorf("VM %q is attached to %s already: each VM has its own", o.Name, spec.Address)
		}
	}
	return nil
}
