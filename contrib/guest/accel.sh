#!/usr/bin/env bash
#
# Prints the value of QEMU's -accel for this machine. That /dev/kvm opens says
# little: nested hosts offer one under which no ordinary kernel runs. So the
# guest itself is booted under it once, and given up after 10 s (a KVM that
# works takes one or two).
#
#	accel.sh GUESTDIR
set -euo pipefail

guest=$1
if [ -r /dev/kvm ] && [ -w /dev/kvm ] &&
	timeout 10 qemu-system-x86_64 -accel kvm -cpu host -m 256 -nodefaults -no-reboot -display none -serial stdio \
		-kernel "$guest/vmlinuz" -initrd "$guest/initrd.gz" -append 'console=ttyS0 quiet panic=-1 guest.once' \
		-netdev user,id=n0,restrict=on -device virtio-net-pci,netdev=n0 </dev/null 2>/dev/null | grep -q 'guest ready'; then
	echo kvm
else
	echo tcg,thread=multi
fi
