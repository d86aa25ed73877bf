package netstack

import (
	"fmt"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

const (
	// firstBuffer is a flow's buffer before its traffic has shown that it needs
	// more: gVisor's default of 1 MiB, of which half is window, fills a local
	// link of 10 Gbit/s and 400 µs.
	firstBuffer = 1 << 20

	// firstSend is likewise, towards the guest: a flow of requests needs no more,
	// and one that does grows it with its window (growSend), within the share of
	// those that are there by then.
	firstSend = 256 << 10

	// minBuffer is the least share of the total budget a flow gets: four
	// segments of 1460 bytes each way still move data.
	minBuffer = 8 << 10

	// timeWait is how long a closed flow's port pair is kept when our side
	// closed first. It guards against segments that the network delivers late;
	// the link is one hop without a queue worth the name. At 20000 flows/s
	// (C-19) 1 s keeps 20000 of the 64511 ports of widePorts busy.
	timeWait = time.Second

	// widePorts begins the ports we dial from. gVisor starts at 16000; nothing
	// else on the gateway's address uses ports, so all unprivileged ones serve.
	firstPort, lastPort = 1024, 65535

	// keepAlive* end a half-closed flow whose peer is gone within 90 s (C-14):
	// 15 s + 5 × 15 s.
	keepAliveIdle     = 15 * time.Second
	keepAliveInterval = 15 * time.Second
	keepAliveCount    = 5
)

// tuneTCP sets every TCP option in which we differ from gVisor's defaults, each
// with its reason.
func tuneTCP(s *stack.Stack, share shares) error {
	sack := tcpip.TCPSACKEnabled(true) // a lost segment must not resend the window behind it

	// RACK off: with it on, several streams over a link that loses nothing
	// showed spurious recoveries and small frames. Losses are still found by
	// SACK and by the retransmission timer.
	recovery := tcpip.TCPRecovery(0)

	delay := tcpip.TCPDelayEnabled(false) // no Nagle: small writes go at once (C-18)

	moderate := tcpip.TCPModerateReceiveBufferOption(true) // buffers grow with the flow, up to its share

	// Reno, not CUBIC: nothing is lost on this link, so what matters is the
	// cost per acknowledgement; CUBIC measured a quarter slower.
	congestion := tcpip.CongestionControlOption("reno")

	wait := tcpip.TCPTimeWaitTimeoutOption(timeWait)
	reuse := tcpip.TCPTimeWaitReuseGlobal // a new SYN has a newer timestamp (RFC 6191)

	// The least retransmission time-out is what RFC 6298 (2.4) says and gVisor and
	// Linux shorten to 200 ms. This link loses nothing, and a guest that is busy
	// answers late: with 200 ms, 64 flows sent 3000 segments a second twice.
	rto := tcpip.TCPMinRTOOption(time.Second)

	for _, o := range []tcpip.SettableTransportProtocolOption{&sack, &recovery, &delay, &moderate, &congestion, &wait, &reuse, &rto} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fmt.Errorf("set %T: %w", o, wrapError(err))
		}
	}
	if err := s.SetPortRange(firstPort, lastPort); err != nil {
		return fmt.Errorf("set port range: %w", wrapError(err))
	}
	return setBuffers(s, share)
}

// holdSend takes the growth of the send buffer from gVisor. It would shrink a
// buffer that is larger than a share that has become less: a writer that waits is
// then woken only by one acknowledgement that leads from half of the old size to
// half of the new, and what a write has taken beyond the new size is lost.
func (c *Conn) holdSend() {
	o := c.ep.SocketOptions()
	o.SetSendBufferSize(o.GetSendBufferSize(), true)
}

// growSend has the send buffer grow with the congestion window, to twice its
// bytes as gVisor would, within the share. It is for when a write found no room.
func (c *Conn) growSend() {
	var info tcpip.TCPInfoOption
	if c.ep.GetSockOpt(&info) != nil {
		return // as it is
	}
	window := int64(info.SndCwnd) * int64(c.stack.opts.MTU-header.IPv4MinimumSize-header.TCPMinimumSize)
	size := min(2*window, int64(c.stack.net.TCPSendBufferLimits().Max))
	if o := c.ep.SocketOptions(); size > o.GetSendBufferSize() {
		o.SetSendBufferSize(size, false)
	}
}

// setBuffers makes share the most that one direction of one flow may buffer.
func setBuffers(s *stack.Stack, share shares) error {
	snd := tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: min(firstSend, share.send), Max: share.send}
	rcv := tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: min(firstBuffer, share.receive), Max: share.receive}
	if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, &snd); err != nil {
		return fmt.Errorf("set send buffer range: %w", wrapError(err))
	}
	if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, &rcv); err != nil {
		return fmt.Errorf("set receive buffer range: %w", wrapError(err))
	}
	return nil
}
