// Package guesttest holds what tests of a guest's clients share: a fake Docker
// engine that can be made to fail in every way, and a real one in a network
// namespace.
//
// The fake, Engine, is an HTTP server that speaks as much of the Engine API as
// package docker asks for. It says what its test tells it to, at any size, and
// lies, stalls or breaks off on demand: what no real engine can be brought to.
// The real one, Dockerd, is Debian's dockerd with its own containerd, as the
// guest engine of an end-to-end test.
//
// It is for tests and benchmarks only; nothing in the product imports it.
package guesttest
