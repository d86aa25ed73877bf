// Package kube follows the Services of a Kubernetes cluster.
//
// It decides nothing: it lists and watches, and tells of the complete set after
// each change. What is to follow from it is package reconcile's.
//
// # Theory of operation
//
// Follow goes in rounds. A round lists all Services, in pages, and tells of them;
// then it watches from the resource version of that list on. However the watch
// ends, a new round begins: a list is the one thing that is true whatever was
// missed, be it an event, a resource version, or the cluster's whole past. A
// watch that seems well is left after ten minutes for the same reason. Where
// watching is refused, the round lists every two seconds instead.
//
//	list ──► watch ── ten minutes are over, or the server has closed it ──► list
//	  │        └───── cut, 410, an ERROR event, anything else ──┐
//	  └────────────────── failed ───────────────────────────────┴──► tell, wait, list
//
// A failure changes nothing of what was told before; it is told itself, with its
// number in the row. The row ends when a watch tells of a change or lasts, not
// when a list succeeds: a server that lists and does not let watch would else be
// asked without end. The waits grow from one second to ten.
//
// This is a loop of its own because client-go's informer never lists anew while
// its watch seems well, and does not count its failures.
//
// # What is believed
//
// Of client-go there is the kubeconfig, the credentials and the TLS. Answers are
// decoded here, one Service at a time, into a type that has the few fields that
// are read (see object): a list of the library's types may take a hundred times
// the memory of its bytes, and the clientset that goes with it would make the
// product 25 MB larger. Values, pages, Services and their parts are bounded; a
// listing beyond the bounds is a failure rather than a part of the whole, since
// what it left out would seem to be gone. Redirects are not followed.
//
// Credentials that need a program to be started are refused. The file is read
// again when it changes and after each failure, as clusters renew certificates.
package kube
