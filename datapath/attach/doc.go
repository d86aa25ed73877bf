// Package attach chooses a transport: it reads an attach spec, the words with
// which a user says how a VM's NIC is reached, and opens what it names. It moves
// no frames.
package attach
