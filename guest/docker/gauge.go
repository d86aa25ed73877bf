package docker

import (
	"fmt"
	"io"
)

// A measure bounds one JSON document. What decoding costs is not the document's
// length: "{}," is three bytes, and the API's larger structs are 400. So objects
// and values are counted while the text comes in, before anything is made of it.
type measure struct {
	what    string
	bytes   int64
	objects int // each "{": at most ~400 bytes decoded
	values  int // each ",": at most ~100 bytes decoded, an entry of a map
	items   int // elements of a document that is an array
}

const (
	// maxContainers is more than a guest's bridge has ports (1024 each) with
	// three bridges full.
	maxContainers = 4096
	// maxBindings is what we take of all containers together: a 32 000-port range
	// in both families, or 16 publishes for each of 4096 containers.
	maxBindings = 65536
)

var (
	// A container is listed in 1 to 4 KiB with its labels, a binding in 66 bytes
	// ({"IP":"0.0.0.0","PrivatePort":80,"PublicPort":8080,"Type":"tcp"},):
	// 4096 × 4 KiB + 65536 × 66 B = 20 MiB. An object for each binding, and per
	// container some ten of networks and mounts; values are four a binding and 60 a
	// container. The worst document of these numbers decodes into about 100 MB,
	// once, for as long as the call lasts.
	listing = measure{what: "a listing", bytes: 24 << 20, objects: 1 << 17, values: 1 << 19, items: maxContainers}
	// A binding is 86 bytes in the network settings and 50 in the host
	// configuration, with two objects and one more: room for a range of 10 000
	// ports beside what is always there (5 to 10 KiB).
	inspection = measure{what: "an inspection", bytes: 4 << 20, objects: 1 << 16, values: 1 << 17, items: 1}
	// An event carries its container's labels.
	eventMeasure = measure{what: "an event", bytes: 1 << 20, objects: 64, values: 1 << 14, items: 1}
	// Anything else is an error's text or a ping.
	remark = measure{what: "an answer", bytes: 1 << 20, objects: 1 << 10, values: 1 << 14, items: 1 << 10}
)

// An excess is a document beyond its measure.
type excess struct {
	what string
	max  int64
	unit string
}

func (e *excess) Error() string {
	return fmt.Sprintf("%s of more than %d %s, which culvert does not take", e.what, e.max, e.unit)
}

// A gauge reads JSON documents, one or a stream of them, and fails once one goes
// beyond its measure. It checks no syntax: whoever decodes does.
type gauge struct {
	r   io.ReadCloser
	max measure

	used     measure
	depth    int
	quoted   bool // inside a string
	escaped  bool // after its backslash
	exceeded error
}

// Read implements io.Reader.
func (g *gauge) Read(p []byte) (int, error) {
	if g.exceeded != nil {
		return 0, g.exceeded
	}
	n, err := g.r.Read(p)
	for i, b := range p[:n] {
		if g.exceeded = g.count(b); g.exceeded != nil {
			return i, g.exceeded
		}
	}
	return n, err
}

func (g *gauge) count(b byte) error {
	u := &g.used
	u.bytes++
	switch {
	case g.escaped:
		g.escaped = false
	case g.quoted:
		g.quoted = b != '"'
		g.escaped = b == '\\'
	case b == '"':
		g.quoted = true
	case b == '{', b == '[':
		g.depth++
		if b == '{' {
			u.objects++
		}
	case b == '}', b == ']':
		if g.depth--; g.depth <= 0 { // the end of a document
			g.depth, *u = 0, measure{}
		}
	case b == ',':
		u.values++
		if g.depth == 1 {
			u.items++ // one less than there are; an object's own members count too
		}
	}
	switch {
	case u.bytes > g.max.bytes:
		return &excess{g.max.what, g.max.bytes, "bytes"}
	case u.objects > g.max.objects:
		return &excess{g.max.what, int64(g.max.objects), "objects"}
	case u.values > g.max.values:
		return &excess{g.max.what, int64(g.max.values), "values"}
	case g.max.items > 1 && u.items >= g.max.items:
		return &excess{g.max.what, int64(g.max.items), "items"}
	}
	return nil
}

// Close implements io.Closer.
func (g *gauge) Close() error { return g.r.Close() }
