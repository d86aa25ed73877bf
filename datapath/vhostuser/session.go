package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
)

var (
	errUnknown    = errors.New("request that we do not serve")
	errNotOffered = errors.New("uses what was not offered or not negotiated")
	errFDs        = errors.New("wrong number of descriptors")
	errIndex      = errors.New("no such ring")
	errRunning    = errors.New("the ring is running")
)

// maxRing is the longest split virtqueue (virtio 1.3, 2.7).
const maxRing = 1 << 15

// A session is what one front-end and we have agreed on, from its connection to
// the end of it. One goroutine serves its requests; what they do to memory and
// rings, the device does.
type session struct {
	dev      *device
	features uint64 // acknowledged, of virtio
	protocol uint64 // acknowledged, of the protocol
	status   uint64
}

// serve does what m asks and returns the message that answers it, appended to
// b. With an error the session is over: what was asked for is not so, and the
// front-end would believe that it is. It is told where it asked to be.
func (s *session) serve(b []byte, m *message) ([]byte, error) {
	payload, err := s.obey(m)
	if err != nil {
		err = fmt.Errorf("serve %s: %w", m.request, err)
	}
	if payload == nil && m.flags&flagNeedReply != 0 && s.protocol&protocolReplyAck != 0 {
		payload = u64Payload(0)
		if err != nil {
			payload = u64Payload(1)
		}
	}
	if payload != nil {
		b = appendReply(b, m.request, payload)
	}
	return b, err
}

// obey checks what is the same for all requests.
func (s *session) obey(m *message) ([]byte, error) {
	rule, ok := rules[m.request]
	switch {
	case !ok:
		return nil, errUnknown
	case s.protocol&rule.needs != rule.needs:
		return nil, errNotOffered
	case rule.size >= 0 && len(m.payload) != rule.size:
		return nil, fmt.Errorf("%w: %d bytes, want %d", errSize, len(m.payload), rule.size)
	case len(m.fds) > rule.fds:
		return nil, fmt.Errorf("%w: %d, want at most %d", errFDs, len(m.fds), rule.fds)
	}
	return rule.serve(s, m)
}

func (m *message) u64() uint64 { return binary.NativeEndian.Uint64(m.payload) }

// The requests follow in the order in which a front-end sends them.

func (s *session) getFeatures(*message) ([]byte, error) {
	return u64Payload(s.dev.features()), nil
}

func (s *session) getProtocolFeatures(*message) ([]byte, error) {
	return u64Payload(protocolFeatures), nil
}

// setProtocolFeatures may come before SET_FEATURES, and again for each pair of
// queues.
func (s *session) setProtocolFeatures(m *message) ([]byte, error) {
	if more := m.u64() &^ protocolFeatures; more != 0 {
		return nil, fmt.Errorf("%w: protocol features %#x", errNotOffered, more)
	}
	s.protocol = m.u64()
	return nil, nil
}

func (s *session) getQueueNum(*message) ([]byte, error) {
	return u64Payload(uint64(s.dev.pairs)), nil
}

func (s *session) setOwner(*message) ([]byte, error) { return nil, nil }

// resetOwner does nothing: some front-ends send it where they mean RESET_DEVICE,
// some where they mean nothing, and the protocol gave it up for that.
func (s *session) resetOwner(*message) ([]byte, error) { return nil, nil }

// setFeatures comes each time the guest's driver starts, and again for each pair
// of queues, while the first may run already. Rings that run keep what they were
// started with.
func (s *session) setFeatures(m *message) ([]byte, error) {
	if more := m.u64() &^ s.dev.features(); more != 0 {
		return nil, fmt.Errorf("%w: features %#x", errNotOffered, more)
	}
	s.features = m.u64()
	if s.features&featureProtocolFeatures == 0 {
		// The front-end knows no SET_VRING_ENABLE. A ring that it has enabled
		// stays so whatever it acknowledges.
		for i := range s.dev.rings {
			s.dev.enable(i, true)
		}
	}
	return nil, nil
}

// netSetMTU tells the longest IP packet on the link. We take any frame in either
// direction, so there is nothing to set.
func (s *session) netSetMTU(m *message) ([]byte, error) {
	const least, most = 68, 65535 // RFC 791; what the guest's config space can say
	if m.u64() < least || m.u64() > most {
		return nil, fmt.Errorf("MTU %d, want %d to %d", m.u64(), least, most)
	}
	return nil, nil
}

func (s *session) setMemTable(m *message) ([]byte, error) {
	regions, err := parseRegions(m.payload)
	if err != nil {
		return nil, err
	}
	if len(regions) != len(m.fds) {
		return nil, fmt.Errorf("%w: %d for %d memory regions", errFDs, len(m.fds), len(regions))
	}
	return nil, s.dev.setMemory(regions, m.takeFDs())
}

func (s *session) getMaxMemSlots(*message) ([]byte, error) {
	return u64Payload(maxRegions), nil
}

