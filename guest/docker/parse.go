package docker

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
)

const (
	maxName  = 128
	maxLabel = 256

	// Compose's labels (github.com/docker/compose, pkg/api/labels.go).
	projectLabel = "com.docker.compose.project"
	serviceLabel = "com.docker.compose.service"
)

// A detail is what we read of an inspection (GET /containers/ID/json). Its texts
// are the guest's.
type detail struct {
	ID    string `json:"Id"`
	Name  string
	State struct {
		Running   bool
		StartedAt string
	}
	Config     struct{ Labels map[string]string }
	HostConfig struct {
		NetworkMode  string
		PortBindings portMap
	}
	NetworkSettings struct {
		Ports    portMap
		Networks map[string]*struct{ IPAddress, GlobalIPv6Address string }
	}
}

// A portMap has the bindings of "80/tcp". It is nil where the engine says null.
type portMap map[string][]struct{ HostIP, HostPort text }

// A text is a JSON string, or what stands in its place.
type text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *text) UnmarshalJSON(raw []byte) error {
	var s *string
	if json.Unmarshal(raw, &s) != nil {
		*t = text(raw)
	} else if s != nil {
		*t = text(*s)
	}
	return nil
}

// container makes a Container of an inspection.
func (d *detail) container() Container {
	started, err := time.Parse(time.RFC3339Nano, d.State.StartedAt)
	if err != nil {
		started = time.Time{}
	}
	c := Container{
		ID: d.ID, Started: started,
		Name:    checked(strings.TrimPrefix(d.Name, "/"), maxName),
		Project: checked(d.Config.Labels[projectLabel], maxLabel),
		Service: checked(d.Config.Labels[serviceLabel], maxLabel),
	}
	for _, name := range slices.Sorted(maps.Keys(d.NetworkSettings.Networks)) {
		if n := d.NetworkSettings.Networks[name]; n != nil {
			for _, a := range []string{n.IPAddress, n.GlobalIPv6Address} {
				addr, _ := netip.ParseAddr(a) // invalid is left out by addAddr
				c.addAddr(addr)
			}
		}
	}
	ports := d.NetworkSettings.Ports
	if mode := d.HostConfig.NetworkMode; ports == nil && mode != "host" && mode != "none" && !strings.HasPrefix(mode, "container:") {
		ports = d.HostConfig.PortBindings // the engine's own are not there yet, or not told
	}
	for key, bindings := range ports {
		c.addPorts(key, bindings)
	}
	c.tidy()
	return c
}

// fromListing makes a Container of what a listing says, when there is no more to
// be had. When it was created stands in for when it was started.
func fromListing(l *container.Summary) Container {
	c := Container{
		ID: l.ID, Started: time.Unix(l.Created, 0).UTC(),
		Project: checked(l.Labels[projectLabel], maxLabel),
		Service: checked(l.Labels[serviceLabel], maxLabel),
	}
	for _, n := range l.Names {
		// The others, "/a/b", are links: what a calls it.
		if name, ok := strings.CutPrefix(n, "/"); ok && c.Name == "" {
			c.Name = checked(name, maxName)
		}
	}
	if l.NetworkSettings != nil {
		for _, name := range slices.Sorted(maps.Keys(l.NetworkSettings.Networks)) {
			if n := l.NetworkSettings.Networks[name]; n != nil {
				c.addAddr(n.IPAddress)
				c.addAddr(n.GlobalIPv6Address)
			}
		}
	}
	for _, p := range l.Ports {
		c.addBinding(strings.ToLower(p.Type), p.PrivatePort, p.IP, p.PublicPort)
	}
	c.tidy()
	return c
}

// addAddr takes an address that a container can have.
func (c *Container) addAddr(a netip.Addr) {
	if a = a.Unmap().WithZone(""); a.IsGlobalUnicast() || a.IsLinkLocalUnicast() {
		c.Addrs = append(c.Addrs, a)
	}
}

