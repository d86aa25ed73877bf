//go:build linux

package stack

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/netstack"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A stormLink is a VM's stack whose guest is another one, joined in memory.
type stormLink struct{ host, guest *netstack.Stack }

func newStormLink(t *testing.T, pairs int) *stormLink {
	t.Helper()
	const offload = virtio.OffloadCSum | virtio.OffloadTSO4
	ours, theirs := memory.Pair(memory.Options{ToGuest: offload, FromGuest: offload, Depth: 64, QueuePairs: pairs})
	own := netip.MustParsePrefix("198.18.0.1/24")
	end := func(att datapath.Attachment, seed string, own netip.Prefix, peer netip.Addr) *netstack.Stack {
		s, err := netstack.New(att, netstack.Options{Node: peer, Gateway: own, MTU: 1500, Seed: seed})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, s.Close()) })
		return s
	}
	l := &stormLink{host: end(ours, "host", own, node), guest: end(theirs, "guest", netip.PrefixFrom(node, 24), own.Addr())}
	for _, s := range []*netstack.Stack{l.host, l.guest} {
		_, err := s.Probe(t.Context())
		require.NoError(t, err)
	}
	return l
}

// serve runs handler for each of the guest's connections at port.
func (l *stormLink) serve(t *testing.T, port uint16, handler func(stormConn)) {
	t.Helper()
	ln, err := l.guest.ListenTCP(port)
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go handler(c.(stormConn))
		}
	}()
}

// A stormConn is either end of a flow.
type stormConn interface {
	net.Conn
	CloseWrite() error
}

// A stormPlan is what the two ends of a flow do, told in the flow's first bytes.
type stormPlan struct {
	Seed             uint64
	ToGuest, ToHost  uint32 // bytes
	Pauses           bool   // ends dawdle
	GuestEndsFirst   bool   // its stream ends before it reads to the client's end
	ClientEndsFirst  bool   // its stream ends before it reads
	GuestLeavesEarly bool   // with bytes unread: a reset, unless all had come
}

const stormHeader = 20

func (p stormPlan) header() []byte {
	b := make([]byte, stormHeader)
	binary.BigEndian.PutUint64(b, p.Seed)
	binary.BigEndian.PutUint32(b[8:], p.ToGuest)
	binary.BigEndian.PutUint32(b[12:], p.ToHost)
	for i, set := range []bool{p.Pauses, p.GuestEndsFirst, p.ClientEndsFirst, p.GuestLeavesEarly} {
		if set {
			b[16+i] = 1
		}
	}
	return b
}

func parseStorm(b []byte) stormPlan {
	return stormPlan{
		Seed: binary.BigEndian.Uint64(b), ToGuest: binary.BigEndian.Uint32(b[8:]), ToHost: binary.BigEndian.Uint32(b[12:]),
		Pauses: b[16] != 0, GuestEndsFirst: b[17] != 0, ClientEndsFirst: b[18] != 0, GuestLeavesEarly: b[19] != 0,
	}
}

// stormBytes is what passes one way.
func stormBytes(seed uint64, n uint32) io.Reader {
	var key [32]byte
	binary.BigEndian.PutUint64(key[:], seed)
	return io.LimitReader(rand.NewChaCha8(key), int64(n))
}

// send writes what the plan says in pieces of any size.
func (p stormPlan) send(c net.Conn, seed uint64, n uint32) error {
	random := rand.New(rand.NewPCG(seed, 1))
	from, buf := stormBytes(seed, n), make([]byte, 200<<10)
	for {
		piece := 1 + random.IntN(6000)
		if random.IntN(4) == 0 {
			piece = 1 + random.IntN(len(buf))
		}
		k, err := io.ReadFull(from, buf[:piece])
		if k == 0 {
			return nil
		}
		if _, err := c.Write(buf[:k]); err != nil {
			return err
		}
		if err != nil {
			return nil
		}
		if p.Pauses && random.IntN(3) == 0 {
			time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond)
		}
	}
}

// errStorm says that a flow has brought something else than what was sent.
type errStorm string

func (e errStorm) Error() string { return string(e) }

const errEarly = errStorm("an end of stream before all had come (C-13)")

