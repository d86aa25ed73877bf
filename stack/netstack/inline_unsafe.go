package netstack

import (
	"reflect"
	"unsafe"

	"gvisor.dev/gvisor/pkg/atomicbitops"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// What gVisor keeps to itself and inline.go needs, of the version in go.mod. A
// version that renames one of the functions does not link; one that changes the
// field leaves inline delivery out, and TestInlineDelivery fails.

//go:linkname handleConnecting gvisor.dev/gvisor/pkg/tcpip/transport/tcp.handleConnecting
func handleConnecting(ep *tcp.Endpoint)

//go:linkname handleConnected gvisor.dev/gvisor/pkg/tcpip/transport/tcp.handleConnected
func handleConnected(ep *tcp.Endpoint)

// ownedOffset is where an endpoint says that a user holds its lock.
var ownedOffset, ownedKnown = func() (uintptr, bool) {
	f, ok := reflect.TypeFor[tcp.Endpoint]().FieldByName("ownedByUser")
	return f.Offset, ok && f.Type == reflect.TypeFor[atomicbitops.Uint32]()
}()

// owned is that field. The caller holds ep's lock.
func owned(ep *tcp.Endpoint) *atomicbitops.Uint32 {
	return (*atomicbitops.Uint32)(unsafe.Add(unsafe.Pointer(ep), ownedOffset))
}
