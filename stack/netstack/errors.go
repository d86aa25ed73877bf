package netstack

import (
	"fmt"
	"net"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// wrapError turns gVisor's error into one that errors.Is knows: a
// syscall.Errno where the kernel has one for the same thing. nil stays nil.
func wrapError(err tcpip.Error) error {
	switch err := err.(type) {
	case nil:
		return nil
	case *tcpip.ErrConnectionRefused:
		return syscall.ECONNREFUSED
	case *tcpip.ErrConnectionReset:
		return syscall.ECONNRESET
	case *tcpip.ErrConnectionAborted, *tcpip.ErrAborted:
		return syscall.ECONNRESET
	case *tcpip.ErrHostUnreachable, *tcpip.ErrHostDown, *tcpip.ErrNoNet:
		return syscall.EHOSTUNREACH
	case *tcpip.ErrNetworkUnreachable:
		return syscall.ENETUNREACH
	case *tcpip.ErrTimeout:
		return syscall.ETIMEDOUT
	case *tcpip.ErrNoPortAvailable:
		return syscall.EADDRNOTAVAIL
	case *tcpip.ErrPortInUse, *tcpip.ErrDuplicateAddress:
		return syscall.EADDRINUSE
	case *tcpip.ErrClosedForSend:
		return syscall.EPIPE
	case *tcpip.ErrMessageTooLong:
		return syscall.EMSGSIZE
	case *tcpip.ErrNoBufferSpace:
		return syscall.ENOBUFS
	case *tcpip.ErrInvalidEndpointState, *tcpip.ErrNotConnected:
		return net.ErrClosed
	default:
		return fmt.Errorf("netstack: %s", err.String())
	}
}
