package datapathtest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NewNetNS makes a network namespace, which the test's end closes. Without the
// right to make one the test is skipped (Require "netns").
func NewNetNS(tb testing.TB) *NetNS {
	tb.Helper()
	n := new(NetNS)
	err := onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare network namespace: %w", err)
		}
		n.file, err = os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
		return err
	})
	Require(tb, "netns", !errors.Is(err, unix.EPERM), "run as root, or under `unshare --user --map-root-user --net`")
	if err != nil {
		tb.Fatalf("make network namespace: %v", err)
	}
	tb.Cleanup(n.Close)
	err = n.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	if err != nil {
		tb.Fatalf("set loopback up: %v", err)
	}
	return n
}

// Path returns a path of the namespace that other processes can open for as
// long as the test runs and Close has not been called, as `nsenter --net=PATH`
// and a tap's NetNS take it.
func (n *NetNS) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
}

// Do runs f inside the namespace, on a thread that ends with it, and returns
// its error. Sockets that f opens, and processes it starts, belong to the
// namespace from then on. f runs on a goroutine of its own: it returns an error
// and does not call FailNow.
func (n *NetNS) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// onThread runs f on a thread that is thrown away afterwards: a goroutine that
// ends without unlocking takes its thread with it, and so a thread in another
// namespace never comes back to run other goroutines.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := errors.New("function ended its goroutine")
		defer func() { done <- err }() // also when f calls FailNow against its contract
		err = f()
	}()
	return <-done
}
