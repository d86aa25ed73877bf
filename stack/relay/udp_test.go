package relay

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A datagramEnd is the guest's end of a UDP flow: what the relay wrote, and what
// the guest has to say.
type datagramEnd struct {
	key     UDPKey
	table   *datagramTable
	closing chan struct{}
	say     chan saying

	// Under table.mu.
	wrote           []string
	toGuest, toHost int
	closed, ended   int
	evicted         bool
	failNext        error
}

type saying struct {
	datagrams []Datagram
	err       error
}

// says is what the guest sends in one go.
func says(texts ...string) (s saying) {
	for _, t := range texts {
		s.datagrams = append(s.datagrams, Datagram{[]byte(t[:len(t)/2]), []byte(t[len(t)/2:])})
	}
	return s
}

func (d *datagramEnd) Write(datagrams [][]byte) (n int, err error) {
	d.table.mu.Lock()
	defer d.table.mu.Unlock()
	if d.closed > 0 {
		return 0, net.ErrClosed
	}
	for i, b := range datagrams {
		if err := d.failNext; err != nil {
			d.failNext = nil
			return i, err
		}
		d.wrote = append(d.wrote, string(b))
	}
	return len(datagrams), nil
}

func (d *datagramEnd) Receive(deliver func([]Datagram, error)) {
	go func() {
		for {
			select {
			case s := <-d.say:
				deliver(s.datagrams, s.err)
			case <-d.closing:
				deliver(nil, net.ErrClosed)
				return
			}
		}
	}()
}

func (d *datagramEnd) LocalAddr() string { return "198.18.0.1:1024" }

func (d *datagramEnd) Resumed() time.Time { return d.table.pause.resumed() }

func (d *datagramEnd) Close() error {
	d.table.mu.Lock()
	defer d.table.mu.Unlock()
	if d.closed++; d.closed == 1 {
		close(d.closing)
	}
	return nil
}

func (d *datagramEnd) Passed(toGuest bool, n int) {
	d.table.mu.Lock()
	defer d.table.mu.Unlock()
	if toGuest {
		d.toGuest += n
	} else {
		d.toHost += n
	}
}

func (d *datagramEnd) Ended(evicted bool) {
	d.table.mu.Lock()
	defer d.table.mu.Unlock()
	d.ended++
	d.evicted = evicted
}

// A datagramTable is Sessions under test, with its Handler.
type datagramTable struct {
	*Sessions

	mu      sync.Mutex
	opened  []*datagramEnd
	replies []string // "client local: bytes"
	refused []UDPKey
	openErr error
	reply   error // what Reply returns
	pause   pause
}

func (h *datagramTable) Open(k UDPKey) (UDPFlow, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.openErr != nil {
		return nil, h.openErr
	}
	d := &datagramEnd{key: k, table: h, closing: make(chan struct{}), say: make(chan saying)}
	h.opened = append(h.opened, d)
	return d, nil
}

func (h *datagramTable) Reply(k UDPKey, datagrams []Datagram) (bytes int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reply != nil {
		return 0, h.reply
	}
	for _, d := range datagrams {
		h.replies = append(h.replies, fmt.Sprintf("%s %s: %s%s", k.Client, k.Local, d[0], d[1]))
		bytes += len(d[0]) + len(d[1])
	}
	return bytes, nil
}

func (h *datagramTable) Refused(k UDPKey) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refused = append(h.refused, k)
}

// bubble runs test with a table in a bubble, and asserts at its end that each
// flow was closed and told so once.
func bubble(t *testing.T, idle time.Duration, max int, test func(t *testing.T, h *datagramTable)) {
	synctest.Test(t, func(t *testing.T) {
		h := &datagramTable{}
		h.Sessions = NewSessions(h, idle, max)
		test(t, h)
		h.Close() // synctest fails on a goroutine that is left
		h.Close()
		assert.Zero(t, h.Len())
		for _, d := range h.opened {
			assert.Equal(t, 1, d.ended)
			assert.GreaterOrEqual(t, d.closed, 1)
		}
		assert.ErrorIs(t, refusal(h, key(1)), net.ErrClosed)
	})
}

var local = netip.MustParseAddr("127.0.0.1")

// key is the i-th client's.
func key(i int) UDPKey {
	return UDPKey{Socket: &local, Client: netip.AddrPortFrom(local, uint16(i)), Local: local}
}

func mustDeliver(tb testing.TB, h *datagramTable, k UDPKey, b string) {
	tb.Helper()
	n, err := h.Deliver(k, [][]byte{[]byte(b)})
	require.NoError(tb, err)
	require.Equal(tb, 1, n)
}

// refusal is why a datagram is not taken.
func refusal(h *datagramTable, k UDPKey) error {
	_, err := h.Deliver(k, [][]byte{[]byte("lost")})
	return err
}