// addPorts takes what the engine has for a key, "80/tcp". A bare number is TCP;
// a range, as no engine of Docker's writes it but others may, counts one by one.
func (c *Container) addPorts(key string, bindings []struct{ HostIP, HostPort text }) {
	number, proto, _ := strings.Cut(key, "/")
	proto = strings.ToLower(cmp.Or(proto, "tcp"))
	first, last, ok := ports(number)
	switch {
	case !ok:
		c.unusable("", 0, fmt.Sprintf("%s is no port", quoted(key)))
		return
	case !slices.Contains(protocols, proto):
		c.unusable("", first, fmt.Sprintf("%s is no protocol", quoted(proto)))
		return
	case len(bindings) == 0:
		c.unusable(proto, first, noHostPort)
	}
	for _, b := range bindings {
		addr, err := netip.ParseAddr(string(b.HostIP))
		if err != nil && b.HostIP != "" {
			c.unusable(proto, first, fmt.Sprintf("host address %s is none", quoted(string(b.HostIP))))
			continue
		}
		hostFirst, hostLast, ok := ports(string(b.HostPort))
		switch {
		case b.HostPort == "" || b.HostPort == "0":
			c.unusable(proto, first, noHostPort)
		case !ok:
			c.unusable(proto, first, fmt.Sprintf("host port %s is none", quoted(string(b.HostPort))))
		case first == last && hostFirst != hostLast: // docker run -p 8000-8010:80, not yet decided
			c.unusable(proto, first, fmt.Sprintf("host port %d-%d is for the engine to choose from", hostFirst, hostLast))
		case last-first != hostLast-hostFirst:
			c.unusable(proto, first, fmt.Sprintf("host ports %d-%d are not as many as %d-%d", hostFirst, hostLast, first, last))
		default:
			for i := range last - first + 1 {
				c.addBinding(proto, first+i, addr, hostFirst+i)
			}
		}
		if len(c.Bindings) > maxEntries {
			return // the listing is refused for it
		}
	}
}

// quoted is for a text of the guest's in a reason, of which there may be many.
func quoted(text string) string { return `"` + clean(text, 40) + `"` }

var protocols = []string{"tcp", "udp", "sctp"}

const noHostPort = "no host port"

// ports parses "80" or "80-90": at least 1, and not running backwards.
func ports(s string) (first, last uint16, ok bool) {
	a, b, isRange := strings.Cut(s, "-")
	if !isRange {
		b = a
	}
	x, err1 := strconv.ParseUint(a, 10, 16)
	y, err2 := strconv.ParseUint(b, 10, 16)
	if err1 != nil || err2 != nil || x == 0 || y < x {
		return 0, 0, false
	}
	return uint16(x), uint16(y), true
}

// addBinding takes one binding, or says why it leads nowhere.
func (c *Container) addBinding(proto string, port uint16, hostIP netip.Addr, hostPort uint16) {
	switch {
	case !slices.Contains(protocols, proto):
		c.unusable("", port, fmt.Sprintf("%s is no protocol", quoted(proto)))
	case port == 0:
		c.unusable(proto, 0, "port 0 is none")
	case hostPort == 0:
		c.unusable(proto, port, noHostPort)
	case hostIP.Zone() != "":
		c.unusable(proto, port, fmt.Sprintf("host address %s belongs to one of the guest's links", clean(hostIP.String(), 40)))
	default:
		c.Bindings = append(c.Bindings, Binding{Proto: proto, Port: port, HostIP: hostIP.Unmap(), HostPort: hostPort})
	}
}

func (c *Container) unusable(proto string, port uint16, reason string) {
	c.Unusable = append(c.Unusable, Unusable{Proto: proto, Port: port, Reason: reason})
}

// tidy sorts the entries and leaves out repeats: the engine's come from a map.
func (c *Container) tidy() {
	slices.SortFunc(c.Bindings, func(a, b Binding) int {
		return cmp.Or(strings.Compare(a.Proto, b.Proto), cmp.Compare(a.Port, b.Port),
			a.HostIP.Compare(b.HostIP), cmp.Compare(a.HostPort, b.HostPort))
	})
	c.Bindings = slices.Compact(c.Bindings)
	slices.SortFunc(c.Unusable, func(a, b Unusable) int {
		return cmp.Or(strings.Compare(a.Proto, b.Proto), cmp.Compare(a.Port, b.Port), strings.Compare(a.Reason, b.Reason))
	})
	c.Unusable = slices.Compact(c.Unusable)
}

// isID says whether s is a full ID: 64 hexadecimal digits, lower-case as the
// engine writes them.
func isID(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// checked returns s if it is a name by the engine's own rule,
// [a-zA-Z0-9][a-zA-Z0-9_.-]*, and not longer than longest; "" otherwise.
func checked(s string, longest int) string {
	if len(s) > longest {
		return ""
	}
	for i := range len(s) {
		b := s[i]
		alnum := 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || '0' <= b && b <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("_.-", rune(b))) {
			return ""
		}
	}
	return strings.Clone(s) // the rest of the answer it stands in can go
}
