//go:build !linux

package listener

import "net/netip"

// Bound reports whether a socket of this process is bound at ap, on Linux.
func Bound(Proto, netip.AddrPort) bool { return false }

// Holder names the process that has ap, on Linux.
func Holder(Proto, netip.AddrPort) string { return "" }

func holder(Proto, netip.AddrPort) string { return "another process" }

func unprivilegedPortStart() int { return -1 }
