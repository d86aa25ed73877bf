package docker

import (
	"bytes"
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
	// maxEntries is how many bindings, unusable ones and addresses we take of all
	// containers together: a range of 32 000 ports in both families, or 16 for each
	// of 4096 containers. At 300 bytes for the longest, 20 MB are kept at most.
	maxEntries = 65536
)

var (
	// A container is listed in 1 to 4 KiB with its labels, a binding in 66 bytes
	// ({"IP":"0.0.0.0","PrivatePort":80,"PublicPort":8080,"Type":"tcp"},):
	// 4096 × 4 KiB + 65536 × 66 B = 20 MiB. An object for each binding, and per
	// container some ten of networks and mounts; values are four a binding and 60 a
	// container. The worst document of these numbers decodes into about 100 MB,
	// once, for as long as the call lasts.
	listing = measure{what: "a listing", bytes: 24 << 20, objects: 1 << 17, values: 1 << 19, items: maxContainers}
	// A port is 86 bytes in the network settings and 50 in the host configuration,
	// with four objects: room for a range of 4000 beside what is always there (5
	// to 10 KiB). A container of more is taken as it is listed. Eight of these at
	// once decode into less than 100 MB, whoever made them.
	inspection = measure{what: "an inspection", bytes: 1 << 20, objects: 1 << 14, values: 1 << 16, items: 1}
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
	for text := p[:n]; len(text) > 0; {
		k := g.count(text)
		if g.exceeded = g.check(); g.exceeded != nil {
			return n - len(text), g.exceeded
		}
		text = text[k:]
	}
	return n, err
}

// count takes the text up to the next byte that has a meaning, and that byte.
func (g *gauge) count(text []byte) int {
	u := &g.used
	meaning := `"{}[],`
	if g.escaped {
		g.escaped = false
		u.bytes++
		return 1
	}
	if g.quoted {
		meaning = `"\`
	}
	k := bytes.IndexAny(text, meaning)
	if k < 0 {
		u.bytes += int64(len(text))
		return len(text)
	}
	u.bytes += int64(k + 1)
	switch text[k] {
	case '\\':
		g.escaped = true
	case '"':
		g.quoted = !g.quoted
	case '{':
		g.depth++
		u.objects++
	case '[':
		g.depth++
	case ',':
		u.values++
		if g.depth == 1 {
			u.items++ // one less than there are; an object's own members count too
		}
	default:
		if g.depth--; g.depth <= 0 { // the end of a document
			g.depth, *u = 0, measure{}
		}
	}
	return k + 1
}

func (g *gauge) check() error {
	switch u, max := &g.used, &g.max; {
	case u.bytes > max.bytes:
		return &excess{max.what, max.bytes, "bytes"}
	case u.objects > max.objects:
		return &excess{max.what, int64(max.objects), "objects"}
	case u.values > max.values:
		return &excess{max.what, int64(max.values), "values"}
	case max.items > 1 && u.items >= max.items:
		return &excess{max.what, int64(max.items), "items"}
	}
	return nil
}

// Close implements io.Closer.
func (g *gauge) Close() error { return g.r.Close() }
