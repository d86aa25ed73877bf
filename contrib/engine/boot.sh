#!/usr/bin/env bash
#
# Boots the VM with the engine, its serial console on standard input and output,
# and becomes QEMU: the caller's process id is the VM's. The other end of its NIC
# is the caller's to say, by the id n0, as for contrib/guest/boot.sh:
#
#	boot.sh DIR -netdev stream,id=n0,server=on,addr.type=unix,addr.path=/run/culvert/engine.sock
#
# A netdev n1 gives the VM another NIC, 10.0.3.15/24, so that tests reach the
# engine without culvert:
#
#	-netdev user,id=n1,net=10.0.3.0/24,restrict=on,hostfwd=tcp:127.0.0.1:2375-10.0.3.15:2375
#
# The disk is as it was made at each boot; ENGINE_DISK=FILE is a copy of it that
# the VM writes to. The kernel's mitigations are off: under emulation they cost
# much and protect nothing. GUEST_ACCEL is QEMU's -accel; ENGINE_APPEND is for init.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=$1
shift
accel=${GUEST_ACCEL:-$("$here/../guest/accel.sh" "$dir/guest")}
cpu=max
case $accel in kvm*) cpu=host ;; esac
disk=file=$dir/disk.img,snapshot=on
[ -z "${ENGINE_DISK:-}" ] || disk=file=$ENGINE_DISK
nics=()
for n in n0 n1; do
	case " $* " in *",id=$n"[\ ,]*) nics+=(-device "virtio-net-pci,netdev=$n") ;; esac
done
exec qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp 2 -m 2048 -nodefaults -no-reboot -display none -serial stdio \
	-kernel "$dir/guest/vmlinuz" -initrd "$dir/guest/initrd.gz" -append "console=ttyS0 quiet panic=-1 mitigations=off guest.disk ${ENGINE_APPEND:-}" \
	-drive "$disk,if=virtio,format=raw,cache=unsafe,discard=unmap" "$@" "${nics[@]}"