// receive reads to the end of the stream and compares.
func (p stormPlan) receive(c net.Conn, seed uint64, n uint32) error {
	random := rand.New(rand.NewPCG(seed, 2))
	want, buf, expect := stormBytes(seed, n), make([]byte, 64<<10), make([]byte, 64<<10)
	for got := uint32(0); ; {
		k, err := c.Read(buf[:1+random.IntN(len(buf))])
		if _, short := io.ReadFull(want, expect[:k]); short != nil || !bytes.Equal(buf[:k], expect[:k]) {
			return errStorm(fmt.Sprintf("other bytes than those sent, between %d and %d of %d", got, got+uint32(k), n))
		}
		got += uint32(k)
		switch {
		case err == io.EOF && got < n:
			return errEarly
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
		if p.Pauses && random.IntN(3) == 0 {
			time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond)
		}
	}
}

// A storm counts what went wrong at its ends.
type storm struct {
	wrong, whole atomic.Int64
	// cut says that flows are reset. The guest's end then cannot tell: gVisor tells
	// of a reset once, to the writer or to the reader.
	cut bool
}

func (s *storm) tell(t *testing.T, who string, err error) {
	if e, ok := err.(errStorm); ok {
		s.wrong.Add(1)
		t.Errorf("%s: %v", who, e)
	}
}

func (s *storm) tellGuest(t *testing.T, err error) {
	if !s.cut {
		s.tell(t, "guest", err)
	}
}

// guest is the server's end.
func (s *storm) guest(t *testing.T, banner string) func(stormConn) {
	return func(c stormConn) {
		defer c.Close()
		if _, err := io.WriteString(c, banner); err != nil {
			return
		}
		head := make([]byte, stormHeader)
		if _, err := io.ReadFull(c, head); err != nil {
			return
		}
		p := parseStorm(head)
		switch {
		case p.GuestLeavesEarly:
			_ = p.send(c, p.Seed+1, p.ToHost/2)
			return
		case p.GuestEndsFirst:
			if p.send(c, p.Seed+1, p.ToHost) == nil {
				_ = c.CloseWrite()
			}
			s.tellGuest(t, p.receive(c, p.Seed, p.ToGuest))
		default:
			var wg sync.WaitGroup
			wg.Go(func() { s.tellGuest(t, p.receive(c, p.Seed, p.ToGuest)) })
			if p.send(c, p.Seed+1, p.ToHost) == nil {
				_ = c.CloseWrite()
			}
			wg.Wait()
		}
	}
}

// client is one flow from its client's end. It returns an error when that end has
// seen a reset.
func (s *storm) client(t *testing.T, at netip.AddrPort, banner string, p stormPlan, buffer int) error {
	nc, err := net.DialTimeout("tcp", at.String(), patience)
	if err != nil {
		return err
	}
	c := nc.(*net.TCPConn)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(3 * patience))
	if buffer > 0 {
		_ = c.SetReadBuffer(buffer)
		_ = c.SetWriteBuffer(buffer)
	}
	if _, err := io.ReadFull(c, make([]byte, len(banner))); err != nil {
		return err
	}
	if _, err := c.Write(p.header()); err != nil {
		return err
	}
	toHost := p.ToHost
	if p.GuestLeavesEarly {
		toHost /= 2
	}
	var wg sync.WaitGroup
	var sent error
	send := func() {
		if sent = p.send(c, p.Seed, p.ToGuest); sent == nil {
			_ = c.CloseWrite()
		}
	}
	if p.ClientEndsFirst {
		send()
	} else {
		wg.Go(send)
	}
	got := p.receive(c, p.Seed+1, toHost)
	wg.Wait()
	if sent != nil && got == errEarly {
		return sent // a socket tells of a reset once, here to the writer
	}
	s.tell(t, "client", got)
	if got != nil {
		return got
	}
	if sent == nil {
		s.whole.Add(1)
	}
	return sent
}

// stormPlanOf draws a plan. One in which both ends send first and read then would
// wait for room for ever.
func stormPlanOf(i int) stormPlan {
	r := rand.New(rand.NewPCG(uint64(i), 3))
	size := func() uint32 {
		switch r.IntN(4) {
		case 0:
			return uint32(r.IntN(3))
		case 1:
			return uint32(r.IntN(3000))
		case 2:
			return uint32(r.IntN(100_000))
		}
		return uint32(r.IntN(4 << 20))
	}
	p := stormPlan{Seed: r.Uint64(), ToGuest: size(), ToHost: size(), Pauses: r.IntN(2) == 0}
	switch r.IntN(5) {
	case 0:
		p.GuestEndsFirst = true
	case 1:
		p.ClientEndsFirst = true
	}
	return p
}

