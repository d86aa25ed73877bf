//go:build !linux

package qemustream

import "github.com/culvertnet/culvert/datapath"

type socket struct{}

func newSocket(Conn) (*socket, error) { return nil, datapath.ErrUnsupported }

func (*socket) read([][]byte) (int, error)  { return 0, datapath.ErrUnsupported }
func (*socket) write([][]byte) (int, error) { return 0, datapath.ErrUnsupported }
func (*socket) awaitRoom([]byte) error      { return datapath.ErrUnsupported }
func (*socket) hungUp() bool                { return true }
func (*socket) close() error                { return nil }
