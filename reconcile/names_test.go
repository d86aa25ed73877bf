package reconcile

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/listener"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// epoch is when the first of a test's containers was started.
var epoch = time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)

// fullID returns a container's full id that begins so.
func fullID(prefix string) string { return prefix + strings.Repeat("0", 64-len(prefix)) }

// named makes a Want that has nothing but names, all n seconds old when the
// epoch was n seconds ago.
func named(o listener.Owner, n int, addr string, names ...string) Want {
	w := Want{Owner: o}
	for _, name := range names {
		w.Names = append(w.Names, Name{
			Name: name, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Since: epoch.Add(time.Duration(n) * time.Second),
		})
	}
	return w
}

// leads returns where a name leads, as text.
func leads(n *Names, name string) string {
	addrs, exists := n.Lookup(name)
	if !exists {
		return "no such name"
	}
	return fmt.Sprint(addrs)
}

func TestNamesLookup(t *testing.T) {
	n := newNames()
	assert.Equal(t, "no such name", leads(n, "web"), "an empty table")

	n.set([]Want{
		named(dockerOwner("a"), 0, "127.77.0.1", "web"),
		named(dockerOwner("b"), 0, "127.77.0.2", "db.web"),
		named(dockerOwner("c"), 0, "127.77.0.3", "api.shop", "x.y.z"),
	})
	for name, want := range map[string]string{
		"web":         "[127.77.0.1]",
		"WeB":         "[127.77.0.1]",
		"x.web":       "[127.77.0.1]", // C-38: what is below a name is what the name is
		"a.b.c.web":   "[127.77.0.1]",
		"db.web":      "[127.77.0.2]", // exact first
		"x.db.web":    "[127.77.0.2]", // the longest name
		"xweb":        "no such name", // below means at a dot
		"api.shop":    "[127.77.0.3]",
		"shop":        "[]", // there for what is below it
		"other.shop":  "no such name",
		"z":           "[]",
		"y.z":         "[]",
		"w.x.y.z":     "[127.77.0.3]",
		"":            "no such name",
		".":           "no such name",
		".web":        "[127.77.0.1]", // no resolver asks so
		"web.":        "no such name",
		"nobody.else": "no such name",
	} {
		assert.Equal(t, want, leads(n, name), "%q", name)
	}
	assert.True(t, n.Has("Web"))
	assert.False(t, n.Has("x.web"))
	assert.False(t, n.Has("shop"))
}

// TestNamesShared: C-37, a name that several have leads to the newest, falls back
// to one that remains, and goes with the last.
func TestNamesShared(t *testing.T) {
	old, mid, young := named(dockerOwner("old"), 1, "127.77.0.1", "db.shop"),
		named(dockerOwner("mid"), 2, "127.77.0.2", "db.shop"), named(dockerOwner("young"), 3, "127.77.0.3", "db.shop")
	n := newNames()
	for _, step := range []struct {
		wants []Want
		leads string
		count int
	}{
		{[]Want{old}, "[127.77.0.1]", 1},
		{[]Want{old, young}, "[127.77.0.3]", 2},
		{[]Want{young, mid, old}, "[127.77.0.3]", 3}, // whatever the order
		{[]Want{old, mid}, "[127.77.0.2]", 2},
		{[]Want{old}, "[127.77.0.1]", 1},
		{nil, "no such name", 0},
	} {
		n.set(step.wants)
		assert.Equal(t, step.leads, leads(n, "db.shop"))
		views := n.Views()
		if step.count == 0 {
			assert.Empty(t, views)
			continue
		}
		require.Len(t, views, 1)
		assert.Len(t, views[0].Owners, step.count)
		assert.Equal(t, step.leads, fmt.Sprint(views[0].Addrs))
	}
	n.set([]Want{old, young, mid})
	assert.Equal(t, []listener.Owner{young.Owner, mid.Owner, old.Owner}, n.Views()[0].Owners, "the newest first")
}

func TestNamesViewsAndReverse(t *testing.T) {
	a := listener.Owner{Kind: listener.KindDocker, ID: "a", VM: "one"}
	b := listener.Owner{Kind: listener.KindDocker, ID: "b", VM: "two"}
	n := newNames()
	n.set([]Want{named(a, 1, "127.0.0.1", "web", "app.x"), named(b, 2, "127.0.0.1", "web", "api")})
	views := n.Views()
	require.Len(t, views, 3)
	assert.Equal(t, []string{"api", "app.x", "web"}, []string{views[0].Name, views[1].Name, views[2].Name})
	assert.Equal(t, []string{"two", "one", "two"}, []string{views[0].VM, views[1].VM, views[2].VM})
	assert.Equal(t, []string{"api", "web", "app.x"}, n.Reverse(netip.MustParseAddr("127.0.0.1")), "the newest first")
	assert.Equal(t, []string{"api", "web", "app.x"}, n.Reverse(netip.MustParseAddr("::ffff:127.0.0.1")))
	assert.Empty(t, n.Reverse(netip.MustParseAddr("127.0.0.2")))
	assert.Empty(t, n.Reverse(netip.Addr{}))

	var many []Want
	for i := range 1000 {
		many = append(many, named(dockerOwner(fmt.Sprint(i)), i, "127.0.0.1", fmt.Sprintf("c%d", i)))
	}
	n.set(many)
	names := n.Reverse(netip.MustParseAddr("127.0.0.1"))
	assert.Len(t, names, maxReverse)
	assert.Equal(t, "c999", names[0])
}

