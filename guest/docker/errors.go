package docker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// A failure is a sentence for people about an engine, without its subject:
// "refused the connection".
type failure struct{ text string }

func (f *failure) Error() string { return f.text }

const speaksTLS = "speaks TLS; set docker.tls"

// unreached says why a request got no answer. Some causes come as text only:
// gVisor's errors of established connections, the remote's TLS alerts.
func unreached(err error, tlsSet bool) *failure {
	text := err.Error()
	is := func(errs ...error) bool {
		for _, e := range errs {
			if errors.Is(err, e) || strings.Contains(text, e.Error()) {
				return true
			}
		}
		return false
	}
	var record tls.RecordHeaderError
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &unknown):
		return &failure{"has a certificate of an authority that is not in docker.tls.ca"}
	case errors.As(err, &name):
		return &failure{"has a certificate for another name: " + clean(name.Error(), maxText)}
	case errors.As(err, &invalid):
		return &failure{"has a certificate that is not valid: " + clean(invalid.Error(), maxText)}
	case strings.Contains(text, "remote error: tls:"):
		_, alert, _ := strings.Cut(text, "remote error: tls: ")
		return &failure{"refuses our certificate, or that there is none (" + clean(alert, maxText) + "); see docker.tls.cert and docker.tls.key"}
	case errors.As(err, &record), tlsSet && strings.Contains(text, "server gave HTTP response to HTTPS client"):
		return &failure{"does not speak TLS; leave docker.tls out"}
	case !tlsSet && strings.Contains(text, "malformed HTTP response \"\\x15\\x03"): // a TLS alert record
		return &failure{speaksTLS}
	case strings.Contains(text, "malformed HTTP"):
		return &failure{"does not speak HTTP"}
	case is(syscall.ECONNREFUSED):
		return &failure{"refused the connection"}
	case is(syscall.ENOENT):
		return &failure{"is not there: no such socket"}
	case is(syscall.EACCES, syscall.EPERM):
		return &failure{"cannot be used: permission denied on its socket"}
	case is(syscall.EHOSTUNREACH, syscall.ENETUNREACH):
		return &failure{"cannot be reached: no route to it"}
	case is(os.ErrDeadlineExceeded, context.DeadlineExceeded, syscall.ETIMEDOUT), strings.Contains(text, "TLS handshake timeout"):
		return &failure{"did not answer in time"}
	case is(io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed):
		return &failure{"closed the connection"}
	}
	return &failure{"cannot be asked: " + clean(text, maxText)}
}

// sentence says what is wrong, of what the library returned.
func sentence(err error) error {
	var f *failure
	var e *excess
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	text := err.Error()
	switch {
	case errors.As(err, &f):
		return f
	case errors.As(err, &e):
		return &failure{"sent " + e.Error()}
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return &failure{"closed the connection in the middle of an answer"}
	case errors.As(err, &syntax):
		return &failure{"sent what is no JSON: " + clean(text, maxText)}
	case errors.As(err, &kind):
		return &failure{"sent what the API has not: " + clean(text, maxText)}
	case strings.Contains(strings.ToLower(text), "client sent an http request to an https server"):
		return &failure{speaksTLS}
	case strings.Contains(text, "Error response from daemon"), strings.HasPrefix(text, "request returned"):
		return &failure{"answered: " + clean(strings.TrimPrefix(text, "Error response from daemon: "), maxText)}
	}
	return unreached(err, false)
}

// maxText is how much of a text from the guest gets into a sentence of ours.
const maxText = 200

// clean makes one line, fit for a terminal, of a text that may be the guest's:
// of its first longest bytes.
func clean(text string, longest int) string {
	more := ""
	if len(text) > longest {
		text, more = text[:longest], "…"
	}
	q := strconv.QuoteToASCII(text)
	return strings.ReplaceAll(q[1:len(q)-1], `\"`, `"`) + more
}
