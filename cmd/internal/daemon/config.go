package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culvertnet/culvert/datapath/attach"
	"github.com/culvertnet/culvert/datapath/socketfile"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/culvertnet/culvert/stack/listener"
)

// A Config is what a daemon is started with: checked, with every default in
// its place.
type Config struct {
	API         string         // the API's socket
	Metrics     netip.AddrPort // where metrics are served; not valid for nowhere
	ExposeToLAN bool
	Log         LogConfig
	Timeouts    Timeouts
	Limits      Limits
	Names       NamesConfig
	Trace       TraceConfig
	VMs         []VMConfig

	blank bool // the file has nothing in it
}

// TraceConfig says what is kept of the frames that pass, beside who asks.
type TraceConfig struct {
	FlightRecorder int // frames of each VM; 0 for none
}

// LogConfig says what is logged: "debug", "info", "warn" or "error", as "text"
// or "json".
type LogConfig struct {
	Level  string `yaml:"level"`
	Format string `yaml:"format"`
}

// Timeouts are the durations of INTERFACE.md's config; all are positive.
type Timeouts struct {
	Connect, HalfClose, UDPIdle, Drain, BindRetry time.Duration
}

// Limits bound what clients can make the daemon hold; all are positive.
type Limits struct {
	FlowBuffer   int // bytes, of each direction of a TCP flow
	TotalBuffers int // bytes, of all of them
	Flows        int
	UDPFlows     int
}

// A VMConfig is one VM. It is compared with == to see what a reload changes,
// its publishes aside.
type VMConfig struct {
	VMLink
	VMGuest
	Publish []listener.Spec // each with Target.VM set
}

// A VMGuest is what is followed of what runs in a VM.
type VMGuest struct {
	Docker     DockerConfig
	Kubernetes KubernetesConfig
}

// A VMLink is how a VM is reached.
type VMLink struct {
	Name    string
	Attach  attach.Spec
	Node    netip.Addr
	Gateway netip.Prefix // our own address on the link, and its prefix
	MTU     int
	QMP     string // the VMM's QMP socket; empty without
	TCP     string // what flows to the guest are: tcpPromoted, the default, or tcpNetstack
}

// What TCP flows to a guest may be: of package promoted, where the link and the kernel
// allow it, or endpoints of gVisor's.
const (
	tcpNetstack = "netstack"
	tcpPromoted = "promoted"
)

// The file, as it is written. Values stay text until their place in the file can
// be named; a number too, of which the library would drop the fraction.
type fileConfig struct {
	API         string       `yaml:"api"`
	Metrics     string       `yaml:"metrics"`
	ExposeToLAN bool         `yaml:"exposeToLAN"`
	Log         LogConfig    `yaml:"log"`
	Timeouts    fileTimeouts `yaml:"timeouts"`
	Limits      fileLimits   `yaml:"limits"`
	VMs         []fileVM     `yaml:"vms"`
	Names       *fileNames   `yaml:"names"`
	Trace       fileTrace    `yaml:"trace"`
	Publish     []string     `yaml:"publish"`
}

type fileTimeouts struct {
	Connect   string `yaml:"connect"`
	HalfClose string `yaml:"halfClose"`
	UDPIdle   string `yaml:"udpIdle"`
	Drain     string `yaml:"drain"`
	BindRetry string `yaml:"bindRetry"`
}

type fileLimits struct {
	FlowBuffer   string `yaml:"flowBuffer"`
	TotalBuffers string `yaml:"totalBuffers"`
	Flows        string `yaml:"flows"`
	UDPFlows     string `yaml:"udpFlows"`
}

type fileTrace struct {
	FlightRecorder string `yaml:"flightRecorder"`
}

type fileVM struct {
	Name       string          `yaml:"name"`
	Attach     string          `yaml:"attach"`
	Node       string          `yaml:"node"`
	Node6      string          `yaml:"node6"`
	Gateway    string          `yaml:"gateway"`
	Gateway6   string          `yaml:"gateway6"`
	MTU        string          `yaml:"mtu"`
	QMP        string          `yaml:"qmp"`
	TCP        string          `yaml:"tcp"`
	Docker     *fileDocker     `yaml:"docker"`
	Kubernetes *fileKubernetes `yaml:"kubernetes"`
	Publish    []string        `yaml:"publish"`
}

// The defaults of a VM.
const (
	defaultName    = "default"
	defaultNode    = "10.0.2.2"
	defaultGateway = "10.0.2.1/24"
	defaultMTU     = 1500
	// minMTU is what every IPv4 host takes whole (RFC 791).
	minMTU = 576
	// maxMTU is the longest a virtio NIC of QEMU takes (host_mtu), less what an
	// Ethernet header needs of 65535.
	maxMTU = 65520
)

