package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Bounds of what is read. A Service is at most what etcd keeps, 1.5 MiB, and
// some more as JSON; a whole answer is read as a stream and never held.
const (
	maxValue  = 8 << 20   // bytes of one JSON value
	maxAnswer = 256 << 20 // bytes of one page of a listing, whose end must come
	maxPages  = 1000
	// maxServices and maxEntries bound what is kept of a cluster. One that says
	// it has more is not followed in part, for then Services would seem to go.
	maxServices = 20_000
	maxEntries  = 200_000 // Services, ports, ingress entries and source ranges
)

var (
	errValueTooLong  = fmt.Errorf("a value of more than %d MiB", maxValue>>20)
	errAnswerTooLong = fmt.Errorf("an answer of more than %d MiB", maxAnswer>>20)
)

// values reads one JSON value after the other and bounds each: a decoder by
// itself holds whatever a value has.
type values struct {
	*json.Decoder
	body  io.Reader
	value int   // bytes that the value being read may still have
	total int64 // and the answer; below 0 when it may have any number
}

func newValues(body io.Reader, total int64) *values {
	v := &values{body: body, total: total}
	v.Decoder = json.NewDecoder(v)
	return v
}

// Read is for the Decoder.
func (v *values) Read(p []byte) (int, error) {
	switch {
	case v.value == 0:
		return 0, errValueTooLong
	case v.total == 0:
		return 0, errAnswerTooLong
	}
	p = p[:min(len(p), v.value)]
	if v.total > 0 {
		p = p[:min(int64(len(p)), v.total)]
	}
	n, err := v.body.Read(p)
	v.value -= n
	if v.total > 0 {
		v.total -= int64(n)
	}
	return n, err
}

// decode reads the next value into dst.
func (v *values) decode(dst any) error {
	v.value = maxValue
	return v.Decode(dst)
}

// token reads the next token.
func (v *values) token() (json.Token, error) {
	v.value = maxValue
	return v.Token()
}

// more says whether the array or object has another element.
func (v *values) more() bool {
	v.value = maxValue
	return v.More()
}

// open reads the delimiter that begins an object or an array.
func (v *values) open(want json.Delim) error {
	t, err := v.token()
	if err == nil && t != want {
		err = fmt.Errorf("%v where %v should be", t, want)
	}
	return err
}

// malformed says whether err is that of one value of the wrong shape, after
// which the next can be read.
func malformed(err error) bool {
	var typ *json.UnmarshalTypeError
	var shape *shapeError
	return errors.As(err, &typ) || errors.As(err, &shape)
}

// listMeta is meta/v1's ListMeta as far as it is read.
type listMeta struct {
	ResourceVersion string `json:"resourceVersion"`
	Continue        string `json:"continue"`
}

// page reads a ServiceList and gives each Service to item. It returns the list's
// metadata after the whole of it has been read: what is cut off is no list.
func (v *values) page(item func(*object, error) error) (meta listMeta, err error) {
	if err = v.open('{'); err != nil {
		return meta, err
	}
	var kind string
	for v.more() {
		key, err := v.token()
		if err != nil {
			return meta, err
		}
		switch key {
		case "kind":
			err = v.decode(&kind)
		case "metadata":
			err = v.decode(&meta)
		case "items":
			err = v.items(item)
		default:
			err = v.decode(new(json.RawMessage))
		}
		if err != nil {
			return meta, err
		}
	}
	if _, err = v.token(); err != nil {
		return meta, err
	}
	if kind != "ServiceList" {
		return meta, fmt.Errorf("a %.63q where a ServiceList should be", kind)
	}
	return meta, nil
}

func (v *values) items(item func(*object, error) error) error {
	t, err := v.token()
	if err != nil || t == nil {
		return err // "items": null is an empty list
	}
	if t != json.Delim('[') {
		return fmt.Errorf("%v where a list should be", t)
	}
	for v.more() {
		var o object
		err := v.decode(&o)
		if err != nil && !malformed(err) {
			return err
		}
		if err := item(&o, err); err != nil {
			return err
		}
	}
	_, err = v.token()
	return err
}

// An event is one element of a watch.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// event reads the next event of a watch.
func (v *values) event() (e event, err error) {
	err = v.decode(&e)
	return e, err
}
