// Package docker follows the running containers of a Docker engine.
//
// It is a thin layer over the engine's own client: it dials where it is told,
// and turns the engine's answers, which come from the guest and are not
// trusted, into Containers. It decides nothing: package reconcile does.
package docker
