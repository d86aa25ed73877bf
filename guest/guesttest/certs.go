package guesttest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Certs are a test's own authority and what it signed, as files and ready to
// serve with.
type Certs struct {
	CA, Cert, Key string // PEM files: the authority, a client's certificate, its key
	Server        *tls.Config
}

// NewCerts makes an authority that signs a server's certificate for the
// addresses, valid until notAfter, and a client's. The server asks for a
// client's certificate if mutual.
func NewCerts(tb testing.TB, mutual bool, notAfter time.Time, addresses ...net.IP) *Certs {
	tb.Helper()
	dir := tb.TempDir()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatalf("make certificates: %v", err)
		}
	}
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		must(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the test's authority"},
		NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(48 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, key.Public(), key)
	must(err)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "engine"}, IPAddresses: addresses,
		NotBefore: ca.NotBefore, NotAfter: notAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	leafDER, err := x509.CreateCertificate(rand.Reader, leaf, ca, key.Public(), key)
	must(err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	must(err)
	pool := x509.NewCertPool()
	parsed, err := x509.ParseCertificate(caDER)
	must(err)
	pool.AddCert(parsed)
	c := &Certs{
		CA:     write("ca.pem", "CERTIFICATE", caDER),
		Cert:   write("cert.pem", "CERTIFICATE", leafDER),
		Key:    write("key.pem", "EC PRIVATE KEY", keyDER),
		Server: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{leafDER}, PrivateKey: key}}},
	}
	if mutual {
		c.Server.ClientCAs, c.Server.ClientAuth = pool, tls.RequireAndVerifyClientCert
	}
	return c
}
