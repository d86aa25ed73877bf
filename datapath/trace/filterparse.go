package trace

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

const (
	// maxFilter bounds a filter's text, and so its questions: each is a call on
	// the datapath's way.
	maxFilter = 2048
	// maxDepth bounds its parentheses and its nots.
	maxDepth = 32
)

// ParseFilter compiles a filter of the language of pcap-filter(7). It knows
//
//	[ether|ip|ip6|arp|tcp|udp|icmp|icmp6] [src|dst|src or dst|src and dst] [host|net|port|portrange] VALUE
//	ether, ip, ip6, arp, tcp, udp, icmp, icmp6, broadcast, multicast, inbound, outbound
//	less N, greater N
//	and && or || not ! ( )
//
// where and and or bind alike, from left to right, and a VALUE after one of them
// is asked as the one before it. Inbound is what the guest sent. Hosts and ports
// are numbers. A frame with a VLAN tag matches questions of Ethernet alone. The
// error is one sentence that quotes the offending word.
func ParseFilter(text string) (*Filter, error) {
	if len(text) > maxFilter {
		return nil, fmt.Errorf("filter: %d characters are more than %d", len(text), maxFilter)
	}
	p := &filterParser{words: filterWords(text)}
	root, err := p.expression(0)
	if err == nil && len(p.words) > 0 {
		err = fmt.Errorf("%q stands where the filter should end, or needs an \"and\" before it", p.words[0])
	}
	if err != nil {
		return nil, fmt.Errorf("filter: %w", err)
	}
	return &Filter{root: root}, nil
}

// filterWords cuts text into words, parentheses and operators.
func filterWords(text string) []string {
	for _, mark := range []string{"(", ")", "&&", "||"} {
		text = strings.ReplaceAll(text, mark, " "+mark+" ")
	}
	var words []string
	for _, w := range strings.Fields(text) {
		for len(w) > 1 && w[0] == '!' {
			words = append(words, "!")
			w = w[1:]
		}
		words = append(words, w)
	}
	return words
}

type filterParser struct {
	words []string
	last  *qualifiers // of the value before
}

// qualifiers say what a value is asked of.
type qualifiers struct {
	proto string
	ends  ends
	kind  string // host, net, port, portrange; empty for host
}

func (p *filterParser) peek() string {
	if len(p.words) == 0 {
		return ""
	}
	return p.words[0]
}

// next takes a word if it is one of ws.
func (p *filterParser) next(ws ...string) (string, bool) {
	w := p.peek()
	for _, want := range ws {
		if w == want {
			p.words = p.words[1:]
			return w, true
		}
	}
	return "", false
}

// value takes a word that says something, as what.
func (p *filterParser) value(what string) (string, error) {
	w := p.peek()
	if w == "" {
		return "", fmt.Errorf("it ends where %s is missing", what)
	}
	p.words = p.words[1:]
	return w, nil
}

func (p *filterParser) expression(depth int) (*node, error) {
	left, err := p.term(depth)
	for err == nil {
		if _, ok := p.next("and", "&&"); ok {
			var right *node
			right, err = p.term(depth)
			left = &node{op: opAnd, a: left, b: right}
		} else if _, ok := p.next("or", "||"); ok {
			var right *node
			right, err = p.term(depth)
			left = &node{op: opOr, a: left, b: right}
		} else {
			return left, nil
		}
	}
	return nil, err
}

func (p *filterParser) term(depth int) (*node, error) {
	if depth >= maxDepth {
		return nil, fmt.Errorf("%q lies deeper than %d parentheses and nots", p.peek(), maxDepth)
	}
	if _, ok := p.next("not", "!"); ok {
		a, err := p.term(depth + 1)
		return &node{op: opNot, a: a}, err
	}
	if _, ok := p.next("("); ok {
		n, err := p.expression(depth + 1)
		if err != nil {
			return nil, err
		}
		if _, ok := p.next(")"); !ok {
			if p.peek() == "" {
				return nil, fmt.Errorf("a \"(\" has no \")\"")
			}
			return nil, fmt.Errorf("%q stands where a \")\" should, or needs an \"and\" before it", p.peek())
		}
		return n, nil
	}
	return p.primitive()
}

// protocols are the words that name one, with what they ask.
var protocols = map[string]node{
	"ether": {},
	"ip":    {etherType: []uint16{typeIPv4}},
	"ip6":   {etherType: []uint16{typeIPv6}},
	"arp":   {etherType: []uint16{typeARP}},
	"tcp":   {etherType: []uint16{typeIPv4, typeIPv6}, proto: protoTCP},
	"udp":   {etherType: []uint16{typeIPv4, typeIPv6}, proto: protoUDP},
	"icmp":  {etherType: []uint16{typeIPv4}, proto: protoICMP},
	"icmp6": {etherType: []uint16{typeIPv6}, proto: protoICMP6},
}

