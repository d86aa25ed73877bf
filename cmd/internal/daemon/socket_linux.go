package daemon

import (
	"context"
	"net"
	"syscall"

	"github.com/culvertnet/culvert/datapath/socketfile"
	"golang.org/x/sys/unix"
)

// listenPrivate listens on a unix socket that has mode 0600 from the start. Its
// file is removed by the claim, not by Close.
func listenPrivate(path string) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if cerr := raw.Control(func(fd uintptr) { err = socketfile.Private(fd) }); cerr != nil {
			return cerr
		}
		return err
	}}
	l, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	return l, nil
}

// monotonicMicroseconds is the clock that systemd wants beside RELOADING=1
// (sd_notify(3)).
func monotonicMicroseconds() int64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return t.Nano() / 1000
}

// RaiseDescriptors takes all the file descriptors the system grants: each flow
// needs one, and each host port.
func RaiseDescriptors() error {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return err
	}
	r.Cur = r.Max
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &r)
}

// reservedDescriptors is how many flows leave to the rest of the daemon, so that
// it can be asked, and can follow its guests, when there are too many of them; of
// few descriptors it is half.
const reservedDescriptors = 64

// flowDescriptors returns the number from which on descriptors are not for flows.
func flowDescriptors() uintptr {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 0
	}
	return uintptr(r.Cur - min(reservedDescriptors, r.Cur/2))
}
