package attach

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/culvertnet/culvert/datapath/socketfile"
)

// The transports of a Spec, as they are written.
const (
	QEMU      = "qemu"       // QEMU's -netdev stream
	Unixgram  = "unixgram"   // one datagram, one frame: QEMU's -netdev dgram, vfkit, krunkit
	VhostUser = "vhost-user" // the VMM is the front-end
	Tap       = "tap"        // we hold the fd side
	Packet    = "packet"     // AF_PACKET on an interface that a VMM holds
	Memory    = "memory"     // in-process, for the demo and tests
)

const (
	maxIfName = 15 // IFNAMSIZ-1 (netdevice(7))
	maxQueues = 16 // queue pairs of one NIC; more than its VM has processors is no use
)

// A Spec is a parsed attach spec. It is comparable; two that are equal name the
// same attachment.
type Spec struct {
	// Transport is one of the constants above.
	Transport string
	// Network is "unix" or "tcp" for QEMU, empty otherwise.
	Network string
	// Address is an absolute path of at most 107 bytes (unix sockets), HOST:PORT
	// (tcp), an interface's name of 1 to 15 bytes (tap, packet), or empty
	// (memory).
	Address string
	// Dial says that we connect to the VMM and not it to us. QEMU only.
	Dial bool
	// NetNS is the absolute path of the network namespace of the interface; empty
	// for our own. Tap and packet only.
	NetNS string
	// Queues is the number of queue pairs, 1 to 16. It is 1 unless written, and 0
	// where a transport has no choice.
	Queues int
}

// forms is what ParseSpec takes, for people.
const forms = "qemu:unix:PATH[,dial], qemu:tcp:HOST:PORT[,dial], unixgram:PATH, vhost-user:PATH[,queues=N], " +
	"tap:IFNAME[,netns=PATH][,queues=N], packet:IFNAME[,netns=PATH] or memory"

// ParseSpec reads an attach spec:
//
//	qemu:unix:PATH[,dial]
//	qemu:tcp:HOST:PORT[,dial]
//	unixgram:PATH
//	vhost-user:PATH[,queues=N]
//	tap:IFNAME[,netns=PATH][,queues=N]
//	packet:IFNAME[,netns=PATH]
//	memory
//
// A PATH is absolute: a daemon and a VMM that were started in different
// directories would not mean the same by a relative one. It has no comma. HOST is
// an address (IPv6 in brackets) or a name and is not left out, so that nothing is
// opened to a network by an oversight. Options come in any order, each once. The
// error quotes the part that is wrong and says what is expected there.
func ParseSpec(s string) (Spec, error) {
	spec, err := parse(s)
	if err != nil {
		return Spec{}, fmt.Errorf("attach spec %q: %w", s, err)
	}
	return spec, nil
}

func parse(s string) (spec Spec, err error) {
	words := strings.Split(s, ",")
	transport, address, hasAddress := strings.Cut(words[0], ":")
	spec.Transport = transport
	switch transport {
	case QEMU:
		err = spec.setQEMU(address)
	case Unixgram:
		spec.Address, err = address, checkSocketPath(address)
	case VhostUser:
		spec.Queues = 1
		spec.Address, err = address, checkSocketPath(address)
	case Tap:
		spec.Queues = 1
		spec.Address, err = address, checkIfName(address)
	case Packet:
		spec.Address, err = address, checkIfName(address)
	case Memory:
		if hasAddress {
			err = fmt.Errorf("%q after %q, want nothing", address, "memory:")
		}
	default:
		err = fmt.Errorf("unknown transport %q, want %s", transport, forms)
	}
	if err != nil {
		return Spec{}, err
	}
	seen := make(map[string]bool)
	for _, option := range words[1:] {
		key, value, hasValue := strings.Cut(option, "=")
		if seen[key] {
			return Spec{}, fmt.Errorf("option %q twice", key)
		}
		seen[key] = true
		if err := spec.setOption(key, value, hasValue); err != nil {
			return Spec{}, fmt.Errorf("option %q: %w", option, err)
		}
	}
	return spec, nil
}

