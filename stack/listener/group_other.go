//go:build !linux

package listener

import (
	"context"
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

type (
	pace   struct{}
	pacer  struct{}
	served struct{}
)

type rawReader struct{}

func newRawReader() *rawReader { return nil }

func (s *Socket) readMessages(*Reader) (int, error) { return 0, errors.ErrUnsupported }

func (s *Socket) sendMessages([][2][]byte, netip.AddrPort, netip.Addr) (int, error) {
	return 0, errors.ErrUnsupported
}

func (g *Group) poll() {}

func goneFD(uintptr) bool { return true }

func (c *Conn) shutdownRead() error { return errors.ErrUnsupported }

func (c *Conn) shutdownWrite() error { return errors.ErrUnsupported }

func (c *Conn) keepAlive() error { return errors.ErrUnsupported }

func (c *Conn) endInOrder() {}

type clientSet struct{}

func (c *Conn) watch(func(Ready)) error { return errors.ErrUnsupported }

func (c *Conn) watchWrite() error { return errors.ErrUnsupported }

func (c *Conn) waitGone(context.Context) error { return errors.ErrUnsupported }

func (c *Conn) read([]byte) (int, error) { return 0, errors.ErrUnsupported }

func (c *Conn) write([]byte) (int, error) { return 0, errors.ErrUnsupported }

func (c *Conn) close() error { return errors.ErrUnsupported }
