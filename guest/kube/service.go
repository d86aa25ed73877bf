package kube

import "time"

// A Service is a Kubernetes Service as far as it concerns the host. All of it
// comes from the guest: Client bounds its size and checks names (C-40), and
// nothing else.
type Service struct {
	// Namespace and Name are RFC 1123 labels.
	Namespace, Name string
	// UID tells a Service from a later one of the same name.
	UID string
	// Created is when the cluster made it, in whole seconds.
	Created time.Time
	// LoadBalancer says whether spec.type is LoadBalancer: nothing else of a
	// Service counts when it is not (FB-104).
	LoadBalancer bool
	Ports        []Port
	// Ingress is status.loadBalancer.ingress: where the cluster's load balancer
	// says the Service can be reached.
	Ingress []Ingress
	// SourceRanges is spec.loadBalancerSourceRanges, unparsed.
	SourceRanges []string
}

// A Port is one of a Service's ports.
type Port struct {
	// Name is the port's name, a label for people; often empty.
	Name string
	// Protocol is "TCP", "UDP", "SCTP" or what the cluster says.
	Protocol string
	// Number is the Service port, 1-65535: ports outside are left out (C-40).
	Number uint16
	// NodePort is the node's port for it, 0 when it has none.
	NodePort uint16
}

// An Ingress is one entry of status.loadBalancer.ingress, unparsed.
type Ingress struct {
	IP, Hostname string
	// Mode is ipMode: "VIP", "Proxy" or empty.
	Mode string
}

// An Update is what a Client learns: the complete set of Services, or that it
// could not.
type Update struct {
	// Services are all there are when Err is nil, in no order. The receiver must
	// not write to them.
	Services []Service
	// Err is why the API server did not answer as it should; then Services is
	// nil, and what was known stays true as far as anyone can tell (C-44).
	Err error
	// Failures counts failures in a row, 0 when Err is nil.
	Failures int
}
