//go:build !race

package listener

const raceEnabled = false
