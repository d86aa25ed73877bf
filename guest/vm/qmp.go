package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

// Theory of operation, of the QEMU Machine Protocol (QEMU 7.2,
// docs/interop/qmp-spec.rst and qapi/run-state.json).
//
// A connection begins with QEMU's greeting; then qmp_capabilities, from whose
// answer on events are sent, and query-status are asked. Messages are JSON
// objects, one a line. What is not of that form, or is longer than maxMessage,
// ends the connection: whoever sent it is not speaking QMP.
//
// QEMU sends events and answers in the order in which things happened, so the
// last that was read is true. Two events say less than is needed, and have
// query-status asked after them: STOP does not say why, and RESET leaves a VM
// that was stopped stopped, with no event of that. One question is under way at a
// time, so a VMM that sends events without end and reads nothing cannot make a
// write block.
//
// SHUTDOWN is followed by STOP under -no-shutdown; that STOP says nothing new.
//
// A QMP socket serves one client. QEMU accepts the next when that one has left,
// so a second stands in its line, connected, and hears nothing: no greeting
// within greetingWithin means that somebody else is connected, or that QEMU
// hangs. It is said, and the place in the line is kept: the greeting comes when
// the other leaves. When the line is full too, connect(2) says EAGAIN.
//
// What happens to the VM while nobody is connected is not told later: of a RESET
// in that time nothing is ever known here.
//
// It is our own reader because github.com/digitalocean/go-qemu, the one that is
// around, has no release, reads with no bound on time, loses what its first reader
// had buffered, hides a line that is no JSON, and brings a libvirt client along.

const (
	// greetingWithin is how long a QEMU that nobody else talks to may take to
	// greet: at most an iteration of its main loop.
	greetingWithin = 3 * time.Second
	// answerWithin ends a connection whose QEMU does not answer. Starting an
	// incoming migration or a backend may keep its main loop busy for seconds.
	answerWithin = 30 * time.Second
	// Tries are 250 ms apart, then 500 ms, and from then on 1 s: a VMM that comes
	// is noticed within a second, and connecting to a socket costs nothing.
	retryMin = 250 * time.Millisecond
	retryMax = time.Second
	// A connection that lasted this long was a good one: the next tries begin
	// with the short delay again.
	goodAfter = 10 * time.Second
)

// A QMP follows QEMU through its QMP socket.
type QMP struct {
	path string
	dial func(ctx context.Context) (net.Conn, error)
}

// NewQMP makes a client of the unix socket at path. It does not connect yet.
func NewQMP(path string) *QMP {
	return &QMP{path: path, dial: func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}
}

// Follow connects and tells say what QEMU says, again and again until ctx ends:
// the VMM may come later, leave and return. It calls say from one goroutine at a
// time, and returns soon after ctx has ended and say has returned. It is called
// once at a time.
func (q *QMP) Follow(ctx context.Context, say func(Event)) {
	delay, said := retryMin, ""
	lost := func(err error) {
		if why := fmt.Sprintf("QMP socket %s: %s", q.path, whyLost(err)); why != said {
			said = why
			say(Event{Lost, why})
		}
	}
	for ctx.Err() == nil {
		began := time.Now()
		err := q.session(ctx, func(e Event) { said = ""; say(e) }, lost)
		if ctx.Err() != nil {
			return
		}
		lost(err)
		if time.Since(began) >= goodAfter {
			delay = retryMin
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
		}
		delay = min(2*delay, retryMax)
	}
}

// whyLost says what ended a connection, or kept it from being made.
func whyLost(err error) string {
	switch {
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED):
		return "nobody listens there"
	case errors.Is(err, syscall.EAGAIN):
		return errBusy.Error()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSlow.Error()
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "the VMM closed the connection"
	}
	var op *net.OpError
	if errors.As(err, &op) { // without the address, which is said already
		return fmt.Sprintf("%s: %s", op.Op, op.Err)
	}
	return err.Error()
}

var (
	errBusy   = errors.New("the VMM does not answer; another client may be connected, and it serves one at a time")
	errSlow   = fmt.Errorf("the VMM has not answered within %s", answerWithin)
	errNotQMP = errors.New("what came is not QMP")
)

