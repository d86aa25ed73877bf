// Package daemon builds culvert's daemon from its config and runs it: the
// forwarder, the VMs, the reconcile loop and the API. It owns nothing else: what
// each part does is the part's own.
//
// # Theory of operation
//
// Start is ordered, and so is the end, the other way round (C-51):
//
//	API socket claimed       a second daemon ends here, having touched nothing
//	names', metrics' ports   kept from publishes, before there are any
//	config's publishes       rows are there, pending
//	loop, VMs                transports are opened; rows open as VMs get ready
//	API, metrics served      READY=1
//	…                        SIGHUP: the difference is applied
//	STOPPING=1, loop ends    nothing is published any more
//	forwarder shut down      accepts nothing, drains, resets the rest
//	VMs closed               stacks and attachments retired
//	metrics, API shut down
//	API socket removed
package daemon
