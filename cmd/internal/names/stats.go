package names

import (
	"sync/atomic"

	"github.com/miekg/dns"
)

// rcodes count by response code: the header's four bits (RFC 1035, 4.1.1), and
// BADVERS, the one beyond them that we give (RFC 6891, 9).
type rcodes [dns.RcodeBadVers + 1]atomic.Uint64

// Queries returns how many queries were answered by each response code, by its
// name in RFC 6895: from the beginning those that we give by ourselves, the others
// once an upstream gave one.
func (s *Server) Queries() map[string]uint64 {
	n := make(map[string]uint64)
	for _, ours := range []int{
		dns.RcodeSuccess, dns.RcodeFormatError, dns.RcodeServerFailure, dns.RcodeNameError, dns.RcodeNotImplemented, dns.RcodeRefused, dns.RcodeBadVers,
	} {
		n[rcodeName(ours)] = 0
	}
	for rcode := range s.answered {
		if count := s.answered[rcode].Load(); count > 0 {
			n[rcodeName(rcode)] += count
		}
	}
	return n
}

func rcodeName(rcode int) string {
	if rcode == dns.RcodeBadVers { // the library has the name of TSIG's for 16
		return "BADVERS"
	}
	if name, ok := dns.RcodeToString[rcode]; ok {
		return name
	}
	return "OTHER"
}

// A counted ResponseWriter counts the answers that pass it.
type counted struct {
	dns.ResponseWriter
	answers *rcodes
}

// WriteMsg implements dns.ResponseWriter.
func (c counted) WriteMsg(m *dns.Msg) error {
	if m.Rcode >= 0 && m.Rcode < len(c.answers) {
		c.answers[m.Rcode].Add(1)
	}
	return c.ResponseWriter.WriteMsg(m)
}

// Write implements dns.ResponseWriter.
func (c counted) Write(raw []byte) (int, error) {
	if len(raw) > 3 {
		c.answers[raw[3]&0xf].Add(1)
	}
	return c.ResponseWriter.Write(raw)
}