// setQEMU reads what follows "qemu:".
func (spec *Spec) setQEMU(s string) (err error) {
	spec.Network, spec.Address, _ = strings.Cut(s, ":")
	switch spec.Network {
	case "unix":
		return checkSocketPath(spec.Address)
	case "tcp":
		spec.Address, err = checkHostPort(spec.Address)
		return err
	}
	return fmt.Errorf("unknown kind of socket %q after %q, want unix:PATH or tcp:HOST:PORT", spec.Network, "qemu:")
}

// setOption reads one option of those that the transport has.
func (spec *Spec) setOption(key, value string, hasValue bool) error {
	var want string
	switch spec.Transport {
	case QEMU:
		want = "dial"
	case VhostUser:
		want = "queues=N"
	case Tap:
		want = "netns=PATH or queues=N"
	case Packet:
		want = "netns=PATH"
	default:
		return fmt.Errorf("%s takes none", spec.Transport)
	}
	switch {
	case key == "dial" && !hasValue && spec.Transport == QEMU:
		spec.Dial = true
		return nil
	case key == "queues" && hasValue && (spec.Transport == Tap || spec.Transport == VhostUser):
		n, err := strconv.ParseUint(value, 10, 8)
		if err != nil || n < 1 || n > maxQueues {
			return fmt.Errorf("%q is not a number from 1 to %d", value, maxQueues)
		}
		spec.Queues = int(n)
		return nil
	case key == "netns" && hasValue && (spec.Transport == Tap || spec.Transport == Packet):
		spec.NetNS = value
		return checkPath(value)
	}
	return fmt.Errorf("unknown, want %s", want)
}

// checkSocketPath says what is wrong with the path of a unix socket.
func checkSocketPath(path string) error {
	if len(path) > socketfile.MaxPath {
		return fmt.Errorf("path %q is %d bytes long, a unix socket's has at most %d", path, len(path), socketfile.MaxPath)
	}
	return checkPath(path)
}

func checkPath(path string) error {
	switch {
	case path == "":
		return errors.New("the path is missing")
	case path[0] != '/':
		return fmt.Errorf("path %q is relative, want an absolute one", path)
	case strings.HasSuffix(path, "/"):
		return fmt.Errorf("path %q is a directory's, want a file's", path)
	case strings.ContainsRune(path, 0):
		return fmt.Errorf("path %q has a NUL in it", path)
	}
	return nil
}

// checkHostPort returns HOST:PORT in its one form.
func checkHostPort(s string) (string, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return "", fmt.Errorf("address %q is not HOST:PORT, such as 127.0.0.1:5000 or [::1]:5000", s)
	}
	if _, err := netip.ParseAddr(host); err != nil && (host == "" || strings.ContainsFunc(host, badInHost)) {
		return "", fmt.Errorf("host %q in %q is neither an address nor a name; 127.0.0.1 is this machine alone", host, s)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return "", fmt.Errorf("port %q in %q is not a number from 1 to 65535", port, s)
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}

func badInHost(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '.' || r == '_')
}

// checkIfName says what is wrong with an interface's name, by the kernel's rules
// (dev_valid_name) and one of ours: a '%' would be a pattern for many names.
func checkIfName(name string) error {
	switch {
	case name == "":
		return errors.New("the interface's name is missing")
	case len(name) > maxIfName:
		return fmt.Errorf("interface name %q is %d bytes long, at most %d are possible", name, len(name), maxIfName)
	case name == "." || name == ".." || strings.ContainsFunc(name, badInIfName):
		return fmt.Errorf("%q is not an interface's name: '/', ':', '%%' and white space are not possible", name)
	}
	return nil
}

func badInIfName(r rune) bool {
	return strings.ContainsRune("/:%", r) || r <= ' ' || r == 0x7f || r == 0xa0 || r == '\uFFFD'
}

// String is the spec as ParseSpec reads it, with nothing written that is the
// default: it is the same for specs that are equal.
func (spec Spec) String() string {
	var b strings.Builder
	b.WriteString(spec.Transport)
	for _, part := range []string{spec.Network, spec.Address} {
		if part != "" {
			b.WriteString(":" + part)
		}
	}
	if spec.Dial {
		b.WriteString(",dial")
	}
	if spec.NetNS != "" {
		b.WriteString(",netns=" + spec.NetNS)
	}
	if spec.Queues > 1 {
		fmt.Fprintf(&b, ",queues=%d", spec.Queues)
	}
	return b.String()
}