// Flows of every size, pace and order of ends bring their bytes whole, both ways,
// and leave nothing.
func TestStormOfTransfers(t *testing.T) {
	for _, pairs := range []int{1, 2} {
		t.Run(fmt.Sprint(pairs, " queue pairs"), func(t *testing.T) {
			l, f, s := newStormLink(t, pairs), mustForwarder(t, Options{}), &storm{}
			const banner = "220 what talks first\r\n"
			l.serve(t, 80, s.guest(t, ""))
			l.serve(t, 81, s.guest(t, banner))
			f.AttachVM("default", VM{Guest: l.host, Node: node})
			at := append(mustPublish(t, f, "x", "127.0.0.1:0:80"), mustPublish(t, f, "y", "127.0.0.1:0:81")...)
			const flows, lanes = 60, 12
			var next atomic.Int64
			var wg sync.WaitGroup
			for range lanes {
				wg.Go(func() {
					for i := next.Add(1); i <= flows; i = next.Add(1) {
						banner := []string{"", banner}[i%2]
						buffer := []int{0, 4096}[i/2%2]
						p := stormPlanOf(int(i))
						if buffer > 0 { // loopback's segments are larger: each waits for a timer
							p.ToHost %= 100_000
						}
						assert.NoError(t, s.client(t, at[i%2], banner, p, buffer), "flow %d: %+v", i, p)
					}
				})
			}
			wg.Wait()
			assert.EqualValues(t, flows, s.whole.Load())
			eventually(t, "the flows have ended", func() bool { return len(f.Flows()) == 0 && l.host.Stats().Flows == 0 })
			for _, v := range f.Rows() {
				assert.Zero(t, v.Flows.Active)
				assert.Empty(t, v.Flows.Refused)
			}
			assert.Zero(t, f.flows.dials.Load())
			assert.Zero(t, f.flows.tcp.Load())
		})
	}
}

// A link that ends amid transfers, a detach, or a shutdown ends every flow, and no
// end of it takes a part for the whole (C-13).
func TestStormThatIsCutOff(t *testing.T) {
	for name, cut := range map[string]func(*Forwarder, *stormLink){
		"stack closed":  func(_ *Forwarder, l *stormLink) { _ = l.host.Close() },
		"guest gone":    func(_ *Forwarder, l *stormLink) { _ = l.guest.Close() },
		"detached":      func(f *Forwarder, _ *stormLink) { f.DetachVM("default") },
		"shut down":     func(f *Forwarder, _ *stormLink) { f.Shutdown(ctx) },
		"then detached": func(f *Forwarder, l *stormLink) { _ = l.host.Close(); f.DetachVM("default") },
	} {
		t.Run(name, func(t *testing.T) {
			rounds := 4
			if testing.Short() {
				rounds = 2
			}
			for round := range rounds {
				l := newStormLink(t, 1)
				f, s := mustForwarder(t, Options{Timeouts: Timeouts{Drain: time.Millisecond}}), &storm{cut: true}
				l.serve(t, 80, s.guest(t, ""))
				f.AttachVM("default", VM{Guest: l.host, Node: node})
				at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
				var wg sync.WaitGroup
				var stop atomic.Bool
				for lane := range 8 {
					wg.Go(func() {
						for i := 0; !stop.Load(); i++ {
							p := stormPlanOf(round*1000 + lane*100 + i)
							p.GuestLeavesEarly = i%4 == 3
							_ = s.client(t, at, "", p, []int{0, 4096}[i%2])
						}
					})
				}
				time.Sleep(time.Duration(10+20*round) * time.Millisecond)
				cut(f, l)
				stop.Store(true)
				f.DetachVM("default")
				require.NoError(t, l.host.Close())
				wg.Wait()
				eventually(t, "the flows have ended", func() bool { return f.flows.tcp.Load() == 0 && f.flows.dials.Load() == 0 })
				assert.Zero(t, s.wrong.Load())
				eventually(t, "the endpoints are given back", func() bool { return l.host.Stats().Flows == 0 })
			}
		})
	}
}

// A VM that is paused amid transfers loses nothing (C-28).
func TestStormOverAPause(t *testing.T) {
	l, f, s := newStormLink(t, 1), mustForwarder(t, Options{}), &storm{}
	l.serve(t, 80, s.guest(t, ""))
	f.AttachVM("default", VM{Guest: l.host, Node: node})
	at := mustPublish(t, f, "x", "127.0.0.1:0:80")[0]
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() { assert.NoError(t, s.client(t, at, "", stormPlanOf(i+5000), 0)) })
	}
	for i := range 40 {
		l.host.SetPaused(i%2 == 0)
		time.Sleep(5 * time.Millisecond)
	}
	wg.Wait()
}
