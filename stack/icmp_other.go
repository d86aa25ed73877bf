//go:build !linux

package stack

import "net/netip"

// An icmpSender does nothing on this system.
type icmpSender struct{}

func newICMPSender() *icmpSender                        { return &icmpSender{} }
func (*icmpSender) portUnreachable(_, _ netip.AddrPort) {}
func (*icmpSender) close()                              {}
