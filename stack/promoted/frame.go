package promoted

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

const (
	etherHeader = 14
	ipHeader    = 20 // without options
	ipAt        = etherHeader
	tcpAt       = etherHeader + ipHeader
	// stampsSize is the timestamps option with two NOPs before it (RFC 7323, A).
	stampsSize = 12
	// synSize is a first segment's options: MSS, window scale, timestamps and NOPs
	// (4 + 4 + 12).
	synSize = 20
	// headSize is the longest head: a first segment's.
	headSize = tcpAt + tcpHeader + synSize
	// maxPayload is what one IPv4 packet (65535) holds beside the headers.
	maxPayload = 65535 - ipHeader - tcpHeader - stampsSize
	// tcpChecksumAt is where TCP keeps its checksum (RFC 9293, 3.1).
	tcpChecksumAt = 16
	// ttl is what a packet of ours may still pass behind the node.
	ttl = 64
)

// A head is the headers of a flow's frames, in which lengths, numbers and checksums
// are still to be filled in, and the node's Ethernet address.
type head struct {
	bytes  [headSize]byte
	size   int
	ip     uint32 // the sum of the IPv4 header
	pseudo uint32 // the sum of the pseudo-header, but for the length
	id     uint16 // the next packet's identification
}

// init makes the head of first segments.
func (h *head) init(o *Options, port uint16, remote netip.AddrPort) {
	b := h.bytes[:]
	copy(b[6:], o.MAC[:])
	binary.BigEndian.PutUint16(b[12:], 0x0800)
	src, dst := o.Addr.As4(), remote.Addr().As4()
	ip := b[ipAt:tcpAt]
	// Don't-fragment stays clear: nobody here would hear of a smaller MTU behind the
	// node, which the guest's MSS tells already.
	ip[0], ip[8], ip[9] = 4<<4|ipHeader/4, ttl, 6
	copy(ip[12:], src[:])
	copy(ip[16:], dst[:])
	h.ip = sum(ip)
	h.pseudo = sum(src[:]) + sum(dst[:]) + 6
	tcp := b[tcpAt:]
	binary.BigEndian.PutUint16(tcp[0:], port)
	binary.BigEndian.PutUint16(tcp[2:], remote.Port())
	tcp[12] = (tcpHeader + synSize) / 4 << 4
	opts := tcp[tcpHeader:]
	opts[0], opts[1] = optMSS, 4
	binary.BigEndian.PutUint16(opts[2:], uint16(o.MTU-ipHeader-tcpHeader))
	opts[4], opts[5], opts[6], opts[7] = optNOP, optScale, 3, ownScale
	binary.BigEndian.PutUint32(opts[8:], stampsFirst)
	h.size = headSize
	h.id = uint16(h.pseudo) + port
}

// established makes the head that of all later segments.
func (h *head) established(stamps bool) {
	tcp := h.bytes[tcpAt:]
	h.size = tcpAt + tcpHeader
	if stamps {
		h.size += stampsSize
		binary.BigEndian.PutUint32(tcp[tcpHeader:], stampsFirst)
	}
	tcp[12] = byte((h.size-tcpAt)/4) << 4
}

// A frame is the memory of one frame to the guest but for its payload.
type frame struct {
	frames [1]datapath.Frame
	segs   [2][]byte
	head   [headSize]byte
}

// transmit sends one segment and reports whether the link took it. If not, the flow
// goes on when there is room.
func (c *Conn) transmit(sc *scratch, seq uint32, flags uint8, payload []byte) bool {
	f := &sc.frame
	h := &c.head
	f.head = h.bytes
	b := f.head[:h.size]
	node := c.table.opts.Link.Node()
	copy(b, node[:])
	window := uint16(0xffff)
	if flags&flagSYN == 0 {
		window = c.showWindow()
	}
	tcp := b[tcpAt:]
	binary.BigEndian.PutUint32(tcp[4:], seq)
	if flags&flagACK != 0 {
		binary.BigEndian.PutUint32(tcp[8:], c.rcvNxt)
	}
	tcp[13] = flags
	binary.BigEndian.PutUint16(tcp[14:], window)
	if c.stamps || flags&flagSYN != 0 {
		at := len(tcp) - 8
		binary.BigEndian.PutUint32(tcp[at:], c.table.now())
		binary.BigEndian.PutUint32(tcp[at+4:], c.recent)
	}
	length := len(b) - ipAt + len(payload)
	ip := b[ipAt:tcpAt]
	binary.BigEndian.PutUint16(ip[2:], uint16(length))
	segments := 1
	if len(payload) > c.mss {
		segments = (len(payload) + c.mss - 1) / c.mss
	}
	binary.BigEndian.PutUint16(ip[4:], h.id)
	binary.BigEndian.PutUint16(ip[10:], ^fold(h.ip+uint32(length)+uint32(h.id)))
	binary.BigEndian.PutUint16(tcp[tcpChecksumAt:], fold(h.pseudo+uint32(length-ipHeader)))

	f.segs[0], f.segs[1] = b, payload
	f.frames[0] = datapath.Frame{Segs: f.segs[:], N: len(b) + len(payload)}
	f.frames[0].Hdr = virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: tcpAt, CSumOffset: tcpChecksumAt}
	if segments > 1 {
		f.frames[0].Hdr.GSOType = virtio.GSOTCPv4
		f.frames[0].Hdr.GSOSize = uint16(c.mss)
		f.frames[0].Hdr.HdrLen = uint16(len(b))
	}
	var w Waiter
	if !c.awaiting && flags&flagRST == 0 {
		w = c
	}
	taken := c.table.opts.Link.Send(uint32(c.key), f.frames[:], w)
	f.segs[1] = nil
	if taken == 0 {
		c.awaiting = c.awaiting || w != nil
		return false
	}
	h.id += uint16(segments)
	if flags&flagACK != 0 && flags&flagRST == 0 {
		c.ackSent = c.rcvNxt
		c.ackDue, c.ackNow = false, false
		c.delay.stop()
	}
	return true
}

// sendSYN asks for the connection, again after a while.
func (c *Conn) sendSYN() {
	sc := scratches.Get().(*scratch)
	defer scratches.Put(sc)
	c.transmit(sc, c.una, flagSYN, nil)
}

// sendReset resets the guest's end, once the link has room for it; a guest that remembers
// another flow is told at once or not, for it may ask any number of times.
func (c *Conn) sendReset(seq uint32) {
	sc := scratches.Get().(*scratch)
	defer scratches.Put(sc)
	flags := uint8(flagRST)
	if c.state == open {
		flags |= flagACK
	}
	if !c.transmit(sc, seq, flags, nil) && c.state == open {
		w := &lastWord{table: c.table, flow: uint32(c.key), head: bytes.Clone(sc.frame.segs[0])}
		w.frames[0] = datapath.Frame{Hdr: sc.frame.frames[0].Hdr, Segs: [][]byte{w.head}, N: len(w.head)}
		w.Room()
	}
}

// A lastWord is a frame of a flow that is no more, which waits for room.
type lastWord struct {
	table  *Table
	flow   uint32
	head   []byte
	frames [1]datapath.Frame
}

// Room implements Waiter.
func (w *lastWord) Room() { w.table.opts.Link.Send(w.flow, w.frames[:], w) }

// Over implements Waiter.
func (w *lastWord) Over() bool { return false }

// sum adds up b, of an even length, as 16-bit words (RFC 1071), not folded.
func sum(b []byte) (s uint32) {
	for ; len(b) > 0; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	return s
}

func fold(s uint32) uint16 {
	s = s>>16 + s&0xffff
	return uint16(s>>16 + s&0xffff)
}
