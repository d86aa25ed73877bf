package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"unicode"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	maxStatus  = 64 << 10 // bytes of an answer that is an error
	maxMessage = 300      // bytes of the guest's text in an error
)

var errEnded = errors.New("ended the watch")

// readStatus is the error of an answer that is not 200: the API's own, when the
// body is a meta/v1 Status, else one that says the HTTP status.
func readStatus(resp *http.Response) error {
	status := metav1.Status{}
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxStatus))
	if json.Unmarshal(body, &status) != nil || status.Kind != "Status" {
		status = metav1.Status{Message: fmt.Sprintf("the answer is HTTP status %d", resp.StatusCode)}
	}
	return statusError(status, resp.StatusCode)
}

// statusError is the API's error of an answer or an event. The code is the
// protocol's, where there is one: a body that says otherwise is not believed.
func statusError(status metav1.Status, code int) error {
	if code != 0 {
		status.Code = int32(code)
	}
	status.Message = clean(status.Message)
	return &apierrors.StatusError{ErrStatus: metav1.Status{Code: status.Code, Reason: status.Reason, Message: status.Message}}
}

// clean is text of the guest's that can be shown in a line.
func clean(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text[:min(len(text), maxMessage)], ""))
	return strings.TrimSpace(text)
}

// An apiError is an error as it is told: a sentence that names the server.
type apiError struct {
	text string
	err  error
}

func (e *apiError) Error() string { return e.text }
func (e *apiError) Unwrap() error { return e.err }

// sentence makes err, of a request to the server at endpoint, one for people.
func (c *Client) sentence(err error) error {
	say := func(format string, args ...any) error {
		return &apiError{fmt.Sprintf("API server at "+c.Endpoint()+" "+format, args...), err}
	}
	var (
		status    *apierrors.StatusError
		authority x509.UnknownAuthorityError
		name      x509.HostnameError
		invalid   *tls.CertificateVerificationError
		alert     tls.AlertError
		dns       *net.DNSError
		timeout   net.Error
	)
	switch {
	case errors.As(err, &status):
		switch status.ErrStatus.Code {
		case http.StatusUnauthorized:
			return say("does not accept the credentials in %s", c.path)
		case http.StatusForbidden:
			return say("refuses: %s (README shows the Role that is enough)", status.ErrStatus.Message)
		}
		return say("answers %d: %s", status.ErrStatus.Code, status.ErrStatus.Message)
	case errors.Is(err, errEnded):
		return say("ended the watch")
	case errors.Is(err, syscall.ECONNREFUSED):
		return say("refused the connection")
	case errors.As(err, &authority):
		return say("cannot be trusted: its certificate is signed by unknown authority, not by the one in %s", c.path)
	case errors.As(err, &name):
		return say("cannot be trusted: %v", name)
	case errors.As(err, &invalid):
		return say("cannot be trusted: %v", invalid.Err)
	case errors.As(err, &alert):
		return say("does not accept the certificate in %s: %v", c.path, alert)
	case errors.As(err, &dns):
		return say("cannot be found: %v", dns)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.As(err, &timeout) && timeout.Timeout():
		return say("did not answer in time")
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return say("cut the connection")
	}
	return say("did not answer as it should: %s", clean(err.Error()))
}
