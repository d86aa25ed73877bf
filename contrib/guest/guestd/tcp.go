package main

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// known is the endless stream of bytes that both ends know.
func known() io.Reader { return rand.NewChaCha8([32]byte{}) }

// listenTCP serves a port until the program ends. serve owns nothing: its
// connection is closed when it returns.
func listenTCP(host string, port int, serve func(*net.TCPConn)) error {
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				// Out of descriptors: the ones in use will be given back.
				log.Printf("accept on %s: %v", addr, err)
				time.Sleep(100 * time.Millisecond)
				continue
			}
			go func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			}()
		}
	}()
	return nil
}

func echo(c *net.TCPConn) { io.Copy(c, c) }

func sink(c *net.TCPConn) {
	h := sha256.New()
	n, err := io.Copy(h, c)
	if err != nil {
		return
	}
	fmt.Fprintf(c, "%x %d\n", h.Sum(nil), n)
}

func source(c *net.TCPConn) {
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return
	}
	n, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	if err != nil {
		return
	}
	io.CopyN(c, known(), n)
}

func answerAfter(d time.Duration) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		n, err := io.Copy(io.Discard, c)
		if err != nil {
			return
		}
		time.Sleep(d)
		fmt.Fprintf(c, "OK %d\n", n)
	}
}

func greet(c *net.TCPConn) {
	time.Sleep(200 * time.Millisecond)
	io.CopyN(c, known(), 64<<10)
}

// resetUnread leaves the kernel no other way to close than a reset
// (RFC 2525, 2.17).
func resetUnread(c *net.TCPConn) {
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return
	}
	time.Sleep(200 * time.Millisecond) // for more to arrive
}

// neverRead holds the connection until its peer has reset it: a FIN behind
// data that nobody reads is never seen, and a write would be one.
func neverRead(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	for {
		time.Sleep(time.Second)
		var reset error
		err := raw.Control(func(fd uintptr) {
			if n, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_ERROR); err == nil && n != 0 {
				reset = syscall.Errno(n)
			}
		})
		if err != nil || reset != nil {
			return
		}
	}
}

func readLate(c *net.TCPConn) {
	time.Sleep(3 * time.Second)
	sink(c)
}

func flood(c *net.TCPConn) { io.Copy(c, known()) }

func line(c *net.TCPConn) {
	s, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return
	}
	io.WriteString(c, s)
}

func closeFirst(*net.TCPConn) { time.Sleep(300 * time.Millisecond) }

// observations are how observed flows ended, by the name their client gave.
type observations struct {
	mu   sync.Mutex
	ends map[string]chan string // each takes one value
}

func newObservations() *observations {
	return &observations{ends: make(map[string]chan string)}
}

func (o *observations) end(id string) chan string {
	o.mu.Lock()
	defer o.mu.Unlock()
	ch := o.ends[id]
	if ch == nil {
		ch = make(chan string, 1)
		o.ends[id] = ch
	}
	return ch
}

func (o *observations) observe(c *net.TCPConn) {
	r := bufio.NewReader(c)
	id, err := r.ReadString('\n')
	if err != nil {
		return
	}
	h := sha256.New()
	n, err := io.Copy(h, r)
	how := "eof"
	switch {
	case errors.Is(err, syscall.ECONNRESET):
		how = "reset"
	case err != nil:
		how = "error"
	}
	select {
	case o.end(id) <- fmt.Sprintf("%s %d %x\n", how, n, h.Sum(nil)):
	default: // a name used twice keeps its first end
	}
}

func (o *observations) closeThenObserve(c *net.TCPConn) {
	io.WriteString(c, "hello\n")
	c.CloseWrite()
	o.observe(c)
}

func (o *observations) report(c *net.TCPConn) {
	id, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return
	}
	select {
	case how := <-o.end(id):
		io.WriteString(c, how)
	case <-time.After(time.Minute):
		io.WriteString(c, "open\n")
	}
	o.mu.Lock()
	delete(o.ends, id)
	o.mu.Unlock()
}
