//go:build !linux

package datapathtest

import (
	"errors"
	"testing"
)

// NewNetNS skips the test: network namespaces are Linux's.
func NewNetNS(tb testing.TB) *NetNS {
	tb.Helper()
	Require(tb, "netns", false, "run on Linux")
	return nil
}

// Path returns nothing: there is no namespace to name.
func (n *NetNS) Path() string { return "" }

// Do returns errors.ErrUnsupported.
func (n *NetNS) Do(func() error) error { return errors.ErrUnsupported }
