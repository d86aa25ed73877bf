#!/usr/bin/env bash
#
# Makes the disk of the VM with a real Docker engine that the tests use, and
# prints the directory that holds it:
#
#	disk.img	this machine's own distribution with its docker.io, the modules
#			of the guest's kernel, init, and the image of image.sh
#			that the engine has imported already, as "guestd"
#	guest		contrib/guest's directory, whose kernel and initramfs boot it
#
# The result is cached by a hash of everything that goes into it, as contrib/guest's
# is. The first time takes some minutes. Needs root, for debootstrap;
# contrib/install-deps.sh says what else.
#
#	build.sh -n	only says where it is, and fails when it is not there
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CULVERT_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/culvert}

die() { echo "engine: $*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || die "the VM is built for x86-64 only, and this is $(uname -m)"
PATH=$PATH:/usr/sbin:/sbin # a user's may lack them
for tool in apt-get apt-cache dpkg-deb debootstrap mke2fs qemu-system-x86_64 go; do
	command -v "$tool" >/dev/null || die "$tool is missing; contrib/install-deps.sh installs it"
done

guest=$("$here/../guest/build.sh")
root=$("$here/root.sh" "$@")
key=$({ echo "${root##*/} ${guest##*/}"; cat "$here"/{build.sh,image.sh,boot.sh,init}; } | sha256sum | cut -c1-16)
out=$cache/engine-$key
if [ -e "$out/disk.img" ]; then
	echo "$out"
	exit
fi
[ "${1:-}" != -n ] || die "the VM's disk has not been made; run contrib/engine/build.sh as root"
[ "$(id -u)" = 0 ] || die "a disk with root's files needs root"

tmp=$(mktemp -d "$cache/building.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
echo "engine: making $out" >&2

mkdir "$tmp/root" "$tmp/kernel" "$tmp/out"
tar -C "$tmp/root" -xf "$root"
for deb in "$("$here/../guest/build.sh" -k)"/*.deb; do
	dpkg-deb -x "$deb" "$tmp/kernel"
done
for dir in "$tmp"/kernel/lib/modules/* "$tmp"/kernel/usr/lib/modules/*; do
	[ -e "$dir/modules.builtin" ] || continue
	mkdir -p "$tmp/root/usr/lib/modules"
	cp -a "$dir" "$tmp/root/usr/lib/modules/"
	chroot "$tmp/root" depmod "${dir##*/}"
done
cp "$here/init" "$tmp/root/init"
chmod 755 "$tmp/root/init"
echo '127.0.0.1 localhost engine' >"$tmp/root/etc/hosts"
"$here/image.sh" "$tmp/root/image.tar"

# Its holes cost nothing, and are room for the tests' containers.
truncate -s 2G "$tmp/out/disk.img"
mke2fs -q -t ext4 -d "$tmp/root" "$tmp/out/disk.img"
ln -s "$guest" "$tmp/out/guest"
# It boots once, to import the image, and so that a disk that does not boot is
# never kept. Under emulation that takes about 40 s.
ENGINE_DISK=$tmp/out/disk.img ENGINE_APPEND=engine.import timeout 300 "$here/boot.sh" "$tmp/out" </dev/null >"$tmp/log" 2>&1 || true
grep -q 'guest imported: 0' "$tmp/log" || die "the VM does not boot: $(tail -n 20 "$tmp/log")"

# Whoever was first wins; a half-made one is never seen.
mv -T "$tmp/out" "$out" 2>/dev/null || [ -e "$out/disk.img" ] || die "cannot write $out"
echo "$out"