// One flow for each client, socket and local address; replies go to that client
// only, from the address it sent to (C-20, FB-037, FB-038).
func TestFB037FB038ReplyToItsClient(t *testing.T) {
	bubble(t, time.Minute, 10, func(t *testing.T, h *datagramTable) {
		a, b := key(1), key(2)
		c := a
		c.Local = netip.MustParseAddr("127.0.0.2")
		d := a
		d.Socket = new(int)
		for i, k := range []UDPKey{a, b, c, d, a} {
			mustDeliver(t, h, k, fmt.Sprint(i))
		}
		require.Len(t, h.opened, 4)
		assert.Equal(t, []string{"0", "4"}, h.opened[0].wrote)
		for _, o := range h.opened {
			o.say <- says("ping")
		}
		synctest.Wait()
		assert.ElementsMatch(t, []string{
			"127.0.0.1:1 127.0.0.1: ping", "127.0.0.1:2 127.0.0.1: ping", "127.0.0.1:1 127.0.0.2: ping", "127.0.0.1:1 127.0.0.1: ping",
		}, h.replies)
		assert.Equal(t, 2, h.opened[0].toGuest)
		assert.Equal(t, 4, h.opened[0].toHost)
	})
}

// Expiry removes the endpoint, and the next datagram makes a new flow; traffic
// either way puts it off (C-22).
func TestFB033Idle(t *testing.T) {
	const idle = 90 * time.Second
	bubble(t, idle, 10, func(t *testing.T, h *datagramTable) {
		mustDeliver(t, h, key(1), "a")
		time.Sleep(idle - time.Second)
		mustDeliver(t, h, key(1), "b")
		time.Sleep(idle - time.Second)
		h.opened[0].say <- says("")
		time.Sleep(idle - time.Second)
		mustDeliver(t, h, key(1), "c")
		require.Len(t, h.opened, 1, "refreshed both ways")

		time.Sleep(idle * 9 / 8)
		synctest.Wait()
		assert.Zero(t, h.Len())
		assert.Equal(t, 1, h.opened[0].closed)
		assert.False(t, h.opened[0].evicted)
		mustDeliver(t, h, key(1), "d")
		require.Len(t, h.opened, 2)
		assert.Equal(t, []string{"d"}, h.opened[1].wrote)
	})
}

// No flow outlives its idleness by more than an eighth, whatever the others do.
func TestFB034IdleOfEach(t *testing.T) {
	const idle = 80 * time.Second
	bubble(t, idle, 1000, func(t *testing.T, h *datagramTable) {
		mustDeliver(t, h, key(1), "busy")
		for i := range 50 {
			mustDeliver(t, h, key(2+i), "once")
		}
		for range 9 {
			time.Sleep(10 * time.Second)
			h.opened[0].say <- says("tick")
		}
		synctest.Wait()
		assert.Equal(t, 1, h.Len())
	})
}

// A full table makes room by the flow that was idle for longest (C-22, FB-031).
func TestFB031EvictsTheIdlest(t *testing.T) {
	bubble(t, time.Hour, 3, func(t *testing.T, h *datagramTable) {
		for i := range 3 {
			mustDeliver(t, h, key(i), "x")
			time.Sleep(time.Second)
		}
		mustDeliver(t, h, key(0), "again")
		time.Sleep(time.Second)
		h.opened[1].say <- says("")
		synctest.Wait()
		mustDeliver(t, h, key(3), "new")
		assert.Equal(t, 3, h.Len())
		for i, d := range h.opened {
			assert.Equal(t, i == 2, d.evicted, i)
		}
		for i := range 20_000 {
			mustDeliver(t, h, key(100+i), "flood")
		}
		assert.Equal(t, 3, h.Len())
	})
}

// A client that is gone ends its flow at once; nothing is tried again.
func TestFB036ClientGone(t *testing.T) {
	bubble(t, time.Hour, 3, func(t *testing.T, h *datagramTable) {
		mustDeliver(t, h, key(1), "x")
		h.reply = syscall.ECONNREFUSED
		h.opened[0].say <- says("to nobody")
		synctest.Wait()
		assert.Zero(t, h.Len())
		assert.Equal(t, 1, h.opened[0].closed)
	})
}

// An error of one datagram, in either direction, is the end of that datagram
// only.
func TestFB041OneBadDatagram(t *testing.T) {
	bubble(t, time.Hour, 3, func(t *testing.T, h *datagramTable) {
		mustDeliver(t, h, key(1), "x")
		d := h.opened[0]
		for _, err := range []error{syscall.EPERM, syscall.ENETUNREACH, syscall.ENOBUFS, errors.New("would block")} {
			h.reply = err
			d.say <- says("lost")
			d.say <- saying{err: err}
			synctest.Wait()
			d.failNext = err
			require.ErrorIs(t, refusal(h, key(1)), err)
		}
		h.reply = nil
		d.say <- says("fine")
		synctest.Wait()
		mustDeliver(t, h, key(1), "")
		require.Len(t, h.opened, 1)
		assert.Equal(t, []string{"127.0.0.1:1 127.0.0.1: fine"}, h.replies)
		assert.Equal(t, []string{"x", ""}, d.wrote)
	})
}