func defaults(apiSocket string) fileConfig {
	return fileConfig{
		API:      apiSocket,
		Log:      LogConfig{Level: "info", Format: "text"},
		Timeouts: fileTimeouts{Connect: "3s", HalfClose: "1h", UDPIdle: "90s", Drain: "5s", BindRetry: "30s"},
		Limits:   fileLimits{FlowBuffer: "8MiB", TotalBuffers: "1GiB", Flows: "65536", UDPFlows: "16384"},
		Trace:    fileTrace{FlightRecorder: "0"},
	}
}

// Overrides are what the command line adds to the file.
type Overrides struct {
	APISocket string   // default of the file's api
	ForceAPI  bool     // APISocket was asked for, and so wins over the file
	Attach    []string // VM=SPEC
	Publish   []string
}

// ParseConfig reads a config file's text; name is what errors call it. Errors
// name the line and show it, with a caret.
func ParseConfig(name string, text []byte, o Overrides) (*Config, error) {
	r := &reader{name: name, text: text}
	file := defaults(o.APISocket)
	if err := r.decode(&file); err != nil {
		return nil, err
	}
	if o.ForceAPI {
		file.API = o.APISocket
	}
	c, err := r.resolve(&file)
	if err != nil {
		return nil, err
	}
	if err := c.override(o, file.Publish, r); err != nil {
		return nil, err
	}
	c.blank = len(bytes.TrimSpace(text)) == 0
	return c, nil
}

func (r *reader) resolve(f *fileConfig) (*Config, error) {
	c := &Config{API: f.API, ExposeToLAN: f.ExposeToLAN, Log: f.Log}
	if err := checkSocketPath(f.API); err != nil {
		return nil, r.at("$.api", err)
	}
	if f.Metrics != "" {
		var err error
		if c.Metrics, err = netip.ParseAddrPort(f.Metrics); err != nil {
			return nil, r.at("$.metrics", fmt.Errorf("%q is not an IP address and port such as 127.0.0.1:9464", f.Metrics))
		}
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, f.Log.Level) {
		return nil, r.at("$.log.level", fmt.Errorf("%q is none of debug, info, warn, error", f.Log.Level))
	}
	if !slices.Contains([]string{"text", "json"}, f.Log.Format) {
		return nil, r.at("$.log.format", fmt.Errorf("%q is neither text nor json", f.Log.Format))
	}
	for _, d := range []struct {
		key, text string
		to        *time.Duration
	}{
		{"connect", f.Timeouts.Connect, &c.Timeouts.Connect}, {"halfClose", f.Timeouts.HalfClose, &c.Timeouts.HalfClose},
		{"udpIdle", f.Timeouts.UDPIdle, &c.Timeouts.UDPIdle}, {"drain", f.Timeouts.Drain, &c.Timeouts.Drain},
		{"bindRetry", f.Timeouts.BindRetry, &c.Timeouts.BindRetry},
	} {
		var err error
		if *d.to, err = time.ParseDuration(d.text); err != nil || *d.to <= 0 {
			return nil, r.at("$.timeouts."+d.key, fmt.Errorf("%q is not a positive duration such as 3s, 90s or 1h", d.text))
		}
	}
	if err := r.limits(f, c); err != nil {
		return nil, err
	}
	frames, err := strconv.ParseUint(f.Trace.FlightRecorder, 10, 31)
	if err != nil || frames > trace.MaxFlightFrames {
		return nil, r.at("$.trace.flightRecorder", fmt.Errorf("%q is no number of frames from 0 to %d", f.Trace.FlightRecorder, trace.MaxFlightFrames))
	}
	c.Trace.FlightRecorder = int(frames)
	for i := range f.VMs {
		vm, err := r.vm(fmt.Sprintf("$.vms[%d]", i), &f.VMs[i], c.VMs)
		if err != nil {
			return nil, err
		}
		c.VMs = append(c.VMs, *vm)
	}
	if err := r.names(f.Names, c); err != nil {
		return nil, err
	}
	return c, nil
}

// errLater says that a key of the interface does nothing yet.
var errLater = errors.New("this version does not serve it yet; leave it out")

