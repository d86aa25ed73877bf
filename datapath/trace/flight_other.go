//go:build !linux

package trace

import "github.com/culvertnet/culvert/datapath"

func mapFile(string, int) ([]byte, error) { return nil, datapath.ErrUnsupported }
func unmap([]byte) error                  { return nil }
