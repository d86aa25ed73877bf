package listener

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

const (
	maxPort = 65535
	// maxSpecLen bounds what ParseSpec looks at. The longest publish there is:
	// two addresses in full with an IPv4 tail and brackets (45 + 2 each) 94, two
	// ranges 22, colons 3, "/tcp" 4 = 123.
	maxSpecLen = 128

	specForm = "[hostIP:]hostPort[-end]:[guestIP:]guestPort[-end][/tcp|/udp]"
)

// ParseSpec reads a publish: [hostIP:]hostPort[-end]:[guestIP:]guestPort[-end][/tcp|/udp],
// docker's -p syntax with ssh's optional target address in the middle. IPv6
// addresses stand in brackets. The protocol is TCP unless it says otherwise,
// in any case. Host port 0 lets the kernel pick; other ports are 1 to 65535;
// ranges go upwards and are equally long on both sides.
//
// The Spec is in canonical form and Spec.String gives it back; Target.VM is
// left for the caller. An error quotes the part that is wrong and says what
// was expected there; the Spec is zero then.
func ParseSpec(s string) (Spec, error) {
	spec, err := parseSpec(s)
	if err != nil {
		return Spec{}, fmt.Errorf("publish %s: %w", quote(s), err)
	}
	return spec, nil
}

func parseSpec(s string) (Spec, error) {
	if s == "" {
		return Spec{}, errors.New("empty; expected " + specForm)
	}
	if len(s) > maxSpecLen {
		return Spec{}, fmt.Errorf("%d bytes long; expected %s", len(s), specForm)
	}
	spec := Spec{Proto: TCP}
	rest, proto, ok := strings.Cut(s, "/")
	if ok {
		switch strings.ToLower(proto) {
		case "tcp":
		case "udp":
			spec.Proto = UDP
		default:
			return Spec{}, fmt.Errorf("protocol %s; expected tcp or udp", quote(proto))
		}
	}
	fields, err := splitFields(rest)
	if err != nil {
		return Spec{}, err
	}
	hostIP, hostPorts, guestIP, guestPorts, err := arrange(fields)
	if err != nil {
		return Spec{}, err
	}

	host, err := parseAddr("host", hostIP, validHost)
	if err != nil {
		return Spec{}, err
	}
	first, n, err := parsePorts("host", hostPorts, 0)
	if err != nil {
		return Spec{}, err
	}
	guest, err := parseAddr("guest", guestIP, validGuest)
	if err != nil {
		return Spec{}, err
	}
	guestFirst, guestN, err := parsePorts("guest", guestPorts, 1)
	if err != nil {
		return Spec{}, err
	}
	if n != guestN {
		return Spec{}, fmt.Errorf("guest ports %s are %d, host ports %s are %d; expected as many on both sides",
			quote(guestPorts), guestN, quote(hostPorts), n)
	}
	spec.Host = netip.AddrPortFrom(host, first)
	spec.Ports = n
	spec.Target.Addr = netip.AddrPortFrom(guest, guestFirst)
	return spec.Canonical(), nil
}

// splitFields splits at the colons outside brackets. Brackets stay, so that an
// address is known by its looks.
func splitFields(s string) ([]string, error) {
	var fields []string
	for {
		end := strings.IndexByte(s, ':')
		if strings.HasPrefix(s, "[") {
			end = strings.IndexByte(s, ']') + 1
			if end == 0 {
				return nil, fmt.Errorf("%s has no closing bracket", quote(s))
			}
			if end < len(s) && s[end] != ':' {
				return nil, fmt.Errorf("%s after the address %s; expected a colon", quote(s[end:]), quote(s[:end]))
			}
			if end == len(s) {
				end = -1
			}
		}
		if end < 0 {
			return append(fields, s), nil
		}
		fields = append(fields, s[:end])
		s = s[end+1:]
	}
}

// arrange says which field is what, by their number and, of three, by whether
// the first or the second looks like an address.
func arrange(f []string) (hostIP, hostPorts, guestIP, guestPorts string, err error) {
	switch {
	case len(f) == 1:
		return "", "", "", "", fmt.Errorf("%s alone has no guest port; expected %s, with host port 0 for one that the kernel picks",
			quote(f[0]), specForm)
	case len(f) == 2:
		return "", f[0], "", f[1], nil
	case len(f) == 3 && isPorts(f[0]):
		if f[1] == "" {
			return "", "", "", "", errors.New(`guest address "" is empty; leave its colon out for the node address`)
		}
		return "", f[0], f[1], f[2], nil
	case len(f) == 3:
		if f[0] == "" {
			return "", "", "", "", errors.New(`host address "" is empty; leave its colon out for the default address`)
		}
		return f[0], f[1], "", f[2], nil
	case len(f) == 4 && f[0] != "" && f[2] != "":
		return f[0], f[1], f[2], f[3], nil
	}
	return "", "", "", "", fmt.Errorf("%d parts between colons, or an empty one; expected %s, IPv6 addresses in brackets", len(f), specForm)
}

// isPorts reports whether s can only be meant as a port or a range.
func isPorts(s string) bool {
	return s != "" && strings.Trim(s, "0123456789-") == ""
}

// parseAddr reads an address of one side; "" is the zero address.
func parseAddr(side, s string, valid func(netip.Addr) error) (netip.Addr, error) {
	if s == "" {
		return netip.Addr{}, nil
	}
	inner, bracketed := strings.CutPrefix(s, "[")
	inner = strings.TrimSuffix(inner, "]")
	a, err := netip.ParseAddr(inner)
	if err != nil || bracketed != a.Is6() {
		return netip.Addr{}, fmt.Errorf("%s address %s; expected IPv4, or IPv6 in brackets", side, quote(s))
	}
	if err := valid(a); err != nil {
		return netip.Addr{}, fmt.Errorf("%s: %w", quote(s), err)
	}
	return a, nil
}

// parsePorts reads "80" or "80-89" of one side, whose ports start at least.
func parsePorts(side, s string, least uint64) (first, n uint16, err error) {
	from, to, isRange := strings.Cut(s, "-")
	a, err := parsePort(side, from, least)
	if err != nil {
		return 0, 0, err
	}
	if !isRange {
		return a, 1, nil
	}
	b, err := parsePort(side, to, least)
	if err != nil {
		return 0, 0, err
	}
	switch {
	case a == 0:
		return 0, 0, fmt.Errorf("%s range %s starts at 0; expected a range from 1, or 0 alone for a port that the kernel picks", side, quote(s))
	case b < a:
		return 0, 0, fmt.Errorf("%s range %s goes down; expected first-last", side, quote(s))
	}
	return a, b - a + 1, nil
}

func parsePort(side, s string, least uint64) (uint16, error) {
	// ParseUint takes neither sign nor space in base 10.
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n < least {
		return 0, fmt.Errorf("%s port %s; expected a number in %d-%d", side, quote(s), least, maxPort)
	}
	return uint16(n), nil
}

// quote quotes a part of a publish, cut to a length that a sentence can hold.
func quote(s string) string {
	if len(s) > maxSpecLen {
		s = s[:maxSpecLen] + "…"
	}
	return strconv.Quote(s)
}
