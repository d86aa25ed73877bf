//go:build !linux

package daemon

import (
	"errors"
	"net"
)

func listenPrivate(string) (net.Listener, error) { return nil, errors.ErrUnsupported }

func monotonicMicroseconds() int64 { return 0 }

func flowDescriptors() uintptr { return 0 }

// RaiseDescriptors is done for us on other systems.
func RaiseDescriptors() error { return nil }
