package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	greeting = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}` + "\r\n"
	done     = `{"return": {}}` + "\r\n"
)

func status(s string, running bool) string {
	return fmt.Sprintf(`{"return": {"status": %q, "singlestep": false, "running": %v}}`+"\r\n", s, running)
}

func event(name, data string) string {
	if data != "" {
		data = `, "data": ` + data
	}
	return fmt.Sprintf(`{"timestamp": {"seconds": 1796029240, "microseconds": 891237}, "event": %q%s}`+"\r\n", name, data)
}

func reason(r string) string { return fmt.Sprintf(`{"guest": true, "reason": %q}`, r) }

// A bench is a QMP that follows, in a bubble of its own; synctest fails the test
// when a goroutine is left behind.
type bench struct {
	conns  chan *server          // the connections it makes
	refuse atomic.Pointer[error] // when set, it makes none
	heard  chan Event
	end    context.CancelFunc
}

func inFollow(t *testing.T, f func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		b := &bench{conns: make(chan *server, 10000), heard: make(chan Event, 10000), end: cancel}
		q := NewQMP("/run/qmp")
		q.dial = func(context.Context) (net.Conn, error) {
			if err := b.refuse.Load(); err != nil {
				return nil, *err
			}
			ours, theirs := net.Pipe()
			b.conns <- &server{Conn: theirs, lines: bufio.NewScanner(theirs)}
			return ours, nil
		}
		var following sync.WaitGroup
		following.Go(func() { q.Follow(ctx, func(e Event) { b.heard <- e }) })
		f(t, b)
		cancel()
		following.Wait()
		for len(b.conns) > 0 {
			_ = (<-b.conns).Close()
		}
	})
}

// next returns what was said next; it fails when nothing is said.
func (b *bench) next(t *testing.T) Event {
	t.Helper()
	select {
	case e := <-b.heard:
		return e
	case <-time.After(time.Minute):
		require.FailNow(t, "nothing is said")
	}
	return Event{}
}

// says asserts that want is what is said next, in this order and nothing more.
func (b *bench) says(t *testing.T, want ...Event) {
	t.Helper()
	for _, w := range want {
		assert.Equal(t, w, b.next(t))
	}
	synctest.Wait()
	assert.Empty(t, b.heard)
}

func lost(why string) Event { return Event{Lost, "QMP socket /run/qmp: " + why} }

// A server is QEMU's end of a connection.
type server struct {
	net.Conn
	lines *bufio.Scanner
}

func (s *server) send(t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		_, err := io.WriteString(s, text)
		require.NoError(t, err)
	}
}

// asked asserts what is asked next.
func (s *server) asked(t *testing.T, command string) {
	t.Helper()
	require.True(t, s.lines.Scan(), "asked nothing")
	assert.JSONEq(t, fmt.Sprintf(`{"execute": %q}`, command), s.lines.Text())
}

// begin makes the beginning of a connection whose VM is in a state.
func (b *bench) begin(t *testing.T, state string, running bool) *server {
	t.Helper()
	s := <-b.conns
	s.send(t, greeting)
	s.asked(t, "qmp_capabilities")
	s.send(t, done)
	s.asked(t, "query-status")
	s.send(t, status(state, running))
	return s
}

func TestStateAtConnect(t *testing.T) {
	for state, want := range map[string]Event{
		"running":        {Kind: Running},
		"paused":         {Paused, "paused"},
		"prelaunch":      {Paused, "prelaunch"},
		"suspended":      {Paused, "suspended"},
		"inmigrate":      {Paused, "inmigrate"},
		"io-error":       {Paused, "io-error"},
		"guest-panicked": {Paused, "guest-panicked"},
		"shutdown":       {Kind: Shutdown},
		"of-the-future":  {Paused, "of-the-future"},
		"in RED letters": {Kind: Paused}, // not shown to people
		"":               {Kind: Paused},
	} {
		t.Run(state, func(t *testing.T) {
			inFollow(t, func(t *testing.T, b *bench) {
				b.begin(t, state, state == "running")
				b.says(t, want)
			})
		})
	}
}

func TestEvents(t *testing.T) {
	inFollow(t, func(t *testing.T, b *bench) {
		s := b.begin(t, "running", true)
		b.says(t, Event{Kind: Running})

		s.send(t, event("STOP", ""))
		s.asked(t, "query-status")
		s.send(t, status("io-error", false))
		b.says(t, Event{Kind: Paused}, Event{Paused, "io-error"})
		s.send(t, event("RESUME", ""))
		b.says(t, Event{Kind: Running})

		// The state after a reset is asked for: one that was stopped stays so.
		s.send(t, event("RESET", reason("guest-reset")))
		s.asked(t, "query-status")
		s.send(t, status("prelaunch", false))
		b.says(t, Event{Reset, "guest-reset"}, Event{Paused, "prelaunch"})

		s.send(t, event("SUSPEND", ""))
		b.says(t, Event{Paused, "suspended"})
		s.send(t, event("WAKEUP", ""))
		s.asked(t, "query-status")
		s.send(t, status("running", true))
		b.says(t, Event{Kind: Running})

		// Under -no-shutdown a STOP follows; it says nothing new.
		s.send(t, event("SHUTDOWN", reason("guest-shutdown")), event("STOP", ""))
		b.says(t, Event{Shutdown, "guest-shutdown"})
		s.send(t, event("RESET", ""))
		s.asked(t, "query-status")
		s.send(t, status("prelaunch", false), event("RESUME", ""))
		b.says(t, Event{Kind: Reset}, Event{Paused, "prelaunch"}, Event{Kind: Running})

		// What says nothing of the state, and data of any form.
		s.send(t, event("POWERDOWN", ""), event("NIC_RX_FILTER_CHANGED", `{"path": [1, {"reason": 7}]}`),
			event("BLOCK_IO_ERROR", `{"reason": ["x"]}`), event("VNC_CONNECTED", `7`))
		s.send(t, event("SHUTDOWN", `{"reason": {"of": "the future"}}`))
		b.says(t, Event{Kind: Shutdown})
		s.send(t, event("SHUTDOWN", reason("no word")), event("SHUTDOWN", reason(strings.Repeat("a", 41))))
		b.says(t, Event{Kind: Shutdown}, Event{Kind: Shutdown})
	})
}

// Whatever the pieces in which a stream arrives, it says the same.
func TestPartialLines(t *testing.T) {
	inFollow(t, func(t *testing.T, b *bench) {
		s := <-b.conns
		drip := func(text string) {
			for i := range len(text) {
				s.send(t, text[i:i+1])
			}
		}
		drip(greeting)
		s.asked(t, "qmp_capabilities")
		drip(done)
		s.asked(t, "query-status")
		drip(status("running", true) + event("VNC_CONNECTED", `"`+strings.Repeat("x", 100_000)+`"`) + event("SHUTDOWN", reason("host-signal")))
		b.says(t, Event{Kind: Running}, Event{Shutdown, "host-signal"})
	})
}

// What is not QMP ends the connection, is said, and the next one is tried.
func TestGarbage(t *testing.T) {
	notQMP := "what came is not QMP"
	for name, c := range map[string]struct{ text, why string }{
		"no JSON":           {"hello\r\n", notQMP},
		"empty line":        {"\r\n", notQMP},
		"an array":          {"[]\n", notQMP},
		"an empty object":   {"{}\n", notQMP},
		"two in a line":     {strings.TrimSpace(event("STOP", "")) + event("RESUME", ""), notQMP},
		"two kinds":         {`{"event": "STOP", "return": {}}` + "\n", notQMP},
		"a nameless event":  {`{"event": ""}` + "\n", notQMP},
		"a number's event":  {`{"event": 7}` + "\n", notQMP},
		"a second greeting": {greeting, notQMP},
		"an unasked answer": {done, notQMP},
		"an unasked error":  {`{"error": {"class": "GenericError", "desc": "x"}}` + "\n", notQMP},
		"binary":            {"\x00\xff\xfe\n", notQMP},
		"deep":              {strings.Repeat("[", 100_000) + "\n", notQMP},
		"a huge line":       {`{"event": "` + strings.Repeat("x", maxMessage) + `"}` + "\n", "a message is longer than 1 MiB"},
		"a line's part":     {`{"event": "STO`, "the VMM closed the connection"},
		"a state refused":   {event("STOP", "") + `{"error": {"class": "CommandNotFound", "desc": "\u001b[2J"}}` + "\n", `query-status: the VMM refuses: "\x1b[2J"`},
		"a state of none":   {event("STOP", "") + done, notQMP},
		"a state of null":   {event("STOP", "") + `{"return": null}` + "\n", notQMP},
	} {
		t.Run(name, func(t *testing.T) {
			inFollow(t, func(t *testing.T, b *bench) {
				s := b.begin(t, "running", true)
				b.says(t, Event{Kind: Running})
				go func() { _, _ = io.Copy(io.Discard, s) }()
				_, _ = io.WriteString(s, c.text) // it may not wait for the end
				synctest.Wait()
				_ = s.Close()
				e := b.next(t)
				if e.Kind == Paused {
					e = b.next(t)
				}
				assert.Equal(t, lost(c.why), e)
				b.begin(t, "running", true)
				b.says(t, Event{Kind: Running})
			})
		})
	}
	t.Run("instead of a greeting", func(t *testing.T) {
		inFollow(t, func(t *testing.T, b *bench) {
			(<-b.conns).send(t, event("STOP", ""))
			b.says(t, lost(notQMP))
		})
	})
}