func (r *reader) limits(f *fileConfig, c *Config) (err error) {
	if c.Limits.FlowBuffer, err = parseSize(f.Limits.FlowBuffer); err != nil {
		return r.at("$.limits.flowBuffer", err)
	}
	if c.Limits.TotalBuffers, err = parseSize(f.Limits.TotalBuffers); err != nil {
		return r.at("$.limits.totalBuffers", err)
	}
	if c.Limits.FlowBuffer > maxWindow {
		return r.at("$.limits.flowBuffer", fmt.Errorf("%q is more than 1GiB, TCP's largest window", f.Limits.FlowBuffer))
	}
	if c.Limits.TotalBuffers < c.Limits.FlowBuffer {
		return r.at("$.limits.totalBuffers", fmt.Errorf("%q is less than limits.flowBuffer, %q", f.Limits.TotalBuffers, f.Limits.FlowBuffer))
	}
	if c.Limits.Flows, err = parseCount(f.Limits.Flows); err != nil {
		return r.at("$.limits.flows", err)
	}
	if c.Limits.UDPFlows, err = parseCount(f.Limits.UDPFlows); err != nil {
		return r.at("$.limits.udpFlows", err)
	}
	return nil
}

// maxWindow is 65535 scaled by 2^14 (RFC 7323, 2.2), to the next power of two.
const maxWindow = 1 << 30

// parseCount reads a number of things: 1 to 2^31-1.
func parseCount(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a whole number from 1", s)
	}
	return int(n), nil
}

// parseSize reads "8MiB", "64KiB", "1GiB" or a number of bytes.
func parseSize(s string) (int, error) {
	digits, shift := s, 0
	for unit, n := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30} {
		if rest, ok := strings.CutSuffix(s, unit); ok {
			digits, shift = strings.TrimSpace(rest), n
		}
	}
	n, err := strconv.ParseUint(digits, 10, 62)
	if err != nil || n == 0 || n > math.MaxInt>>shift {
		return 0, fmt.Errorf("%q is not a size such as 64KiB, 8MiB or 1GiB", s)
	}
	if n<<shift < 64<<10 {
		return 0, fmt.Errorf("%q is less than 64KiB, one super-frame", s)
	}
	return int(n << shift), nil
}

func checkSocketPath(path string) error {
	if path == "" {
		return errors.New("names no socket")
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	if len(abs) > socketfile.MaxPath {
		return fmt.Errorf("socket path %q has %d bytes; a unix socket's has at most %d", abs, len(abs), socketfile.MaxPath)
	}
	return nil
}

// parsePublish reads a publish that leads to vm.
func parsePublish(text, vm string) (listener.Spec, error) {
	spec, err := listener.ParseSpec(text)
	if err != nil {
		return spec, err
	}
	spec.Target.VM = vm
	return spec, nil
}

// override adds the command line's VMs and publishes, and the file's top-level
// publishes, to the only VM.
func (c *Config) override(o Overrides, publish []string, r *reader) error {
	for _, text := range o.Attach {
		name, spec, ok := strings.Cut(text, "=")
		if !ok {
			return fmt.Errorf("--attach %q is not of the form VM=SPEC", text)
		}
		if err := checkName(name); err != nil {
			return fmt.Errorf("--attach %q: %w", text, err)
		}
		if slices.ContainsFunc(c.VMs, func(vm VMConfig) bool { return vm.Name == name }) {
			return fmt.Errorf("--attach %q: there is a VM named %q already", text, name)
		}
		parsed, err := attach.ParseSpec(spec)
		if err != nil {
			return fmt.Errorf("--attach %q: %w", text, err)
		}
		if err := checkAttach(parsed, c.VMs); err != nil {
			return fmt.Errorf("--attach %q: %w", text, err)
		}
		c.VMs = append(c.VMs, VMConfig{VMLink: VMLink{
			Name: name, Attach: parsed, MTU: defaultMTU, TCP: tcpPromoted,
			Node: netip.MustParseAddr(defaultNode), Gateway: netip.MustParsePrefix(defaultGateway),
		}})
	}
	add := func(text string) error {
		switch len(c.VMs) {
		case 1:
		case 0:
			return fmt.Errorf("publish %q leads nowhere: there is no VM", text)
		default:
			return fmt.Errorf("publish %q names no VM, and there are %d: put it under one of vms", text, len(c.VMs))
		}
		spec, err := parsePublish(text, c.VMs[0].Name)
		if err != nil {
			return err
		}
		c.VMs[0].Publish = append(c.VMs[0].Publish, spec)
		return nil
	}
	for i, text := range publish {
		if err := add(text); err != nil {
			return r.at(fmt.Sprintf("$.publish[%d]", i), err)
		}
	}
	for _, text := range o.Publish {
		if err := add(text); err != nil {
			return fmt.Errorf("--publish: %w", err)
		}
	}
	return nil
}

// specs returns every publish of the config, in order.
func (c *Config) specs() []listener.Spec {
	var specs []listener.Spec
	for _, vm := range c.VMs {
		specs = append(specs, vm.Publish...)
	}
	return specs
}
