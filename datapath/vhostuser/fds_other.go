//go:build !linux

package vhostuser

import (
	"net"
	"syscall"

	"github.com/culvertnet/culvert/datapath"
)

type reader struct{}

func newReader(*net.UnixConn) *reader { return &reader{} }

func (r *reader) next() (*message, error) { return &message{}, datapath.ErrUnsupported }

func closeFDs([]int) {}

func hungUp(syscall.Conn) bool { return true }

func supported() error { return datapath.ErrUnsupported }