func (s *session) addMemReg(m *message) ([]byte, error) {
	if len(m.fds) != 1 {
		return nil, fmt.Errorf("%w: %d for one memory region", errFDs, len(m.fds))
	}
	return nil, s.dev.addMemory(parseRegion(m.payload[8:]), m.takeFDs()[0])
}

// remMemReg has a descriptor from some front-ends, for nothing.
func (s *session) remMemReg(m *message) ([]byte, error) {
	return nil, s.dev.removeMemory(parseRegion(m.payload[8:]))
}

// ring checks a ring's index, which is trusted nowhere else.
func (s *session) ring(index uint32) (int, error) {
	if index >= uint32(len(s.dev.rings)) {
		return 0, fmt.Errorf("%w: %d of %d", errIndex, index, len(s.dev.rings))
	}
	return int(index), nil
}

func (s *session) setVringNum(m *message) ([]byte, error) {
	v := parseVringState(m.payload)
	i, err := s.ring(v.index)
	if err != nil {
		return nil, err
	}
	if v.num == 0 || v.num > maxRing || bits.OnesCount32(v.num) != 1 {
		return nil, fmt.Errorf("ring of %d descriptors, want a power of two up to %d", v.num, maxRing)
	}
	return nil, s.dev.setNum(i, uint16(v.num))
}

func (s *session) setVringBase(m *message) ([]byte, error) {
	v := parseVringState(m.payload)
	i, err := s.ring(v.index)
	if err != nil {
		return nil, err
	}
	return nil, s.dev.setBase(i, uint16(v.num)) // the upper half is for packed rings
}

func (s *session) setVringAddr(m *message) ([]byte, error) {
	index, addr := parseVringAddr(m.payload)
	i, err := s.ring(index)
	if err != nil {
		return nil, err
	}
	return nil, s.dev.setAddr(i, addr)
}

// vringFD reads the number of SET_VRING_KICK, CALL and ERR. fd is -1 where the
// front-end said that there is none.
func (s *session) vringFD(m *message) (i, fd int, err error) {
	v := m.u64()
	i, err = s.ring(uint32(v & vringIndexMask))
	switch {
	case err != nil:
		return 0, -1, err
	case v&vringNoFD != 0 && len(m.fds) == 0:
		return i, -1, nil
	case v&vringNoFD == 0 && len(m.fds) == 1:
		return i, m.takeFDs()[0], nil
	}
	return 0, -1, fmt.Errorf("%w: %d with the number %#x", errFDs, len(m.fds), v)
}

func (s *session) setVringCall(m *message) ([]byte, error) {
	i, fd, err := s.vringFD(m)
	if err != nil {
		return nil, err
	}
	return nil, s.dev.setCall(i, fd)
}

// setVringErr would tell us where to say that a ring is broken. Nobody listens.
func (s *session) setVringErr(m *message) ([]byte, error) {
	_, fd, err := s.vringFD(m)
	closeFDs([]int{fd})
	return nil, err
}

// setVringKick starts the ring. The protocol starts it with the first kick, but
// one may be lost while front-end and back-end change: there may be work and
// nobody who says so.
func (s *session) setVringKick(m *message) ([]byte, error) {
	i, fd, err := s.vringFD(m)
	if err != nil {
		return nil, err
	}
	return nil, s.dev.start(i, fd, s.features)
}

// setVringEnable may come before the driver has started and SET_FEATURES with it:
// a ring remembers it while it is stopped.
func (s *session) setVringEnable(m *message) ([]byte, error) {
	v := parseVringState(m.payload)
	i, err := s.ring(v.index)
	switch {
	case err != nil:
		return nil, err
	case v.num > 1:
		return nil, fmt.Errorf("ring enabled by %d, want 0 or 1", v.num)
	}
	s.dev.enable(i, v.num == 1)
	return nil, nil
}

// getVringBase stops the ring.
func (s *session) getVringBase(m *message) ([]byte, error) {
	v := parseVringState(m.payload)
	i, err := s.ring(v.index)
	if err != nil {
		return nil, err
	}
	return vringState{v.index, uint32(s.dev.stop(i))}.payload(), nil
}

// setStatus is the driver's device status (virtio 1.3, 2.1). Zero is a reset.
func (s *session) setStatus(m *message) ([]byte, error) {
	if m.u64() > 0xff {
		return nil, fmt.Errorf("device status %#x, want 8 bits", m.u64())
	}
	s.status = m.u64()
	if s.status == 0 {
		s.dev.reset()
	}
	return nil, nil
}

// getStatus says what was set: features were accepted if SET_FEATURES was.
func (s *session) getStatus(*message) ([]byte, error) { return u64Payload(s.status), nil }

// resetDevice also disables the rings.
func (s *session) resetDevice(*message) ([]byte, error) {
	s.status, s.features = 0, 0
	s.dev.reset()
	for i := range s.dev.rings {
		s.dev.enable(i, false)
	}
	return nil, nil
}
