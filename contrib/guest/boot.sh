#!/usr/bin/env bash
#
# Boots the guest with its serial console on standard input and output, and
# becomes QEMU: the caller's process id is the VM's. The NIC's other end is the
# caller's to say, by the id n0:
#
#	boot.sh GUESTDIR -netdev stream,id=n0,server=off,addr.type=unix,addr.path=/run/culvert/default.sock
#
# or a vhost-user back-end's socket, which takes more than a netdev to set up:
#
#	boot.sh GUESTDIR vhost-user:/run/culvert/default.sock[,queues=N]
#
# GUEST_ACCEL is QEMU's -accel (default: what accel.sh finds); GUEST_APPEND is
# for init, e.g. "guest.mtu=9000"; GUEST_DEVICE adds to the NIC's properties,
# e.g. ",mac=52:54:00:00:00:02".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
guest=$1
shift
accel=${GUEST_ACCEL:-$("$here/accel.sh" "$guest")}
cpu=max
case $accel in kvm*) cpu=host ;; esac
nic=virtio-net-pci,netdev=n0
case ${1:-} in
vhost-user:*)
	IFS=, read -r path queues <<<"${1#vhost-user:}"
	shift
	set -- -object memory-backend-memfd,id=m,size=512M,share=on -numa node,memdev=m \
		-chardev "socket,id=c0,path=$path,reconnect=1" -netdev "vhost-user,id=n0,chardev=c0${queues:+,$queues}" "$@"
	[ -z "$queues" ] || nic+=,mq=on
	# QEMU 7.2 crashes without KVM when such a NIC uses MSI-X.
	case $accel in tcg*) nic+=,vectors=0 ;; esac
	;;
esac
exec qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp 2 -m 512 -nodefaults -no-reboot -display none -serial stdio \
	-kernel "$guest/vmlinuz" -initrd "$guest/initrd.gz" -append "console=ttyS0 quiet panic=-1 ${GUEST_APPEND:-}" \
	-device "$nic${GUEST_DEVICE:-}" "$@"
