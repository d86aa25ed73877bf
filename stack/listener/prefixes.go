package listener

import (
	"net/netip"
	"slices"
	"strings"
)

// Prefixes is a set of address prefixes in text, one order for one set, so that
// a Spec that holds it can be compared. The zero value is the empty set.
type Prefixes string

// MakePrefixes returns the set of ps, which are valid; host bits are cut off and
// an IPv4 prefix in IPv6 clothes is an IPv4 prefix.
func MakePrefixes(ps ...netip.Prefix) Prefixes {
	texts := make([]string, len(ps))
	for i, p := range ps {
		if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
		}
		texts[i] = p.Masked().String()
	}
	slices.Sort(texts)
	return Prefixes(strings.Join(slices.Compact(texts), ","))
}

// List returns the prefixes, sorted by their texts; nil for the empty set. What
// MakePrefixes did not make has none.
func (p Prefixes) List() []netip.Prefix {
	if p == "" {
		return nil
	}
	var ps []netip.Prefix
	for text := range strings.SplitSeq(string(p), ",") {
		if prefix, err := netip.ParsePrefix(text); err == nil {
			ps = append(ps, prefix)
		}
	}
	return ps
}
