package datapathtest

import (
	"testing"

	"github.com/culvertnet/culvert/datapath"
)

// Conformance runs what every Attachment must do, as the comments of
// datapath.Attachment and datapath.QueuePair promise it, each part in a subtest
// with an attachment of its own.
//
// open joins a new attachment with the guest's end of it; what else it makes it
// cleans up with t.Cleanup. Conformance closes both ends.
func Conformance(t *testing.T, open func(t *testing.T) (ours datapath.Attachment, guest Peer)) {
	t.Helper()
	for _, part := range []struct {
		name string
		run  func(*testing.T, datapath.Attachment, Peer)
	}{} {
		t.Run(part.name, func(t *testing.T) {
			Leaks(t)
			ours, guest := open(t)
			part.run(t, ours, guest)
		})
	}
}
