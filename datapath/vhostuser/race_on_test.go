//go:build race

package vhostuser

const race = true
