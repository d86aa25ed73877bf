package listener

import (
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// mergeDatagrams has the kernel merge what a socket is sent, where it can (Linux
// 5.0), and returns the longest datagrams that it may be given merged, 0 for none.
func mergeDatagrams(fd int) int32 {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1)
	// A kernel that does not know UDP_SEGMENT (before 4.18) would send all of them
	// as one.
	if _, err := unix.GetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT); err != nil {
		return 0
	}
	return maxPayload
}

func (s *Socket) readMessages(r *Reader) (int, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return 0, net.ErrClosed
	}
	n, err := r.raw.recv(s.fd, &r.messages)
	s.taken.Add(int32(n))
	return n, wouldBlock("recvmmsg", err)
}

// senders hold the memory of calls under way.
var senders = sync.Pool{New: func() any { return new(rawSender) }}

func (s *Socket) sendMessages(datagrams [][2][]byte, client netip.AddrPort, local netip.Addr) (n int, err error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return 0, net.ErrClosed
	}
	defer func() { s.answered.Add(int32(n)) }()
	raw := senders.Get().(*rawSender)
	defer senders.Put(raw)
	if err := raw.address(client, local); err != nil {
		return 0, err
	}
	for n < len(datagrams) {
		limit := int(s.merge.Load())
		sent, merged, err := raw.send(s.fd, datagrams[n:], limit)
		n += sent
		switch {
		case err == nil, err == unix.EINTR:
		case merged && (err == unix.EINVAL || err == unix.EIO || err == unix.EMSGSIZE):
			s.merge.CompareAndSwap(int32(limit), int32(lengthOf(datagrams[n])-1))
		default:
			return n, wouldBlock("sendmmsg", err)
		}
	}
	return n, nil
}

// mergeable returns how many of the datagrams make up one message: the first,
// and those after it that are as long, if that is at most limit; the last may be
// shorter.
func mergeable(datagrams [][2][]byte, limit int) int {
	size := lengthOf(datagrams[0])
	if size == 0 || size > limit {
		return 1
	}
	n, total := 1, size
	for _, d := range datagrams[1:min(len(datagrams), maxMerged)] {
		more := lengthOf(d)
		if more == 0 || more > size || total+more > maxPayload {
			break
		}
		n, total = n+1, total+more
		if more < size {
			break
		}
	}
	return n
}

func lengthOf(datagram [2][]byte) int { return len(datagram[0]) + len(datagram[1]) }