// A line that never ends costs a mebibyte and some, then the connection.
func TestEndlessLine(t *testing.T) {
	r := newReader(endless{})
	_, err := r.next()
	require.ErrorIs(t, err, errTooLong)
	assert.Less(t, cap(r.long), 3*maxMessage)

	text := `{"event": "` + strings.Repeat("x", maxMessage-20) + `"}` + "\n"
	r = newReader(strings.NewReader(text + event("STOP", "")))
	m, err := r.next()
	require.NoError(t, err)
	assert.Len(t, m.Event, maxMessage-20)
	assert.Zero(t, cap(r.long), "not kept")
	m, err = r.next()
	require.NoError(t, err)
	assert.Equal(t, "STOP", m.Event)
}

type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = '{'
	}
	return len(b), nil
}

// FB-136: a connection that is cut off after any byte leaves nothing of itself
// in the next.
func TestClosedAtAnyPoint(t *testing.T) {
	transcript := greeting + done + status("running", true) + event("STOP", "") + status("paused", false) + event("RESUME", "")
	inFollow(t, func(t *testing.T, b *bench) {
		for n := range len(transcript) {
			s := <-b.conns
			var asked sync.WaitGroup
			asked.Go(func() { _, _ = io.Copy(io.Discard, s) })
			// An answer that comes before it was asked for ends the connection too.
			_, _ = io.WriteString(s, transcript[:n])
			_ = s.Close()
			asked.Wait()
		}
		b.begin(t, "paused", false)
		for e := b.next(t); e != (Event{Paused, "paused"}); e = b.next(t) {
			assert.Contains(t, []Kind{Lost, Running, Paused}, e.Kind)
		}
	})
}

