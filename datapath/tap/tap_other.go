//go:build !linux

package tap

import "github.com/culvertnet/culvert/datapath"

func open(Config) (datapath.Attachment, error) { return nil, datapath.ErrUnsupported }

func check(Config) error { return datapath.ErrUnsupported }
