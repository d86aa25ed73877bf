package main_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The guest's ports, as contrib/guest/guestd/main.go lists them.
const (
	portEcho       = 7
	portHTTPD      = 80 // the VM's busybox httpd
	portHTTP       = 8080
	portReport     = 9000
	portSink       = 9001
	portSource     = 9002
	portAnswer50ms = 9003
	portAnswer500  = 9004
	portAnswer5s   = 9005
	portAnswer90s  = 9006
	portGreet      = 9007
	portReset      = 9008
	portNeverRead  = 9009
	portReadLate   = 9010
	portFlood      = 9011
	portLine       = 9012
	portCloseFirst = 9013
	portObserve    = 9014
	portFINFirst   = 9015
	portOtherUDP   = 9053
	portClosed     = 9099 // nobody listens
)

// portRange is the block that one publish of a range carries.
const (
	portRangeFirst = portReport
	portRangeLast  = portFINFirst
)

// An env is a running daemon with a guest behind it, its ports published.
type env struct {
	bed
	d    *daemon
	base int // first host port
}

// publishedSingles are the ports published one by one, at the host ports
// behind the range's, in this order.
var publishedSingles = []string{"7/tcp", "7/udp", "80/tcp", "8080/tcp", "9053/udp", "9099/tcp", "9099/udp"}

const (
	rangeLen = portRangeLast - portRangeFirst + 1
	hostLen  = rangeLen + 7 // len(publishedSingles)
)

// publishes are the -p arguments for host ports from base on.
func publishes(base int) []string {
	p := []string{fmt.Sprintf("%d-%d:%d-%d", base, base+rangeLen-1, portRangeFirst, portRangeLast)}
	for i, single := range publishedSingles {
		p = append(p, fmt.Sprintf("%d:%s", base+rangeLen+i, single))
	}
	return p
}

// addr is where a client finds the guest's port.
func (e *env) addr(host, network string, port int) string {
	at := e.base + port - portRangeFirst
	if port < portRangeFirst || port > portRangeLast {
		want := fmt.Sprintf("%d/%s", port, network)
		for i, single := range publishedSingles {
			if single == want {
				at = e.base + rangeLen + i
			}
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(at))
}

// bound stretches a time for the guest's speed.
func (e *env) bound(d time.Duration) time.Duration { return time.Duration(e.slow()) * d }

// dial connects to the guest's port. Nothing waits for ever: the connection
// has a deadline of two minutes, which a test may move.
func (e *env) dial(t *testing.T, port int) *net.TCPConn {
	t.Helper()
	c, err := e.tryDial(port)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// tryDial is dial for goroutines, whose connection is theirs to close.
func (e *env) tryDial(port int) (*net.TCPConn, error) {
	c, err := net.DialTimeout("tcp", e.addr("127.0.0.1", "tcp", port), 10*time.Second)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), c.SetDeadline(time.Now().Add(2 * time.Minute))
}

// dialUDP gives a socket connected to the guest's port.
func (e *env) dialUDP(t *testing.T, host string, port int) *net.UDPConn {
	t.Helper()
	c, err := net.Dial("udp", e.addr(host, "udp", port))
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	return c.(*net.UDPConn)
}

// known is the stream of bytes that guestd knows too.
func known() io.Reader { return rand.NewChaCha8([32]byte{}) }

// knownHash is the SHA-256 of the first n known bytes.
func knownHash(n int64) string {
	h := sha256.New()
	_, _ = io.CopyN(h, known(), n)
	return hex.EncodeToString(h.Sum(nil))
}

// hashAll reads to the end.
func hashAll(r io.Reader) (sum string, n int64, err error) {
	h := sha256.New()
	n, err = io.Copy(h, r)
	return hex.EncodeToString(h.Sum(nil)), n, err
}

// isReset says that the connection was broken rather than ended: a read gets
// the first error, a write the second.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// mustEcho passes s over a connection to the guest's echo port and back.
func mustEcho(t *testing.T, c net.Conn, s string) {
	t.Helper()
	_, err := io.WriteString(c, s)
	require.NoError(t, err)
	got := make([]byte, len(s))
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, s, string(got))
}

// observed asks the guest how the flow called id ended.
func (e *env) observed(t *testing.T, id string) (how string, n int64, sum string) {
	t.Helper()
	c := e.dial(t, portReport)
	_, err := io.WriteString(c, id+"\n")
	require.NoError(t, err)
	line, err := bufio.NewReader(c).ReadString('\n')
	require.NoError(t, err)
	_, err = fmt.Sscan(line, &how, &n, &sum)
	require.NoError(t, err, "%q", line)
	return how, n, sum
}

// each runs f n times, at most parallel of them at once, and returns the
// errors.
func each(n, parallel int, f func(i int) error) (errs []error) {
	jobs, results := make(chan int), make(chan error)
	for range min(n, parallel) {
		go func() {
			for i := range jobs {
				results <- f(i)
			}
		}()
	}
	go func() {
		defer close(jobs)
		for i := range n {
			jobs <- i
		}
	}()
	for range n {
		if err := <-results; err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}
