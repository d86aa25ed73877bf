package names

import (
	"net/netip"
	"strings"

	"github.com/miekg/dns"
	"golang.org/x/net/publicsuffix"
)

// reverseZone is that of the addresses that containers get of their own.
const reverseZone = "77.127.in-addr.arpa."

// ServeDNS implements dns.Handler: it answers one query.
func (s *Server) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	w = counted{w, &s.answered}
	resp, ours := s.answer(req)
	if !ours {
		s.forward(w, req)
		return
	}
	s.reply(w, req, resp)
}

// reply sends an answer in the size that the client takes.
func (s *Server) reply(w dns.ResponseWriter, req, resp *dns.Msg) {
	resp.RecursionAvailable = len(s.upstreams) > 0
	if opt := req.IsEdns0(); opt != nil && resp.IsEdns0() == nil {
		resp.SetEdns0(udpSize, opt.Do())
	}
	resp.Compress = true
	size := dns.MaxMsgSize
	if !overTCP(w) {
		size = min(takes(req), udpSize)
	}
	resp.Truncate(size)
	_ = w.WriteMsg(resp) // a client that has left needs no answer
}

// takes is how long an answer over UDP may be for a client (RFC 6891, 6.2.3).
func takes(req *dns.Msg) int {
	if opt := req.IsEdns0(); opt != nil {
		return max(int(opt.UDPSize()), dns.MinMsgSize)
	}
	return dns.MinMsgSize
}

// answer answers what is ours to answer: false is for others.
func (s *Server) answer(req *dns.Msg) (resp *dns.Msg, ours bool) {
	resp = new(dns.Msg)
	resp.SetReply(req)
	switch {
	case req.Opcode != dns.OpcodeQuery:
		resp.Rcode = dns.RcodeNotImplemented
		return resp, true
	case len(req.Question) != 1:
		resp.Rcode = dns.RcodeFormatError
		return resp, true
	}
	if opt := req.IsEdns0(); opt != nil && opt.Version() != 0 {
		resp.SetEdns0(udpSize, opt.Do())
		resp.Rcode = dns.RcodeBadVers
		return resp, true
	}
	q := req.Question[0]
	if q.Qtype == dns.TypeNone || q.Qclass == 0 { // how the library reads a question that ends early
		resp.Rcode = dns.RcodeFormatError
		return resp, true
	}
	if q.Qclass != dns.ClassINET || q.Qtype == dns.TypeAXFR || q.Qtype == dns.TypeIXFR {
		resp.Rcode = dns.RcodeRefused
		return resp, true
	}
	name := strings.ToLower(q.Name)
	switch local, in := below(name, s.zone); {
	case name == s.zone:
		s.apex(resp, s.zone)
		return resp, true
	case in:
		addrs, exists := s.table.Lookup(plain(local))
		s.addresses(resp, s.zone, addrs, exists)
		return resp, true
	case s.bareIsOurs(strings.TrimSuffix(name, ".")):
		addrs, _ := s.table.Lookup(strings.TrimSuffix(name, "."))
		s.addresses(resp, name, addrs, true)
		return resp, true
	}
	return resp, s.back(resp, name) || s.bare(resp, name)
}

// bareIsOurs says whether a name without the zone is answered from the table. The
// guest chooses its containers' names, and the host's whole resolver may ask
// here: so a container takes neither a name that hosts give a meaning of their
// own (RFC 6761; wpad and isatap), nor, where others are asked upstream, one under
// a domain that the public has.
func (s *Server) bareIsOurs(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	switch last {
	case "localhost", "arpa", "invalid", "wpad", "isatap":
		return false
	}
	if len(s.upstreams) > 0 && last != name {
		if _, public := publicsuffix.PublicSuffix(name); public {
			return false
		}
	}
	return s.table.Has(name)
}

