// Package kube follows the Services of a Kubernetes cluster.
//
// It is a thin layer over client-go: it dials where it is told, lists and
// watches, and turns the API server's answers, which come from the guest and are
// not trusted, into Services. It decides nothing: package reconcile does.
package kube