// TestNamesResolve: C-36.
func TestNamesResolve(t *testing.T) {
	web, web2, db := fullID("0123456789ab"), fullID("0123456789ac"), fullID("feed")
	n := newNames()
	n.set([]Want{
		named(dockerOwner(web), 1, "127.0.0.1", "web", "front.shop"),
		named(dockerOwner(web2), 2, "127.0.0.1", "web-2", "front.shop"),
		named(dockerOwner(db), 1, "127.0.0.1", "db", "0123", "abcdef"),
		{Owner: listener.Owner{Kind: listener.KindCLI, ID: "feed:80/tcp"}, Specs: []listener.Spec{mustSpec(t, "default", "8080:80")}},
		want(t, fullID("beef"), "80:80"), // no name at all
	})
	for text, ids := range map[string][]string{
		web:                {web},
		"web":              {web},
		"WEB":              {web},
		"front.shop":       {web2, web}, // the newest first
		"0123456789ab":     {web},
		"0123456789AB":     {web},
		"0123":             {db}, // an alias goes before a prefix
		"feed":             {db},
		"abcdef":           {db},
		"beef":             {fullID("beef")},
		"feed:80/tcp":      {"feed:80/tcp"},
		fullID("beef")[:6]: {fullID("beef")},
	} {
		owners, err := n.Resolve(text)
		require.NoError(t, err, "%q", text)
		var got []string
		for _, o := range owners {
			got = append(got, o.ID)
		}
		assert.Equal(t, ids, got, "%q", text)
	}
	for _, text := range []string{"", "fee", "nobody", "x.web", web + "0", "feedx", "shop"} {
		_, err := n.Resolve(text)
		assert.ErrorIs(t, err, ErrNoOwner, "%q", text)
	}
	_, err := n.Resolve("01234567")
	require.ErrorIs(t, err, ErrAmbiguous)
	assert.EqualError(t, err, `"01234567": more than one container begins so: 0123456789ab (web), 0123456789ac (web-2)`)

	// VMs that are copies of each other have containers of one id.
	one, two := listener.Owner{Kind: listener.KindDocker, ID: web, VM: "one"}, listener.Owner{Kind: listener.KindDocker, ID: web, VM: "two"}
	n.set([]Want{named(one, 1, "127.0.0.1", "web"), named(two, 1, "127.0.0.1", "web")})
	for _, text := range []string{web, "web", "0123"} {
		owners, err := n.Resolve(text)
		require.NoError(t, err)
		assert.ElementsMatch(t, []listener.Owner{one, two}, owners)
	}

	var crowd []Want
	for i := range 50 {
		crowd = append(crowd, named(dockerOwner(fullID(fmt.Sprintf("aaaa%02x", i))), i, "127.0.0.1", fmt.Sprintf("c%d", i)))
	}
	n.set(crowd)
	_, err = n.Resolve("aaaa")
	require.ErrorIs(t, err, ErrAmbiguous)
	assert.ErrorContains(t, err, "and 42 more")
	assert.Less(t, len(err.Error()), 500)
}

func TestDNSName(t *testing.T) {
	label := strings.Repeat("a", 63)
	for text, want := range map[string]string{
		"web": "web", "Web": "web", "my_app-1": "my_app-1", "a.b": "a.b", label: label,
		label + "." + label + "." + label + "." + label[:61]: label + "." + label + "." + label + "." + label[:61],
	} {
		got, err := dnsName(text)
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
	for _, text := range []string{
		"", ".", "a..b", ".a", "a.", label + "a", "a b", "a\x00b", "ä", "a\nb", `a\.b`, "*", "a/b",
		label + "." + label + "." + label + "." + label[:62],
	} {
		got, err := dnsName(text)
		assert.Error(t, err, "%q", text)
		assert.Empty(t, got)
	}
}

func FuzzDNSName(f *testing.F) {
	for _, s := range []string{"web", "a.b", "a..b", "_x", "é", strings.Repeat("a.", 200)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		name, err := dnsName(text)
		if err != nil {
			assert.Empty(t, name)
			return
		}
		assert.LessOrEqual(t, len(name), 253)
		again, err := dnsName(name)
		assert.NoError(t, err)
		assert.Equal(t, name, again)
		n := newNames()
		n.set([]Want{named(dockerOwner("a"), 0, "127.0.0.1", name)})
		_, exists := n.Lookup("x." + name)
		assert.True(t, exists)
	})
}
