package vm

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
)

const (
	// maxMessage bounds a message. What is asked and heard here is of some
	// hundred bytes.
	maxMessage = 1 << 20
	// keepMessage is how much memory for long messages is kept for the next.
	keepMessage = 64 << 10
)

var errTooLong = errors.New("a message is longer than 1 MiB")

// A message is what QEMU sends, one of four kinds: the one field that is set
// says which.
type message struct {
	Greeting json.RawMessage `json:"QMP"`
	Return   json.RawMessage `json:"return"`
	Error    *struct {
		Desc string `json:"desc"`
	} `json:"error"`
	Event string `json:"event"`

	Data json.RawMessage `json:"data"` // of an event
}

// A reader cuts a stream into lines and those into messages.
type reader struct {
	in   *bufio.Reader
	long []byte // a line that in's buffer did not hold
}

func newReader(r io.Reader) *reader { return &reader{in: bufio.NewReader(r)} }

// wait waits until there is something to read. It may be called again after an
// error that was a deadline.
func (r *reader) wait() error {
	_, err := r.in.Peek(1)
	return err
}

// next reads a message. Errors end the stream: its own, io.EOF between messages,
// io.ErrUnexpectedEOF inside one, errTooLong or errNotQMP.
func (r *reader) next() (message, error) {
	line, err := r.line()
	if err != nil {
		return message{}, err
	}
	m, err := parse(line)
	if cap(r.long) > keepMessage {
		r.long = nil
	}
	return m, err
}

// line returns a line with its end. It is valid until the next call.
func (r *reader) line() ([]byte, error) {
	r.long = r.long[:0]
	for {
		part, err := r.in.ReadSlice('\n')
		switch {
		case len(r.long)+len(part) > maxMessage:
			return nil, errTooLong
		case err == nil && len(r.long) == 0:
			return part, nil
		}
		r.long = append(r.long, part...)
		switch {
		case err == nil:
			return r.long, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(r.long) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}

// parse takes a line, of which the message keeps nothing.
func parse(line []byte) (message, error) {
	var m message
	if json.Unmarshal(line, &m) != nil {
		return message{}, errNotQMP
	}
	kinds := 0
	for _, is := range []bool{m.Greeting != nil, m.Return != nil, m.Error != nil, m.Event != ""} {
		if is {
			kinds++
		}
	}
	if kinds != 1 {
		return message{}, errNotQMP
	}
	return m, nil
}
