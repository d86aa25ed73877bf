package stack

import (
	"net/netip"
	"testing"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A frame's flow is found by its ends while the flow lives; before and after,
// its owner is, as long as that is certain.
func TestLookup(t *testing.T) {
	f, _, at := mustServe(t, Options{}, echo)
	l := NewLookup(f)
	guest := netip.MustParseAddrPort("198.18.0.2:80")
	stranger := netip.MustParseAddrPort("198.18.0.1:1")
	find := func(proto listener.Proto, source, guest netip.AddrPort) (listener.Owner, uint64, bool) {
		return l.Find("default", proto, source, guest)
	}
	o, id, ok := find(listener.TCP, stranger, guest)
	assert.True(t, ok)
	assert.Equal(t, owner("x"), o)
	assert.Zero(t, id)
	for _, miss := range []struct {
		vm    string
		proto listener.Proto
		guest string
	}{{"other", listener.TCP, "198.18.0.2:80"}, {"default", listener.UDP, "198.18.0.2:80"}, {"default", listener.TCP, "198.18.0.2:81"}, {"default", listener.TCP, "198.18.0.3:80"}} {
		_, _, ok = l.Find(miss.vm, miss.proto, stranger, netip.MustParseAddrPort(miss.guest))
		assert.False(t, ok, miss)
	}

	c := dial(t, at)
	ping(t, c)
	source, err := netip.ParseAddrPort(f.Flows()[0].Source)
	require.NoError(t, err)
	eventually(t, "the flow is found", func() bool {
		o, id, ok = find(listener.TCP, source, guest)
		return ok && id == f.Flows()[0].ID && o == owner("x")
	})
	// While it lives nothing is made anew for it.
	made := l.made
	for range 1000 {
		_, _, ok = find(listener.TCP, source, guest)
		require.True(t, ok)
	}
	assert.Equal(t, made, l.made)

	require.NoError(t, c.Close())
	eventually(t, "its owner alone is known", func() bool {
		o, id, ok = find(listener.TCP, source, guest)
		return ok && id == 0 && o == owner("x")
	})
	// Who asked is not certain once two lead to one port; a wide range is looked
	// through.
	mustPublish(t, f, "y", "127.0.0.1:0:80")
	mustPublish(t, f, "z", "127.0.0.1:30000-30999:2000-2999")
	eventually(t, "two owners", func() bool {
		_, _, ok = find(listener.TCP, stranger, guest)
		return !ok
	})
	eventually(t, "the range", func() bool {
		o, _, ok = find(listener.TCP, stranger, netip.MustParseAddrPort("198.18.0.2:2999"))
		return ok && o == owner("z")
	})
	_, _, ok = find(listener.TCP, stranger, netip.MustParseAddrPort("198.18.0.2:3000"))
	assert.False(t, ok)
}