// The second client of a socket hears nothing until the first has left: that is
// said once, and it keeps its place.
func TestBusy(t *testing.T) {
	inFollow(t, func(t *testing.T, b *bench) {
		s := <-b.conns
		time.Sleep(greetingWithin + time.Millisecond)
		b.says(t, lost(errBusy.Error()))
		time.Sleep(time.Hour)
		b.says(t)
		assert.Empty(t, b.conns, "no second connection")
		s.send(t, greeting)
		s.asked(t, "qmp_capabilities")
		s.send(t, done)
		s.asked(t, "query-status")
		s.send(t, status("running", true))
		b.says(t, Event{Kind: Running})
		time.Sleep(time.Hour)
		s.send(t, event("SHUTDOWN", ""))
		b.says(t, Event{Kind: Shutdown})
	})
}

func TestNoAnswer(t *testing.T) {
	for _, after := range []string{"", greeting, greeting + done} {
		inFollow(t, func(t *testing.T, b *bench) {
			s := <-b.conns
			go func() { _, _ = io.Copy(io.Discard, s) }()
			if after == "" {
				s.send(t, greeting[:10]) // and no more
			} else {
				s.send(t, after)
			}
			time.Sleep(answerWithin - time.Second)
			b.says(t)
			time.Sleep(2 * time.Second)
			b.says(t, lost("the VMM has not answered within 30s"))
		})
	}
}

// A VMM that resets without end and reads nothing is asked once, and neither
// makes a write wait nor anything grow.
func TestResetStorm(t *testing.T) {
	inFollow(t, func(t *testing.T, b *bench) {
		s := b.begin(t, "running", true)
		b.says(t, Event{Kind: Running})
		s.send(t, event("RESET", ""))
		for range 999 {
			go func() { _, _ = io.WriteString(s, event("RESET", "")) }()
		}
		s.asked(t, "query-status")
		synctest.Wait()
		assert.Len(t, b.heard, 1000)
		s.send(t, status("running", true))
		s.asked(t, "query-status") // that answer may have been old
		s.send(t, status("running", true))
		for range 1000 {
			assert.Equal(t, Reset, b.next(t).Kind)
		}
		b.says(t, Event{Kind: Running})
	})
}

func TestEndsInEachStage(t *testing.T) {
	for name, f := range map[string]func(t *testing.T, b *bench){
		"waiting for the greeting": func(*testing.T, *bench) {},
		"after it":                 func(t *testing.T, b *bench) { (<-b.conns).send(t, greeting) },
		"told that it is busy":     func(*testing.T, *bench) { time.Sleep(time.Minute) },
		"following":                func(t *testing.T, b *bench) { b.begin(t, "running", true) },
		"between two tries": func(t *testing.T, b *bench) {
			_ = (<-b.conns).Close()
			synctest.Wait()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFollow(t, func(t *testing.T, b *bench) {
				f(t, b)
				b.end()
				synctest.Wait()
				said := len(b.heard)
				time.Sleep(time.Hour)
				assert.Len(t, b.heard, said, "said after the end")
			})
		})
	}
}

