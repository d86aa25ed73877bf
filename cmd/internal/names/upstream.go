package names

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

const (
	// maxAsking bounds the queries under way upstream; more are SERVFAIL at once.
	maxAsking = 64
	// An upstream has two seconds, all of them together the five after which
	// resolvers ask again (resolv.conf(5), timeout).
	upstreamLimit = 2 * time.Second
	forwardLimit  = 5 * time.Second
)

// forward asks the upstreams and passes on what they say, as it comes: what a
// query says of DNSSEC and EDNS is between the client and them.
func (s *Server) forward(w dns.ResponseWriter, req *dns.Msg) {
	resp := new(dns.Msg)
	resp.SetReply(req)
	if len(s.upstreams) == 0 || !isHost(w) {
		resp.Rcode = dns.RcodeRefused
		s.reply(w, req, resp)
		return
	}
	raw, err := s.ask(req, overTCP(w))
	if err != nil {
		s.log.Debug("DNS upstream failed", "err", err)
		resp.Rcode = dns.RcodeServerFailure
		s.reply(w, req, resp)
		return
	}
	binary.BigEndian.PutUint16(raw, req.Id)
	if size := takes(req); !overTCP(w) && len(raw) > size { // more than was asked for
		if err := resp.Unpack(raw); err != nil {
			return
		}
		resp.Truncate(size)
		_ = w.WriteMsg(resp)
		return
	}
	_, _ = w.Write(raw) // a client that has left needs no answer
}

// isHost says whether a query comes from the host itself: from loopback, or from
// the very address it was sent to.
func isHost(w dns.ResponseWriter) bool {
	from, ok := addrOf(w.RemoteAddr())
	to, _ := addrOf(w.LocalAddr())
	return ok && (from.IsLoopback() || from == to)
}

func addrOf(a net.Addr) (netip.Addr, bool) {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap(), true
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap(), true
	}
	return netip.Addr{}, false
}

func overTCP(w dns.ResponseWriter) bool {
	_, is := w.RemoteAddr().(*net.TCPAddr)
	return is
}

var errBusy = errors.New("too many queries are under way upstream")

// ask asks one upstream after the other until one answers, and returns the
// answer as it came. whole asks again over TCP when it was cut short: a client
// that came over UDP does that itself.
func (s *Server) ask(req *dns.Msg, whole bool) (raw []byte, err error) {
	select {
	case s.asking <- struct{}{}:
		defer func() { <-s.asking }()
	default:
		return nil, errBusy
	}
	ctx, cancel := context.WithTimeout(s.ctx, forwardLimit)
	defer cancel()
	query := *req
	query.Id = dns.Id() // the client's own would be told to others
	wire, err := query.Pack()
	if err != nil {
		return nil, err
	}
	for _, u := range s.upstreams {
		raw, cut, e := exchange(ctx, "udp", u, &query, wire)
		if e == nil && cut && whole {
			raw, _, e = exchange(ctx, "tcp", u, &query, wire)
		}
		if e == nil {
			return raw, nil
		}
		err = e
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// exchange sends a query to an upstream and waits for the answer to it.
func exchange(ctx context.Context, network string, u netip.AddrPort, query *dns.Msg, wire []byte) (raw []byte, cut bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, upstreamLimit)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, u.String())
	if err != nil {
		return nil, false, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	conn := &dns.Conn{Conn: c, UDPSize: dns.MaxMsgSize}
	if _, err := conn.Write(wire); err != nil {
		return nil, false, err
	}
	for {
		raw, err := conn.ReadMsgHeader(nil)
		if errors.Is(err, dns.ErrShortRead) && network == "udp" {
			continue
		}
		if err != nil {
			return nil, false, err
		}
		var resp dns.Msg
		if err := resp.Unpack(raw); err == nil && answers(&resp, query) {
			return raw, resp.Truncated, nil
		}
		if network != "udp" {
			return nil, false, errors.New("upstream " + u.String() + " answers something else")
		}
		// Anybody can send a datagram: the answer may still come.
	}
}

// answers says whether resp is the answer to query.
func answers(resp, query *dns.Msg) bool {
	if !resp.Response || resp.Id != query.Id {
		return false
	}
	if len(resp.Question) == 0 {
		return resp.Rcode != dns.RcodeSuccess // some refuse without saying what
	}
	is, was := resp.Question[0], query.Question[0]
	return is.Qtype == was.Qtype && is.Qclass == was.Qclass && strings.EqualFold(is.Name, was.Name)
}
