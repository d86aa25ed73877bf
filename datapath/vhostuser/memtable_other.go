//go:build !linux

package vhostuser

import "github.com/culvertnet/culvert/datapath"

func mapShared(int, uint64) ([]byte, error) { return nil, datapath.ErrUnsupported }

func unmap([]byte) {}
