//go:build !linux

package unixgram

import (
	"context"

	"github.com/culvertnet/culvert/datapath"
)

type socket struct{}

type address struct{}

func (address) String() string { return "" }

func bind(string) (*socket, error) { return nil, datapath.ErrUnsupported }

func (*socket) dup() (*socket, error)                { return nil, datapath.ErrUnsupported }
func (*socket) interruptible(context.Context) func() { return func() {} }
func (*socket) peek() (address, [len(greeting)]byte, int, error) {
	return address{}, [len(greeting)]byte{}, 0, datapath.ErrUnsupported
}
func (*socket) discard() error        { return datapath.ErrUnsupported }
func (*socket) connect(address) error { return datapath.ErrUnsupported }
func (*socket) disconnect()           {}
func (*socket) receive([][]byte, bool) (int, bool, *address, error) {
	return 0, false, nil, datapath.ErrUnsupported
}
func (*socket) send([][]byte, int) error { return datapath.ErrUnsupported }
func (*socket) awaitRoom() error         { return datapath.ErrUnsupported }
func (*socket) close() error             { return nil }