func (p *filterParser) primitive() (*node, error) {
	switch w, _ := p.next("inbound", "outbound", "less", "greater", "broadcast", "multicast"); w {
	case "inbound":
		return &node{op: opDir, dir: Inbound}, nil
	case "outbound":
		return &node{op: opDir, dir: Outbound}, nil
	case "broadcast", "multicast":
		return &node{op: opCast, broadcast: w == "broadcast"}, nil
	case "less", "greater":
		text, err := p.value("a length")
		if err != nil {
			return nil, err
		}
		n, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			return nil, fmt.Errorf("%q is no length in bytes", text)
		}
		o := opLess
		if w == "greater" {
			o = opGreater
		}
		return &node{op: o, n: int(n)}, nil
	}
	q := &qualifiers{}
	asked := false // of a value
	if _, ok := protocols[p.peek()]; ok {
		q.proto, _ = p.next(p.peek())
		if q.proto == "ether" {
			if w, ok := p.next("broadcast", "multicast"); ok {
				return &node{op: opCast, broadcast: w == "broadcast"}, nil
			}
		}
	}
	if w, ok := p.next("src", "dst"); ok {
		asked = true
		q.ends = p.direction(w)
	}
	if w, ok := p.next("host", "net", "port", "portrange"); ok {
		asked = true
		q.kind = w
	}
	switch {
	case asked:
	case q.proto != "":
		n := protocols[q.proto]
		n.op = opProto
		return &n, nil
	case p.last != nil && p.peek() != "" && p.peek()[0] != '(' && p.peek()[0] != ')':
		q = p.last // "port 80 or 443"
	}
	return p.ask(q)
}

// direction takes what may follow src or dst: "or dst", "and dst" and so on.
func (p *filterParser) direction(w string) ends {
	other := map[string]string{"src": "dst", "dst": "src"}[w]
	if len(p.words) > 1 && p.words[1] == other {
		if join, ok := p.next("or", "and"); ok {
			p.words = p.words[1:]
			if join == "or" {
				return either
			}
			return both
		}
	}
	if w == "src" {
		return srcOnly
	}
	return dstOnly
}

// ask takes the value that q qualifies.
func (p *filterParser) ask(q *qualifiers) (*node, error) {
	what := map[string]string{"net": "a network", "port": "a port", "portrange": "a range of ports"}[q.kind]
	if what == "" {
		what = "a host"
	}
	if len(p.words) == 0 && q.kind == "" && q.proto == "" && q.ends == either {
		what = "a question"
	}
	text, err := p.value(what)
	if err != nil {
		return nil, err
	}
	n := protocols[q.proto]
	n.ends = q.ends
	switch q.kind {
	case "port", "portrange":
		err = n.ports(q, text)
	case "net":
		n.op = opHost
		if n.prefix, err = parseNet(text); q.proto == "ether" {
			err = fmt.Errorf("\"ether net %s\": Ethernet knows no networks", text)
		}
	default:
		err = n.host(q, text)
	}
	if err != nil {
		return nil, err
	}
	p.last = q
	return &n, nil
}

func (n *node) host(q *qualifiers, text string) error {
	if q.proto == "ether" {
		n.op = opEther
		mac, err := net.ParseMAC(text)
		if err != nil || len(mac) != 6 {
			return fmt.Errorf("%q is no Ethernet address", text)
		}
		n.mac = [6]byte(mac)
		return nil
	}
	n.op = opHost
	addr, err := netip.ParseAddr(text)
	if err == nil && addr.Zone() == "" {
		n.prefix = netip.PrefixFrom(addr, addr.BitLen())
		return nil
	}
	if q.kind == "" && q.ends == either && q.proto == "" {
		return fmt.Errorf("%q is no word of it: see \"culvert trace --help\"", text)
	}
	return fmt.Errorf("%q is no IP address", text)
}

func (n *node) ports(q *qualifiers, text string) error {
	n.op = opPort
	if q.proto != "" && q.proto != "ip" && q.proto != "ip6" && q.proto != "tcp" && q.proto != "udp" {
		return fmt.Errorf("\"%s %s %s\": %s has no ports", q.proto, q.kind, text, q.proto)
	}
	if len(n.etherType) == 0 {
		n.etherType = []uint16{typeIPv4, typeIPv6}
	}
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	lo, err := strconv.ParseUint(first, 10, 16)
	hi, err2 := strconv.ParseUint(last, 10, 16)
	if err != nil || err2 != nil || lo > hi || isRange && q.kind == "port" {
		if q.kind == "port" {
			return fmt.Errorf("%q is no port's number", text)
		}
		return fmt.Errorf("%q is no range of ports such as 6000-6009", text)
	}
	n.lo, n.hi = uint16(lo), uint16(hi)
	return nil
}

// parseNet reads a prefix, "10.0.2.0/24", or the beginning of an IPv4 address,
// "10.0.2", that stands for all with it.
func parseNet(text string) (netip.Prefix, error) {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.Masked(), nil
	}
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	parts := strings.Count(text, ".") + 1
	if parts < 4 {
		if a, err := netip.ParseAddr(text + strings.Repeat(".0", 4-parts)); err == nil {
			return netip.PrefixFrom(a, 8*parts), nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("%q is no network such as 10.0.2.0/24", text)
}
