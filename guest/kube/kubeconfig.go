package kube

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// A kubeconfig is one reading of the file.
type kubeconfig struct {
	text   []byte // the file itself
	server *url.URL
	rest   *rest.Config
	tls    *tls.Config
}

// readKubeconfig reads the file at path and what it refers to. Its errors are
// sentences for people.
func readKubeconfig(path string) (*kubeconfig, error) {
	fail := func(format string, args ...any) (*kubeconfig, error) {
		return nil, fmt.Errorf("kubeconfig "+path+": "+format, args...)
	}
	text, err := os.ReadFile(path)
	if pathErr := (*fs.PathError)(nil); errors.As(err, &pathErr) {
		return fail("%w", pathErr.Err) // it names the path again otherwise
	} else if err != nil {
		return fail("%w", err)
	}
	// Read once more, because what is relative in it is relative to the file.
	file, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return fail("it is no kubeconfig: %w", err)
	}
	if err := clientcmd.ResolveLocalPaths(file); err != nil {
		return fail("%w", err)
	}
	if context := file.Contexts[file.CurrentContext]; context != nil {
		if user := file.AuthInfos[context.AuthInfo]; user != nil && (user.Exec != nil || user.AuthProvider != nil) {
			return fail("the credentials of user %q come from a program or a provider, and culvert starts none: "+
				"use a kubeconfig with a certificate or a token", context.AuthInfo)
		}
	}
	config, err := clientcmd.NewNonInteractiveClientConfig(*file, file.CurrentContext, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	switch {
	case clientcmd.IsEmptyConfig(err):
		return fail("it has no cluster and no user for its current context")
	case err != nil:
		return fail("%s", strings.TrimPrefix(err.Error(), "invalid configuration: "))
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil || server.Host == "" {
		return fail("%q is no server's URL", config.Host)
	}
	config.UserAgent = "culvert"
	secure, err := rest.TLSConfigFor(config)
	if err != nil {
		return fail("%w", err)
	}
	if err := expired(secure); err != nil {
		return fail("%w", err)
	}
	return &kubeconfig{text: text, server: server, rest: config, tls: secure}, nil
}

// expired says whether the client certificate of c is of another time.
func expired(c *tls.Config) error {
	if c == nil || c.GetClientCertificate == nil {
		return nil
	}
	pair, err := c.GetClientCertificate(new(tls.CertificateRequestInfo))
	if err != nil || len(pair.Certificate) == 0 {
		return err
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return fmt.Errorf("the client certificate cannot be read: %w", err)
	}
	switch now := time.Now(); {
	case now.After(leaf.NotAfter):
		return fmt.Errorf("the client certificate expired on %s", leaf.NotAfter.Format(time.DateOnly))
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the client certificate is valid only from %s", leaf.NotBefore.Format(time.DateTime))
	}
	return nil
}

// changed says whether the file at path is no longer what was read. One that
// cannot be read now, as in the middle of being replaced, has not changed.
func (k *kubeconfig) changed(path string) bool {
	text, err := os.ReadFile(path)
	return err == nil && !bytes.Equal(text, k.text)
}
