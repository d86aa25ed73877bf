// Package eventfd holds the two ends of a virtqueue's notification: the kick we
// wait for on the runtime's poller, and the call we make without ever waiting.
// Both are eventfds (eventfd(2)) that another process made and passed to us; a
// call may also be the writing end of a pipe, as User Mode Linux's is.
package eventfd
