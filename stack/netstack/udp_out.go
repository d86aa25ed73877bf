package netstack

import (
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

const (
	// udpAt is where the UDP header lies in a frame of ours, behind Ethernet and
	// an IPv4 header without options: 14 + 20.
	udpAt = header.EthernetMinimumSize + header.IPv4MinimumSize
	// udpHeadSize is all headers together: 34 + 8.
	udpHeadSize = udpAt + header.UDPMinimumSize
	// udpBatch is how many datagrams one WriteBatch takes, in frames or
	// super-frames; and how many a super-frame holds: Linux cuts up no more
	// (UDP_MAX_SEGMENTS, 64 before 6.9).
	udpBatch = 64
	// udpTTL is what a packet of ours may still pass behind the node, and what
	// gVisor gives its own.
	udpTTL = 64
)

// A udpHead is the headers of a flow's frames, in which lengths, identification
// and checksums are still to be filled in, and the node's Ethernet address.
type udpHead struct {
	bytes  [udpHeadSize]byte
	ip     uint16 // the sum of the IPv4 header
	pseudo uint16 // the sum of the pseudo-header, but for the length
}

func newUDPHead(l *linkEndpoint, src, dst netip.AddrPort) (h udpHead) {
	copy(h.bytes[6:], l.mac)
	binary.BigEndian.PutUint16(h.bytes[12:], uint16(header.IPv4ProtocolNumber))
	srcIP, dstIP := address(src.Addr()), address(dst.Addr())
	ip := header.IPv4(h.bytes[header.EthernetMinimumSize:udpAt])
	// Don't-fragment stays clear: nobody who sends datagrams through us would
	// hear of a smaller MTU behind the node.
	ip.Encode(&header.IPv4Fields{TTL: udpTTL, Protocol: uint8(header.UDPProtocolNumber), SrcAddr: srcIP, DstAddr: dstIP})
	h.ip = ip.CalculateChecksum()
	h.pseudo = header.PseudoHeaderChecksum(header.UDPProtocolNumber, srcIP, dstIP, 0)
	header.UDP(h.bytes[udpAt:]).Encode(&header.UDPFields{SrcPort: src.Port(), DstPort: dst.Port()})
	return h
}

// udpFrames is the memory of one WriteBatch of datagrams.
type udpFrames struct {
	frames [udpBatch]datapath.Frame
	heads  [udpBatch][udpHeadSize]byte
	counts [udpBatch]int        // datagrams in each frame
	segs   [2 * udpBatch][]byte // a header a frame, and the datagrams
}

var udpFramesPool = sync.Pool{New: func() any { return new(udpFrames) }}

// sendFrames hands over datagrams, none longer than a frame holds, and returns
// how many were taken before there was no room.
func (c *UDPConn) sendFrames(datagrams [][]byte) (sent int) {
	out := c.stack.link.out[0] // where gVisor's own of UDP go, which have no hash
	fs := udpFramesPool.Get().(*udpFrames)
	defer udpFramesPool.Put(fs)
	for sent < len(datagrams) {
		batch := datagrams[sent:min(sent+udpBatch, len(datagrams))]
		n := c.fill(fs, batch)
		taken := out.sendFrames(fs.frames[:n])
		for _, count := range fs.counts[:taken] {
			sent += count
		}
		clear(fs.segs[:]) // the memory is the caller's again
		if taken < n {
			break
		}
	}
	return sent
}

// fill makes frames of at most udpBatch datagrams and returns how many.
func (c *UDPConn) fill(fs *udpFrames, datagrams [][]byte) (n int) {
	link := c.stack.link
	node := link.neigh.mac()
	id := link.udpID.Add(uint32(len(datagrams))) - uint32(len(datagrams))
	segs := fs.segs[:0]
	for ; len(datagrams) > 0; n++ {
		count, length := 1, len(datagrams[0])
		if link.uso {
			count, length = mergeable(datagrams)
		}
		first := len(segs)
		head := &fs.heads[n]
		*head = c.head.bytes
		copy(head[:], node)
		segs = append(segs, head[:])
		for _, d := range datagrams[:count] {
			if len(d) > 0 {
				segs = append(segs, d)
			}
		}
		f := &fs.frames[n]
		f.Segs, f.N = segs[first:], udpHeadSize+length
		f.Hdr = c.head.finish(head, f.Segs[1:], length, uint16(id), link.txCSum)
		if count > 1 {
			f.Hdr.GSOType, f.Hdr.GSOSize, f.Hdr.HdrLen = virtio.GSOUDPL4, uint16(len(datagrams[0])), udpHeadSize
		}
		fs.counts[n] = count
		datagrams = datagrams[count:]
		id += uint32(count)
	}
	return n
}

// mergeable returns how many of the datagrams make a super-frame (virtio 1.3,
// 5.1.6.2): the first and those after it that are as long, the last of which may
// be shorter; and their length together, which one IPv4 packet has to hold.
func mergeable(datagrams [][]byte) (n, length int) {
	size := len(datagrams[0])
	n, length = 1, size
	if size == 0 {
		return n, length
	}
	for _, d := range datagrams[1:] {
		if len(d) == 0 || len(d) > size || length+len(d) > maxDatagram {
			break
		}
		n, length = n+1, length+len(d)
		if len(d) < size {
			break
		}
	}
	return n, length
}

// finish fills in what h leaves open, for a payload of length bytes. With
// partial the UDP checksum is left to the guest.
func (h *udpHead) finish(head *[udpHeadSize]byte, payload [][]byte, length int, id uint16, partial bool) virtio.NetHdr {
	udpLength := uint16(header.UDPMinimumSize + length)
	total := header.IPv4MinimumSize + udpLength
	ip := header.IPv4(head[header.EthernetMinimumSize:udpAt])
	ip.SetTotalLength(total)
	ip.SetID(id)
	ip.SetChecksum(^checksum.Combine(checksum.Combine(h.ip, total), id))
	udp := header.UDP(head[udpAt:])
	udp.SetLength(udpLength)
	pseudo := checksum.Combine(h.pseudo, udpLength)
	if partial {
		udp.SetChecksum(pseudo)
		return virtio.NetHdr{Flags: virtio.FlagNeedsCSum, CSumStart: udpAt, CSumOffset: udpChecksumOffset}
	}
	var sum checksum.Checksumer
	sum.Add(udp)
	for _, p := range payload {
		sum.Add(p)
	}
	switch xsum := ^checksum.Combine(sum.Checksum(), pseudo); xsum {
	case 0:
		udp.SetChecksum(0xffff) // 0 means none (RFC 768)
	default:
		udp.SetChecksum(xsum)
	}
	return virtio.NetHdr{}
}
