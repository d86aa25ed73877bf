// Package names is the DNS server for what runs in the VMs: it answers from the
// table of names that package reconcile keeps (C-37, C-38).
//
// It has no names of its own and remembers no answer; answers carry a TTL of 0,
// so that nobody else does either and a name that goes is gone at once.
//
// What is asked for is one of
//
//   - the zone: a name in it is answered from the table, with and without the
//     zone, and everything below a name like the name itself ("*.web"). A name
//     that is not there is NXDOMAIN, or no data by setting. Nothing of the zone
//     is sent upstream, whatever becomes of it.
//   - the bare name of an owner, without the zone: likewise, but nothing below
//     it. The table's names come from guests, and a container that is named "com"
//     must not stand for all of it.
//   - the way back from an address: names for an address in the table; those of
//     containers' own addresses, 127.77.0.0/16, are a zone of ours, too.
//   - anything else: REFUSED, or, with upstreams, asked there and passed on as it
//     comes, except for names of a single label, which are meant for here. Only
//     programs of the host itself are served so: whatever the address the server
//     listens at, it is no open resolver.
package names
