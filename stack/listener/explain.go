package listener

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"
)

// Explain says what an error of ListenTCP or ListenUDP for ap means: the state
// of the row, the sentence for people, and the cause, which matches both one of
// this package's Err… values, where one fits, and err.
//
// Everything is Failed, and so worth another try (C-7), but for what this
// system never does (errors.ErrUnsupported): Skipped.
func Explain(proto Proto, ap netip.AddrPort, err error) (state State, detail string, cause error) {
	port := fmt.Sprintf("host port %s/%s", ap, proto)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return Skipped, port + ": listening is not supported on this system yet", err
	case errors.Is(err, syscall.EADDRINUSE):
		return Failed, port + " is in use by " + holder(proto, ap), fmt.Errorf("%w: %w", ErrInUse, err)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return Failed, deniedSentence(ap.Port(), unprivilegedPortStart()), fmt.Errorf("%w: %w", ErrDenied, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return Failed, fmt.Sprintf("the host has no address %s", ap.Addr()), fmt.Errorf("%w: %w", ErrNoAddress, err)
	case errors.Is(err, syscall.EAFNOSUPPORT):
		return Failed, fmt.Sprintf("the host has no %s, for address %s", family(ap.Addr()), ap.Addr()), fmt.Errorf("%w: %w", ErrNoAddress, err)
	case errors.Is(err, syscall.EMFILE):
		return Failed, port + " needs more file descriptors than the daemon may have; raise its limit (RLIMIT_NOFILE, LimitNOFILE= in a systemd unit)", err
	case errors.Is(err, syscall.ENFILE):
		return Failed, port + " needs more open files than the system allows; raise fs.file-max", err
	case errors.Is(err, syscall.ENOSPC):
		return Failed, port + " needs more epoll watches than the user may have; raise fs.epoll.max_user_watches", err
	}
	return Failed, port + ": " + err.Error(), err
}

// deniedSentence is what EACCES or EPERM means for port, where start is
// net.ipv4.ip_unprivileged_port_start, which holds for IPv6 as well; -1 when it
// cannot be read (ip(7)).
func deniedSentence(port uint16, start int) string {
	switch {
	case start < 0:
		return fmt.Sprintf("host port %d is not permitted", port)
	case int(port) >= start:
		return fmt.Sprintf("host port %d is refused by the host's security policy (net.ipv4.ip_unprivileged_port_start is %d, which allows it)", port, start)
	}
	return fmt.Sprintf("host port %d needs CAP_NET_BIND_SERVICE or net.ipv4.ip_unprivileged_port_start <= %d (now %d)", port, port, start)
}

// familyAbsent reports whether err, of listening at a, says no more than that
// the host has not got a's family: the kernel cannot make such a socket, or
// even the loopback address is missing, as with disable_ipv6. For a publish
// that named no address, the other family is enough then (FB-059).
func familyAbsent(a netip.Addr, err error) bool {
	if errors.Is(err, syscall.EAFNOSUPPORT) {
		return true
	}
	return errors.Is(err, syscall.EADDRNOTAVAIL) && (a.IsLoopback() || a.IsUnspecified())
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// lowPortSkipped says why a port below 1024 is not worth a try: on macOS an
// unprivileged process gets such a port on the wildcard address only (C-8). ""
// where the kernel is asked, which is everywhere else. uid is the effective
// one.
func lowPortSkipped(goos string, uid int, ap netip.AddrPort) string {
	if goos != "darwin" || uid == 0 || ap.Port() == 0 || ap.Port() >= 1024 || ap.Addr().IsUnspecified() {
		return ""
	}
	return fmt.Sprintf("host port %s: macOS lets an unprivileged process have a port below 1024 on all addresses only, not on one; "+
		"publish a port from 1024 on, or turn exposeToLAN on", ap)
}
