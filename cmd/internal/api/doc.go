// Package api is the daemon's HTTP/JSON API on a unix socket: its documents, a
// server over a Backend, and the client that the command line uses. It knows
// nothing of what is behind the Backend.
//
//	GET /v1/listeners[?of=TEXT]    the ledger, an array of Listener; TEXT is a container, a Service or a publish
//	PUT|DELETE /v1/publishes       a PublishRequest, answered by its Listeners
//	GET /v1/flows                  live flows, an array of Flow
//	GET /v1/vms                    an array of VM
//	GET /v1/names                  the names in the zone, an array of Name
//	GET /v1/kubernetes             the clusters, an array of Kubernetes
//	PUT /v1/kubernetes             a KubernetesRequest, answered by the clusters
//	GET /v1/events                 one Event a line, as they happen
//	GET /v1/doctor[?vm=&of=]       what was found on the way to host ports, an array of Step
//	GET /v1/trace[?vm=&filter=&snaplen=&drops=]   pcapng, as frames pass
//	GET /healthz                   200 while the daemon serves, and how the VMs are
//
// Errors are problem documents (RFC 9457).
package api
