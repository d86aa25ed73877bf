//go:build !race

package vhostuser

const race = false
