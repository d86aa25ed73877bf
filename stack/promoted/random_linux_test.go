package promoted

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/culvertnet/culvert/stack/relay"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestRandom has a guest, a client and a link do what they may, in any order: both streams
// come whole.
func TestRandom(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { testRandom(t, seed) })
	}
}

func testRandom(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	s := newScript(t)
	s.connect(100)
	s.copy()
	require.NoError(t, unix.SetsockoptInt(s.ours.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 8<<10))
	require.NoError(t, s.client.SetReadBuffer(8<<10))
	fill := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32() | 1)
		}
		return b
	}
	toHost, toGuest := fill(50_000+r.IntN(60_000)), fill(50_000+r.IntN(60_000))
	var atClient, atGuest []byte
	written := 0
	sent, una, edge := 0, 0, 65535 // of toHost
	stamp := uint32(200)
	buf := make([]byte, 64<<10)
	finGot := false
	closedClient := false
	look := func() {
		for _, p := range s.take() {
			if p.flags&flagACK != 0 {
				a := int(int32(p.ack-s.iss)) - 1
				if a > una {
					una = a
				}
				require.LessOrEqual(t, a, len(toHost)+1)
				edge = max(edge, a+int(p.window))
			}
			if r.IntN(20) == 0 {
				continue // lost
			}
			at := int(int32(p.seq-s.irs)) - 1
			if at <= len(atGuest) && at+len(p.payload) > len(atGuest) {
				atGuest = append(atGuest, p.payload[len(atGuest)-at:]...)
			}
			if p.flags&flagFIN != 0 && at+len(p.payload) == len(atGuest) {
				finGot = true
			}
			require.Zero(t, p.flags&flagRST)
		}
	}
	ackNo := func() uint32 {
		n := uint32(1 + len(atGuest))
		if finGot {
			n++
		}
		return n
	}
	clientEnded, guestEnded := false, false
	second := s.table.NewBatch()
	for step := 0; ; step++ {
		require.Less(t, step, 400_000, "stuck: client %d/%d guest %d/%d una %d conn una %d nxt %d max %d window %d awaiting %v queued %v", len(atClient), len(toHost), len(atGuest), len(toGuest), una,
			s.conn.una-s.irs, s.conn.nxt-s.irs, s.conn.max-s.irs, s.conn.window, s.conn.awaiting, s.conn.queued)
		switch r.IntN(9) {
		case 0, 1: // guest's batch
			k := 1 + r.IntN(12)
			var frames [][]byte
			for range k {
				stamp += uint32(r.IntN(2))
				seg := Segment{ack: s.irs + ackNo(), flags: flagACK, scale: -1, stamped: true, stamp: stamp, echo: s.table.now(), window: uint16(r.IntN(4) * 20_000)}
				at := sent
				switch r.IntN(6) {
				case 0:
					at = min(una, len(toHost))
				case 1:
					at = min(len(toHost), max(0, una-r.IntN(3000)))
				case 2:
					at = min(len(toHost), sent+r.IntN(3000))
				}
				n := max(0, min(r.IntN(4000), len(toHost)-at))
				if r.IntN(4) == 0 {
					n = 0
				}
				if r.IntN(20) != 0 {
					n = max(0, min(n, edge-at))
				}
				b := bytes.Clone(toHost[at : at+n])
				if at <= sent {
					sent = max(sent, at+n)
				}
				cut := r.IntN(n + 1)
				seg.seq, seg.first, seg.rest = s.iss+1+uint32(at), b[:cut], b[cut:]
				if at+n == len(toHost) && r.IntN(2) == 0 {
					seg.flags |= flagFIN
				}
				frames = append(frames, b)
				if r.IntN(8) == 0 {
					second.Take(s.conn, &seg)
					second.End()
					clear(b)
				} else {
					s.batch.Take(s.conn, &seg)
				}
				if r.IntN(10) == 0 {
					s.ours.ready(relay.Ready(1 + r.IntN(3)))
				}
			}
			s.batch.End()
			for _, f := range frames {
				clear(f)
			}
			if r.IntN(5) == 0 {
				sent = una // goes back
				sent = min(sent, len(toHost))
			}
		case 2:
			s.ours.ready(relay.ReadyRead)
		case 3:
			s.ours.ready(relay.ReadyWrite)
		case 4: // client writes
			if written < len(toGuest) {
				require.NoError(t, s.client.SetWriteDeadline(time.Now().Add(100*time.Microsecond)))
				n, _ := s.client.Write(toGuest[written:min(len(toGuest), written+r.IntN(30_000))])
				written += n
			} else if !closedClient {
				closedClient = true
				require.NoError(t, s.client.CloseWrite())
			} else {
				s.ours.ready(relay.ReadyRead | relay.ReadyEnd)
			}
		case 5: // client reads
			require.NoError(t, s.client.SetReadDeadline(time.Now().Add(100*time.Microsecond)))
			n, _ := s.client.Read(buf[:r.IntN(len(buf))])
			atClient = append(atClient, buf[:n]...)
		case 6:
			s.mu.Lock()
			s.noRoom = r.IntN(3) == 0
			w := s.waiter
			if !s.noRoom {
				s.waiter = nil
			}
			room := !s.noRoom
			s.mu.Unlock()
			if room && w != nil {
				w.Room()
			}
		case 7:
			s.pass(time.Duration(r.IntN(1500)) * time.Millisecond)
		case 8:
			s.table.queue.round()
		}
		look()
		select {
		case err := <-s.ended[relay.HalfClient]:
			require.NoError(t, err)
			clientEnded = true
			require.NoError(t, s.conn.CloseWrite())
		case err := <-s.ended[relay.HalfGuest]:
			require.NoError(t, err)
			guestEnded = true
		default:
		}
		if len(atClient) > len(toHost) || !bytes.Equal(atClient, toHost[:len(atClient)]) {
			require.FailNow(t, "the client's bytes differ")
		}
		if len(atGuest) > len(toGuest) || !bytes.Equal(atGuest, toGuest[:len(atGuest)]) {
			require.FailNow(t, "the guest's bytes differ")
		}
		if clientEnded && guestEnded && finGot && len(atClient) == len(toHost) && len(atGuest) == len(toGuest) {
			break
		}
	}
	assert.NoError(t, s.conn.Close())
}
