// Package datapathtest holds what every transport must do, as a test suite, and
// what tests of the datapath share: network namespaces that leave nothing
// behind, a link that loses and mixes up frames, a baseline of descriptors and
// goroutines, and skips that become failures where a machine is expected to be
// able to run the test.
//
// It is for tests and benchmarks only; nothing in the product imports it.
package datapathtest
