package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/culvertnet/culvert/cmd/internal/names"
	"github.com/culvertnet/culvert/guest/docker"
)

// A DockerConfig is where a VM's engine is. The zero value means that it has
// none.
type DockerConfig struct {
	Endpoint      string // tcp://IP:PORT through the VM's link, unix:///PATH on the host
	CA, Cert, Key string // files; empty without TLS
}

// A KubernetesConfig is where the API server of a VM's cluster is. The zero value
// means that it has none.
type KubernetesConfig struct {
	Kubeconfig string
	Via        string // "stack" or "host"
	Reach      string // "auto" or "nodeport"
}

// A NamesConfig is how names are served. It is zero when they are not.
type NamesConfig struct {
	Listen    netip.AddrPort
	Zone      string // without the dot at its end, in lower case
	Address   string // "host" or "loopback"
	Unknown   string // "nxdomain" or "nodata"
	Upstreams string // IP:PORT, with commas between: a config is compared with ==
}

// fileDocker is a mapping, or a bare string that is its endpoint.
type fileDocker struct {
	Endpoint string  `yaml:"endpoint"`
	TLS      fileTLS `yaml:"tls"`
}

type fileTLS struct {
	CA   string `yaml:"ca"`
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
}

// UnmarshalYAML implements yaml.InterfaceUnmarshaler.
func (f *fileDocker) UnmarshalYAML(decode func(any) error) error {
	if decode(&f.Endpoint) == nil {
		return nil
	}
	type mapping fileDocker
	return decode((*mapping)(f))
}

type fileKubernetes struct {
	Kubeconfig string `yaml:"kubeconfig"`
	Via        string `yaml:"via"`
	Reach      string `yaml:"reach"`
}

type fileNames struct {
	Listen    *string  `yaml:"listen"`
	Zone      string   `yaml:"zone"`
	Address   string   `yaml:"address"`
	Unknown   string   `yaml:"unknown"`
	Upstreams []string `yaml:"upstreams"`
}

const (
	defaultNamesListen = "127.0.0.1:5553"
	defaultZone        = "culvert.internal"
)

// docker reads a VM's engine.
func (r *reader) docker(path string, f *fileDocker, vm *VMConfig) error {
	if f == nil {
		return nil
	}
	at := path + ".endpoint"
	if !r.has(at) {
		at = path // the bare string, or a mapping without one
	}
	if err := checkEndpoint(f.Endpoint); err != nil {
		return r.at(at, err)
	}
	if (f.TLS.Cert == "") != (f.TLS.Key == "") {
		return r.at(path+".tls", errors.New("a client's certificate needs both cert and key"))
	}
	if f.TLS != (fileTLS{}) && !strings.HasPrefix(f.Endpoint, "tcp:") {
		return r.at(path+".tls", fmt.Errorf("%s speaks no TLS; only a tcp endpoint does", f.Endpoint))
	}
	vm.Docker = DockerConfig{Endpoint: f.Endpoint, CA: f.TLS.CA, Cert: f.TLS.Cert, Key: f.TLS.Key}
	return nil
}

// checkEndpoint says what is wrong with an engine's endpoint.
func checkEndpoint(s string) error {
	if err := docker.ValidateEndpoint(s); err != nil {
		return err
	}
	ap, err := netip.ParseAddrPort(strings.TrimPrefix(s, "tcp://"))
	switch {
	case err != nil:
		return nil // a unix socket
	case ap.Addr().IsLoopback():
		return fmt.Errorf("endpoint %q: %s is the guest's own loopback, which nothing outside reaches; let the engine listen on the node's address, or forward its socket to the host and name that one, unix:///PATH", s, ap.Addr())
	case !ap.Addr().Unmap().Is4():
		return fmt.Errorf("endpoint %q: this version reaches the guest over IPv4 only", s)
	}
	return nil
}

// kubernetes reads a VM's cluster.
func (r *reader) kubernetes(path string, f *fileKubernetes, vm *VMConfig) error {
	if f == nil {
		return nil
	}
	k := KubernetesConfig{Kubeconfig: f.Kubeconfig, Via: cmp.Or(f.Via, "stack"), Reach: cmp.Or(f.Reach, "auto")}
	switch {
	case k.Kubeconfig == "":
		return r.at(path, errors.New("names no kubeconfig"))
	case k.Via != "stack" && k.Via != "host":
		return r.at(path+".via", fmt.Errorf("%q is neither stack nor host", k.Via))
	case k.Reach != "auto" && k.Reach != "nodeport":
		return r.at(path+".reach", fmt.Errorf("%q is neither auto nor nodeport", k.Reach))
	}
	vm.Kubernetes = k
	return nil
}

// names reads how names are served. Without the key they are served where the
// defaults say, if a VM has an engine: nobody else has names.
func (r *reader) names(f *fileNames, c *Config) error {
	if f == nil {
		f = new(fileNames)
		if !c.hasEngine() {
			return nil
		}
	}
	n := NamesConfig{Address: cmp.Or(f.Address, "host"), Unknown: cmp.Or(f.Unknown, "nxdomain")}
	listen := defaultNamesListen
	if f.Listen != nil {
		listen = *f.Listen
	}
	if listen == "" {
		return nil
	}
	var err error
	if n.Zone, err = names.ParseZone(cmp.Or(f.Zone, defaultZone)); err != nil {
		return r.at("$.names.zone", err)
	}
	if n.Address != "host" && n.Address != "loopback" {
		return r.at("$.names.address", fmt.Errorf("%q is neither host nor loopback", n.Address))
	}
	if n.Unknown != "nxdomain" && n.Unknown != "nodata" {
		return r.at("$.names.unknown", fmt.Errorf("%q is neither nxdomain nor nodata", n.Unknown))
	}
	if n.Listen, err = netip.ParseAddrPort(listen); err != nil {
		return r.at("$.names.listen", fmt.Errorf("%q is not an IP address and port such as %s", listen, defaultNamesListen))
	}
	upstreams := make([]string, len(f.Upstreams))
	for i, text := range f.Upstreams {
		ap, err := names.ParseUpstream(text)
		if err == nil && ap == n.Listen {
			err = fmt.Errorf("%s is names.listen itself", ap)
		}
		if err != nil {
			return r.at(fmt.Sprintf("$.names.upstreams[%d]", i), err)
		}
		upstreams[i] = ap.String()
	}
	n.Upstreams = strings.Join(upstreams, ",")
	c.Names = n
	return nil
}

// upstreams returns n.Upstreams.
func (n NamesConfig) upstreams() (all []netip.AddrPort) {
	for text := range strings.SplitSeq(n.Upstreams, ",") {
		if ap, err := netip.ParseAddrPort(text); err == nil {
			all = append(all, ap)
		}
	}
	return all
}

// hasEngine says whether a VM of the config has an engine.
func (c *Config) hasEngine() bool {
	for _, vm := range c.VMs {
		if vm.Docker != (DockerConfig{}) {
			return true
		}
	}
	return false
}