// session is one connection. It returns what ended it, never nil.
func (q *QMP) session(ctx context.Context, say func(Event), lost func(err error)) error {
	conn, err := q.dial(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()

	t := talk{conn: conn, in: newReader(conn), say: say}
	if err := t.greet(lost); err != nil {
		return err
	}
	for {
		m, err := t.in.next()
		if err != nil {
			return err
		}
		if err := t.hear(m); err != nil {
			return err
		}
	}
}

// A talk is what was said and asked on one connection so far.
type talk struct {
	conn net.Conn
	in   *reader
	say  func(Event)

	asked string // the question under way, "" for none
	again bool   // something happened since that makes the answer old
	state Kind   // that was said last; 0 before, and after a reset
}

// greet waits for the greeting, however long, and asks the first question.
func (t *talk) greet(lost func(err error)) error {
	if err := t.within(greetingWithin); err != nil {
		return err
	}
	err := t.in.wait()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		lost(errBusy)
		if err = t.within(0); err == nil {
			err = t.in.wait()
		}
	}
	if err != nil {
		return err
	}
	if err := t.within(answerWithin); err != nil {
		return err
	}
	m, err := t.in.next()
	if err != nil {
		return err
	}
	if m.Greeting == nil {
		return errNotQMP
	}
	return t.ask("qmp_capabilities")
}

// within sets when reads and writes give up, never for 0.
func (t *talk) within(d time.Duration) error {
	if d == 0 {
		return t.conn.SetDeadline(time.Time{})
	}
	return t.conn.SetDeadline(time.Now().Add(d))
}

// ask sends a question. None is under way.
func (t *talk) ask(command string) error {
	t.asked, t.again = command, false
	if err := t.within(answerWithin); err != nil {
		return err
	}
	_, err := fmt.Fprintf(t.conn, "{\"execute\":%q}\n", command)
	return err
}

// askState asks for the VM's state, now or after the question under way.
func (t *talk) askState() error {
	if t.asked != "" {
		t.again = true
		return nil
	}
	return t.ask("query-status")
}

// hear takes a message that is not the greeting. An error ends the connection.
func (t *talk) hear(m message) error {
	switch {
	case m.Event != "":
		return t.event(m.Event, m.Data)
	case t.asked == "" || m.Greeting != nil:
		return errNotQMP
	case m.Error != nil:
		return fmt.Errorf("%s: the VMM refuses: %.200q", t.asked, m.Error.Desc)
	case t.asked == "qmp_capabilities":
		return t.ask("query-status")
	}
	t.asked = ""
	if err := t.within(0); err != nil {
		return err
	}
	if t.again {
		return t.askState()
	}
	var status struct {
		Status  string `json:"status"`
		Running *bool  `json:"running"`
	}
	if err := json.Unmarshal(m.Return, &status); err != nil || status.Running == nil {
		return errNotQMP
	}
	switch {
	case status.Status == "shutdown":
		t.tell(Shutdown, "")
	case *status.Running:
		t.tell(Running, "")
	default:
		t.tell(Paused, word(status.Status))
	}
	return nil
}

// event takes an event. What tells nothing of the VM's state is ignored, and so
// is POWERDOWN: the guest was asked to end and may take its time.
func (t *talk) event(name string, data json.RawMessage) error {
	switch name {
	case "RESUME":
		t.tell(Running, "")
	case "STOP":
		if t.state != Shutdown {
			t.tell(Paused, "")
			return t.askState()
		}
	case "SUSPEND":
		t.tell(Paused, "suspended")
	case "WAKEUP":
		return t.askState()
	case "SHUTDOWN":
		t.tell(Shutdown, cause(data))
	case "RESET":
		t.state = 0
		t.say(Event{Reset, cause(data)})
		return t.askState()
	}
	return nil
}

func (t *talk) tell(state Kind, detail string) {
	t.state = state
	t.say(Event{state, detail})
}

// cause returns the reason that SHUTDOWN and RESET carry since QEMU 4.0, ""
// without one.
func cause(data json.RawMessage) string {
	var why struct {
		Reason string `json:"reason"`
	}
	if json.Unmarshal(data, &why) != nil {
		return ""
	}
	return word(why.Reason)
}

// word returns s if it is one of QMP's enumerations' values by its form, else
// "": it is shown to people.
func word(s string) string {
	if len(s) > 40 || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return ""
	}
	return s
}
