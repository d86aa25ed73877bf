// Package guest is the roof over the clients of what runs in or around a VM. It
// holds no code.
//
// Each client is a leaf: it imports nothing of this module, knows neither
// listeners nor VMs' lives, and is handed what it dials with. What is to follow
// from what it says is package reconcile's.
//
//   - docker: the guest's container engine, which containers run and what they
//     publish
//   - kube: the guest's Kubernetes API, which Services of type LoadBalancer there
//     are
//   - vm: the VMM beside the guest, whether the VM runs, is paused, was reset or
//     is shut down
//
// None of them trusts what it reads. Answers are bounded in size and in number,
// names are checked before they become keys, and a client that is lied to says
// less than there is, never more.
package guest
