package vhostuser

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// A reader reads requests from a front-end. It belongs to one goroutine.
type reader struct {
	conn *net.UnixConn
	head [headerSize]byte
	body [maxPayload]byte
	oob  []byte
	m    message
}

func newReader(conn *net.UnixConn) *reader {
	// Room for one more descriptor than a message may have: so too many are told
	// from as many as there may be.
	return &reader{conn: conn, oob: make([]byte, unix.CmsgSpace((maxFDs+1)*4))}
}

// next reads a request. It is valid until the next call, and its descriptors are
// the caller's, also beside an error. The end of the stream between two requests
// is io.EOF.
func (r *reader) next() (*message, error) {
	r.m = message{}
	if err := r.readHead(); err != nil {
		return &r.m, err
	}
	h, err := parseHeader(&r.head)
	if err != nil {
		return &r.m, err
	}
	r.m.header, r.m.payload = h, r.body[:h.size]
	// A descriptor beside the payload, where none belongs, is one that the kernel
	// closes: read(2) cannot take it.
	if _, err := io.ReadFull(r.conn, r.m.payload); err != nil {
		return &r.m, fmt.Errorf("read payload of %s: %w", h.request, noEOF(err))
	}
	return &r.m, nil
}

// readHead reads a header, and what descriptors come with any byte of it.
func (r *reader) readHead() error {
	for got := 0; got < headerSize; {
		n, oobn, flags, _, err := r.conn.ReadMsgUnix(r.head[got:], r.oob)
		if oobn > 0 {
			fds, bad := parseFDs(r.oob[:oobn])
			r.m.fds = append(r.m.fds, fds...)
			if err == nil {
				err = bad
			}
		}
		switch {
		case errors.Is(err, io.EOF) && got == 0: // net wraps it here
			return io.EOF
		case err != nil:
			return fmt.Errorf("read header: %w", noEOF(err))
		case flags&unix.MSG_CTRUNC != 0 && len(r.m.fds) <= maxFDs: // the kernel had no numbers for the others
			return fmt.Errorf("read header: descriptors were lost: %w", unix.EMFILE)
		case len(r.m.fds) > maxFDs:
			return fmt.Errorf("read header: %w: more than %d", errFDs, maxFDs)
		}
		got += n
	}
	return nil
}

// parseFDs returns the descriptors in a control message, also beside an error.
func parseFDs(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	for i := range messages {
		got, bad := unix.ParseUnixRights(&messages[i])
		fds, err = append(fds, got...), errors.Join(err, bad)
	}
	return fds, err
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// closeFDs closes what is no descriptor's -1 and nobody's any more.
func closeFDs(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// hungUp reports whether the front-end has closed its end, read or not (poll(2)).
func hungUp(conn syscall.Conn) (gone bool) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	err = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		for {
			if _, err := unix.Poll(p, 0); err != unix.EINTR {
				break
			}
		}
		gone = p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return gone || err != nil
}

func supported() error { return nil }