// The guest's port-unreachable is passed on and ends the flow; the next datagram
// asks again (C-23).
func TestFB049Refused(t *testing.T) {
	bubble(t, time.Hour, 3, func(t *testing.T, h *datagramTable) {
		for i := range 3 {
			mustDeliver(t, h, key(1), "x")
			h.opened[i].say <- saying{err: syscall.ECONNREFUSED}
			synctest.Wait()
			assert.Zero(t, h.Len())
		}
		assert.Len(t, h.refused, 3)
	})
}

// What leads to a publish that goes is dropped, and to no other (FB-047).
func TestFB047CloseWhere(t *testing.T) {
	bubble(t, time.Hour, 10, func(t *testing.T, h *datagramTable) {
		other := key(1)
		other.Socket = new(int)
		mustDeliver(t, h, key(1), "x")
		mustDeliver(t, h, other, "x")
		h.CloseWhere(func(k UDPKey) bool { return k.Socket == other.Socket })
		assert.Equal(t, 1, h.Len())
		mustDeliver(t, h, other, "y")
		require.Len(t, h.opened, 3)
		assert.Equal(t, []string{"y"}, h.opened[2].wrote)
	})
}

// A datagram whose flow ends under its hands goes out on a new one.
func TestEndpointThatBroke(t *testing.T) {
	bubble(t, time.Hour, 10, func(t *testing.T, h *datagramTable) {
		mustDeliver(t, h, key(1), "x")
		h.mu.Lock()
		h.opened[0].closed++ // not that anybody noticed
		h.mu.Unlock()
		mustDeliver(t, h, key(1), "y")
		require.Len(t, h.opened, 2)
		assert.Equal(t, []string{"y"}, h.opened[1].wrote)
		close(h.opened[0].closing)
	})
}

func TestOpenFails(t *testing.T) {
	bubble(t, time.Hour, 10, func(t *testing.T, h *datagramTable) {
		h.openErr = syscall.EADDRNOTAVAIL
		assert.ErrorIs(t, refusal(h, key(1)), syscall.EADDRNOTAVAIL)
		assert.Zero(t, h.Len())
		h.openErr = nil
		mustDeliver(t, h, key(1), "x")
	})
}

// Everything at once, for the race detector: flows that end under datagrams
// both ways (FB-052).
func TestFB052EndsUnderTraffic(t *testing.T) {
	h := &datagramTable{}
	h.Sessions = NewSessions(h, time.Millisecond, 50)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 2000 {
				_, _ = h.Deliver(key(w*20+i%60), [][]byte{[]byte("x")})
				if i%100 == 0 {
					h.CloseWhere(func(k UDPKey) bool { return k.Client.Port()%2 == 0 })
				}
			}
		})
	}
	wg.Go(func() {
		for i := range 2000 {
			h.mu.Lock()
			n := len(h.opened)
			h.mu.Unlock()
			if n == 0 {
				continue
			}
			h.mu.Lock()
			d := h.opened[n-1-i%min(n, 50)]
			h.mu.Unlock()
			select {
			case d.say <- says("y"):
			case <-d.closing:
			}
		}
	})
	wg.Wait()
	h.Close()
	assert.Zero(t, h.Len())
	for _, d := range h.opened {
		require.Equal(t, 1, d.ended)
	}
}

// A quietEnd takes everything and keeps nothing.
type quietEnd struct{ deliver func([]Datagram, error) }

func (e *quietEnd) Write(datagrams [][]byte) (int, error)   { return len(datagrams), nil }
func (e *quietEnd) Receive(deliver func([]Datagram, error)) { e.deliver = deliver }
func (e *quietEnd) Resumed() time.Time                      { return time.Time{} }
func (e *quietEnd) LocalAddr() string                       { return "" }
func (e *quietEnd) Close() error                            { return nil }
func (e *quietEnd) Passed(bool, int)                        {}
func (e *quietEnd) Ended(bool)                              {}
func (e *quietEnd) Open(UDPKey) (UDPFlow, error)            { return e, nil }
func (e *quietEnd) Reply(_ UDPKey, datagrams []Datagram) (bytes int, err error) {
	return len(datagrams), nil
}
func (e *quietEnd) Refused(UDPKey) {}

// A datagram of a flow that is there costs no allocation, either way.
func TestDatagramsDoNotAllocate(t *testing.T) {
	end := &quietEnd{}
	s := NewSessions(end, time.Hour, 10)
	defer s.Close()
	toGuest, toHost := [][]byte{make([]byte, 64)}, []Datagram{{make([]byte, 64)}}
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if n, err := s.Deliver(key(1), toGuest); n != 1 || err != nil {
			panic(err)
		}
		end.deliver(toHost, nil)
	}))
	assert.Equal(t, 1, s.Len())
}