// below returns what of a name is in front of a zone, without the dot between
// them, and whether the name is below it.
func below(name, zone string) (front string, ok bool) {
	front, ok = strings.CutSuffix(name, "."+zone)
	// The dot must be one between labels: "a\.culvert.internal." is no such.
	backslashes := len(front) - len(strings.TrimRight(front, `\`))
	return front, ok && backslashes%2 == 0
}

// plain returns a name without escapes, in which no label has a dot of its own:
// one that has anything that needs an escape is no name of the table, but may be
// below one.
func plain(name string) string {
	if !strings.Contains(name, `\`) {
		return name
	}
	labels := dns.SplitDomainName(name)
	for i, l := range labels {
		if strings.Contains(l, `\`) {
			labels[i] = "?"
		}
	}
	return strings.Join(labels, ".")
}

// apex answers for a zone itself, which has nothing but its SOA.
func (s *Server) apex(resp *dns.Msg, zone string) {
	resp.Authoritative = true
	if t := resp.Question[0].Qtype; t == dns.TypeSOA || t == dns.TypeANY {
		resp.Answer = []dns.RR{s.soa(zone)}
		resp.Answer[0].Header().Name = resp.Question[0].Name
		return
	}
	resp.Ns = []dns.RR{s.soa(zone)}
}

// addresses answers for a name of a zone: a bare name is a zone by itself.
func (s *Server) addresses(resp *dns.Msg, zone string, addrs []netip.Addr, exists bool) {
	resp.Authoritative = true
	q := resp.Question[0]
	for _, a := range addrs {
		switch {
		case a.Is4() && (q.Qtype == dns.TypeA || q.Qtype == dns.TypeANY):
			resp.Answer = append(resp.Answer, &dns.A{Hdr: header(q.Name, dns.TypeA), A: a.AsSlice()})
		case a.Is6() && (q.Qtype == dns.TypeAAAA || q.Qtype == dns.TypeANY):
			resp.Answer = append(resp.Answer, &dns.AAAA{Hdr: header(q.Name, dns.TypeAAAA), AAAA: a.AsSlice()})
		}
	}
	if len(resp.Answer) == 0 {
		s.nothing(resp, zone, exists)
	}
}

// nothing answers that a zone has no data for the question, or no such name.
func (s *Server) nothing(resp *dns.Msg, zone string, exists bool) {
	if !exists && !s.noData {
		resp.Rcode = dns.RcodeNameError
	}
	resp.Ns = []dns.RR{s.soa(zone)}
}

// header is that of an answer. With a TTL of 0 nobody keeps it.
func header(name string, rrtype uint16) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: rrtype, Class: dns.ClassINET}
}

// soa is the SOA record of a zone of ours. Its last number, 0, is how long it may
// be remembered that something is not there (RFC 2308, 4).
func (s *Server) soa(zone string) dns.RR {
	return &dns.SOA{
		Hdr: header(zone, dns.TypeSOA), Ns: s.zone, Mbox: "hostmaster." + s.zone,
		Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: 0,
	}
}

// back answers for the way from an address to its names, when the address is in
// the table or could be. It is false for those of others.
func (s *Server) back(resp *dns.Msg, name string) bool {
	q := resp.Question[0]
	zone := name // an address by itself
	_, inReverse := below(name, reverseZone)
	if inReverse || name == reverseZone {
		zone = reverseZone
	}
	if name == reverseZone {
		s.apex(resp, zone)
		return true
	}
	addr, whole := reverseAddr(name)
	var names []string
	if whole {
		names = s.table.Reverse(addr)
	}
	if len(names) == 0 && !inReverse {
		return false
	}
	resp.Authoritative = true
	if q.Qtype == dns.TypePTR || q.Qtype == dns.TypeANY {
		for _, n := range names {
			if full := n + "." + s.zone; len(full) <= 254 {
				resp.Answer = append(resp.Answer, &dns.PTR{Hdr: header(q.Name, dns.TypePTR), Ptr: full})
			}
		}
	}
	if len(resp.Answer) == 0 {
		// "5.77.127.in-addr.arpa" is there for what may be below it.
		s.nothing(resp, zone, len(names) > 0 || inReverse && dns.CountLabel(name) == 5)
	}
	return true
}

// reverseAddr returns the address that a name below in-addr.arpa or ip6.arpa
// stands for (RFC 1035, 3.5; RFC 3596, 2.5), and whether it is a whole one.
func reverseAddr(name string) (netip.Addr, bool) {
	if front, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		octets := strings.Split(front, ".")
		if len(octets) != 4 {
			return netip.Addr{}, false
		}
		a, err := netip.ParseAddr(octets[3] + "." + octets[2] + "." + octets[1] + "." + octets[0])
		return a, err == nil && a.Is4()
	}
	front, ok := strings.CutSuffix(name, ".ip6.arpa.")
	if !ok || len(front) != 63 {
		return netip.Addr{}, false
	}
	var text []byte
	for i := 62; i >= 0; i -= 2 { // digits are at even places, dots at odd ones
		if i > 0 && front[i-1] != '.' {
			return netip.Addr{}, false
		}
		if text = append(text, front[i]); len(text)%5 == 4 && i > 0 {
			text = append(text, ':')
		}
	}
	a, err := netip.ParseAddr(string(text))
	return a, err == nil && a.Zone() == ""
}

// bare answers for a name of one label that nobody has: it was meant for here,
// or for a search list, and no server elsewhere is asked. Whoever checks
// signatures asks the root for the keys of a top-level domain: that is let
// through. Without upstreams it is refused like all that is not ours.
func (s *Server) bare(resp *dns.Msg, name string) bool {
	t := resp.Question[0].Qtype
	if len(s.upstreams) == 0 || dns.CountLabel(name) != 1 || t == dns.TypeDS || t == dns.TypeDNSKEY {
		return false
	}
	resp.Rcode = dns.RcodeNameError
	return true
}
