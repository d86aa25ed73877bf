//go:build !linux

package listener

import (
	"errors"
	"net/netip"
)

func newGroup(Handler) (*Group, error) { return nil, errors.ErrUnsupported }

func (g *Group) bind(Proto, netip.AddrPort, any, uint16) (*Socket, error) {
	return nil, errors.ErrUnsupported
}

func (g *Group) add(*Socket) error { return errors.ErrUnsupported }

func (g *Group) close() error { return errors.ErrUnsupported }

func (s *Socket) close() error { return errors.ErrUnsupported }

func (s *Socket) readFrom([]byte) (n int, client netip.AddrPort, local netip.Addr, trunc bool, err error) {
	return 0, netip.AddrPort{}, netip.Addr{}, false, errors.ErrUnsupported
}

func (s *Socket) writeTo([][]byte, netip.AddrPort, netip.Addr) error { return errors.ErrUnsupported }

func goneFD(uintptr) bool { return true }

func (c *Conn) shutdownRead() error { return errors.ErrUnsupported }

func (c *Conn) shutdownWrite() error { return errors.ErrUnsupported }

func (c *Conn) keepAlive() error { return errors.ErrUnsupported }

func (c *Conn) endInOrder() {}
