//go:build !linux

package listener

import "net/netip"

func holder(Proto, netip.AddrPort) string { return "another process" }

func unprivilegedPortStart() int { return -1 }