// A VMM that is not there is asked once a second, and said once for each reason.
func TestRetries(t *testing.T) {
	inFollow(t, func(t *testing.T, b *bench) {
		s := b.begin(t, "running", true)
		b.says(t, Event{Kind: Running})
		time.Sleep(time.Minute)
		var absent error = &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ENOENT)}
		b.refuse.Store(&absent)
		require.NoError(t, s.Close())
		b.says(t, lost("the VMM closed the connection"))
		time.Sleep(time.Minute)
		b.says(t, lost("nobody listens there"))
		b.refuse.Store(nil)
		began := time.Now()
		b.begin(t, "running", true)
		assert.LessOrEqual(t, time.Since(began), retryMax)
		b.says(t, Event{Kind: Running})
	})
}

// FB-169: the socket may be absent, something else, or come and go.
func TestSocketFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp")
	heard := make(chan Event, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() { NewQMP(path).Follow(ctx, func(e Event) { heard <- e }) })
	defer following.Wait()
	defer cancel()
	says := func(kind Kind, detail string) {
		t.Helper()
		e := <-heard
		assert.Equal(t, kind, e.Kind)
		assert.Contains(t, e.Detail, detail)
	}
	says(Lost, "QMP socket "+path+": nobody listens there")
	require.NoError(t, os.Symlink("nowhere", path))
	require.NoError(t, os.Remove(path))
	for range 3 {
		l, err := net.Listen("unix", path)
		require.NoError(t, err)
		conn, err := l.Accept()
		require.NoError(t, err)
		_, err = io.WriteString(conn, greeting+done+status("running", true))
		require.NoError(t, err)
		lines := bufio.NewScanner(conn)
		for range 2 { // questions, answered before they are asked
			require.True(t, lines.Scan())
		}
		says(Running, "")
		require.NoError(t, conn.Close())
		says(Lost, "the VMM closed the connection")
		require.NoError(t, l.Close())
		says(Lost, "nobody listens there")
	}
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	says(Lost, "connect: protocol wrong type for socket")
	require.NoError(t, l.Close())
}

func TestReasons(t *testing.T) {
	for err, want := range map[error]string{
		syscall.EAGAIN:     errBusy.Error(),
		syscall.ECONNRESET: "the VMM closed the connection",
		&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EACCES)}: "dial: connect: permission denied",
		errors.New("x"): "x",
	} {
		assert.Equal(t, want, whyLost(err))
	}
}

func TestKindNames(t *testing.T) {
	for kind, name := range map[Kind]string{Lost: "lost", Running: "running", Paused: "paused", Shutdown: "shutdown", Reset: "reset", 0: "unknown"} {
		assert.Equal(t, name, kind.String())
	}
}

// written is a connection that reads from text and counts what is asked.
type written struct {
	net.Conn
	text  io.Reader
	asked int
}

func (w *written) Read(b []byte) (int, error)  { return w.text.Read(b) }
func (w *written) Write(b []byte) (int, error) { w.asked++; return len(b), nil }
func (w *written) SetDeadline(time.Time) error { return nil }
func (w *written) Close() error                { return nil }

// Whatever a VMM sends, the connection ends in an error, no more is asked than
// was answered and one, and what is said is fit for people.
func FuzzSession(f *testing.F) {
	f.Add([]byte(greeting + done + status("running", true) + event("STOP", "") + status("paused", false)))
	f.Add([]byte(greeting + done + status("shutdown", false) + event("RESET", reason("guest-reset")) + event("RESET", "") + done))
	f.Add([]byte(greeting + `{"error": {"desc": "no"}}` + "\n"))
	f.Add([]byte("{\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		conn := &written{text: strings.NewReader(string(text))}
		q := NewQMP("/run/qmp")
		q.dial = func(context.Context) (net.Conn, error) { return conn, nil }
		said := 0
		err := q.session(t.Context(), func(e Event) {
			said++
			if e.Kind <= Lost || e.Kind > Reset || word(e.Detail) != e.Detail {
				t.Errorf("said %v", e)
			}
		}, func(err error) { t.Errorf("lost: %v", err) })
		if err == nil {
			t.Error("ended without an error")
		}
		lines := strings.Count(string(text), "\n")
		if conn.asked > lines || said > 2*lines {
			t.Errorf("asked %d times and said %d of %d lines", conn.asked, said, lines)
		}
	})
}
