package netstack

import (
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A transfer goes on when flows that come make the share of each smaller than what
// its buffer has grown to (C-17).
func TestCopyOverShrunkenShare(t *testing.T) {
	ours, theirs := memory.Pair(offloads["csum+tso"])
	budget := NewBudget(8<<20, 1<<30)
	host, err := New(ours, Options{Node: guestAddr.Addr(), Gateway: hostAddr, MTU: 1500, Seed: "host", Budget: budget})
	require.NoError(t, err)
	defer host.Close()
	guest, err := New(theirs, Options{Node: hostAddr.Addr(), Gateway: guestAddr, MTU: 1500, Seed: "guest"})
	require.NoError(t, err)
	defer guest.Close()
	_, err = host.Probe(t.Context())
	require.NoError(t, err)
	const total = 128 << 20
	got := make(chan [32]byte, 1)
	serve(t, guest, 7, func(c net.Conn) {
		h := sha256.New()
		buf := make([]byte, 64<<10)
		for n, sum := 0, 0; sum < total; sum += n {
			var err error
			if n, err = c.Read(buf); err != nil {
				break
			}
			h.Write(buf[:n])
			if sum>>23 != (sum+n)>>23 {
				time.Sleep(20 * time.Millisecond) // the buffers fill
			}
		}
		got <- [32]byte(h.Sum(nil))
	})
	conn := mustDial(t, host, 7)
	client, front := clientPair(t)
	copies(conn, front)
	want := make(chan [32]byte, 1)
	go func() {
		h := sha256.New()
		random := rand.NewChaCha8([32]byte{1})
		_, err := io.CopyN(io.MultiWriter(client, h), random, total)
		assert.NoError(t, err)
		want <- [32]byte(h.Sum(nil))
	}()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		for n := 1; ; n = n%14 + 1 {
			select {
			case <-stop:
				return
			case <-time.After(30 * time.Millisecond):
			}
			budget.add(1 << n)
			time.Sleep(10 * time.Millisecond)
			budget.add(-1 << n)
		}
	}()
	select {
	case sum := <-got:
		assert.Equal(t, <-want, sum)
	case <-time.After(3 * copyPatience):
		k := conn.copy.Load()
		t.Fatalf("stalled: toGuest state %d waits %d; sndbuf %d", k.toGuest.state.Load(), k.toGuest.waits.Load(), conn.ep.SocketOptions().GetSendBufferSize())
	}
}
