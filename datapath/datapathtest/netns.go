package datapathtest

import "os"

// A NetNS is a network namespace of a test's own, without a name, that ends
// when the last of its users does: the test's reference goes with Close. Its
// loopback interface is up. Linux only.
type NetNS struct {
	file *os.File // on nsfs; the test's reference
}

// Close gives up the test's reference, and with it the namespace, unless a
// process, a socket or an open file still uses it. The kernel takes it and its
// interfaces down in the background. Closing again does nothing.
func (n *NetNS) Close() {
	_ = n.file.Close()
}
