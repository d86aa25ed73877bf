#!/usr/bin/env bash
#
# Boots the guest with its serial console on standard input and output, and
# becomes QEMU: the caller's process id is the VM's. The NIC's other end is the
# caller's to say, by the id n0:
#
#	boot.sh GUESTDIR -netdev stream,id=n0,server=off,addr.type=unix,addr.path=/run/culvert/default.sock
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
exec qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp 2 -m 512 -nodefaults -no-reboot -display none -serial stdio \
	-kernel "$guest/vmlinuz" -initrd "$guest/initrd.gz" -append "console=ttyS0 quiet panic=-1 ${GUEST_APPEND:-}" \
	-device "virtio-net-pci,netdev=n0${GUEST_DEVICE:-}" "$@"
