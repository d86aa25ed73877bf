package docker

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
)

// TLSFiles are the files of a TLS connection, in PEM: the authority that signed
// the engine's certificate (the host's own authorities if empty), and our
// certificate with its key, for an engine that asks for one. The zero value
// means no TLS.
type TLSFiles struct{ CA, Cert, Key string }

// ValidateEndpoint says what is wrong with an endpoint: it is
// "tcp://IP:PORT", through the VM's link, or "unix:///PATH", on the host.
func ValidateEndpoint(endpoint string) error {
	_, _, err := splitEndpoint(endpoint)
	return err
}

// splitEndpoint returns the network, as net.Dial takes it, and the address.
func splitEndpoint(endpoint string) (network, addr string, err error) {
	scheme, rest, ok := strings.Cut(endpoint, "://")
	if !ok {
		return "", "", fmt.Errorf("endpoint %q: it is tcp://IP:PORT or unix:///PATH", endpoint)
	}
	switch scheme {
	case "tcp":
		ap, err := netip.ParseAddrPort(rest)
		if err != nil || ap.Port() == 0 || ap.Addr().Zone() != "" {
			return "", "", fmt.Errorf("endpoint %q: after tcp:// comes an IP address and a port, as in tcp://10.0.2.2:2375", endpoint)
		}
		return "tcp", ap.String(), nil
	case "unix":
		// sun_path is 108 bytes with its NUL (unix(7)); macOS has 104.
		if !strings.HasPrefix(rest, "/") || strings.ContainsRune(rest, 0) || len(rest) > 107 {
			return "", "", fmt.Errorf("endpoint %q: after unix:// comes the absolute path of a socket, of at most 107 bytes", endpoint)
		}
		return "unix", rest, nil
	}
	return "", "", fmt.Errorf("endpoint %q: %q is not tcp or unix", endpoint, scheme)
}

// config reads the files. It returns nil for the zero value.
func (f TLSFiles) config() (*tls.Config, error) {
	if f == (TLSFiles{}) {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12} // the server's name is what the transport dials
	if f.CA != "" {
		pem, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("docker.tls.ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("docker.tls.ca: %s holds no certificate in PEM", f.CA)
		}
	}
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("docker.tls: cert and key are given together, or neither")
	}
	if f.Cert != "" {
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return nil, fmt.Errorf("docker.tls: certificate %s with key %s: %w", f.Cert, f.Key, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}
