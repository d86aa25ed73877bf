// Package relay carries bytes and datagrams between a client of the host and a
// server in the guest. It knows neither host sockets nor gVisor: both ends are
// interfaces, and the guest's end does the copying, which knows the fast path.
package relay
