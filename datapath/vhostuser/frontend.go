package vhostuser

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"

	"github.com/culvertnet/culvert/datapath"
)

// A frontend is one connection: a VMM, what it and we have agreed on, and its
// device. It ends when the VMM leaves or breaks the protocol, and its listener ends
// it when neither that nor an attachment needs it any more.
type frontend struct {
	conn    *net.UnixConn
	log     *slog.Logger
	dev     *device
	session session
	done    chan struct{} // closed when everything is freed

	mu    sync.Mutex
	fault error // what ended it from our side
}

// newFrontend takes over conn. changed is called when attach may have another
// answer than before.
func newFrontend(conn *net.UnixConn, name string, pairs int, log *slog.Logger, changed func()) *frontend {
	f := &frontend{conn: conn, log: log, done: make(chan struct{})}
	f.dev = newDevice(name, pairs, changed, f.fail)
	f.session.dev = f.dev
	return f
}

// serve serves requests until the connection ends, and frees everything.
func (f *frontend) serve() {
	defer close(f.done)
	err := f.requests()
	_ = f.conn.Close()
	f.mu.Lock()
	if f.fault != nil {
		err = f.fault
	}
	f.mu.Unlock()
	switch {
	case err == io.EOF, errors.Is(err, net.ErrClosed):
		f.log.Debug("the front-end has left")
		err = datapath.ErrPeerGone
	default:
		f.log.Warn("closed the front-end's connection", "err", err)
		err = fmt.Errorf("%w: %w", datapath.ErrPeerGone, err)
	}
	f.dev.close(err)
}

// requests serves one request after another.
func (f *frontend) requests() error {
	r := newReader(f.conn)
	var reply []byte
	for {
		m, err := r.next()
		if err == nil {
			reply, err = f.serveOne(reply[:0], m)
		}
		closeFDs(m.takeFDs()) // what nothing has taken
		if err != nil {
			return err
		}
	}
}

// serveOne serves m and sends the answer, also beside an error. Some requests
// touch guest memory, which the front-end may have cut short.
func (f *frontend) serveOne(buf []byte, m *message) (reply []byte, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer caught(&err)
	reply, err = f.session.serve(buf, m)
	if len(reply) > 0 {
		if _, bad := f.conn.Write(reply); bad != nil && err == nil {
			err = fmt.Errorf("answer %s: %w", m.request, bad)
		}
	}
	return reply, err
}

// fail ends the connection for what a reader or writer of frames has found.
func (f *frontend) fail(err error) {
	f.mu.Lock()
	f.fault = err
	f.mu.Unlock()
	_ = f.conn.Close()
}

// gone reports whether the VMM has left, noticed by us or not.
func (f *frontend) gone() bool {
	select {
	case <-f.done:
		return true
	default:
		return hungUp(f.conn)
	}
}

// close ends the connection and waits until everything is freed.
func (f *frontend) close() {
	_ = f.conn.Close()
	<-f.done
}
