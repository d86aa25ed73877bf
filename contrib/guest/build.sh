#!/usr/bin/env bash
#
# Makes the bootable guest of the demo and the tests, and prints the directory
# that holds it:
#
#	vmlinuz	the distribution's own cloud kernel, unpacked, not installed
#	initrd.gz	busybox, the virtio modules, init and guestd; ethtool and
#		iperf3 where this machine has them, for tests that use the
#		guest's console
#
# The result is cached by a hash of everything that goes into it, outside the
# tree: $CULVERT_CACHE, else $XDG_CACHE_HOME/culvert, else ~/.cache/culvert.
# Needs no root; contrib/install-deps.sh says what it needs.
#
#	build.sh -k	only fetches the kernel's packages, and prints the directory
#			that holds them
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CULVERT_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/culvert}

# In the order of their dependencies. What a kernel has built in is left out.
modules=(virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci failover net_failover virtio_net virtio_blk)

die() { echo "guest: $*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || die "the guest is built for x86-64 only, and this is $(uname -m)"
for tool in apt-get apt-cache dpkg-deb cpio gzip go; do
	command -v "$tool" >/dev/null || die "$tool is missing; contrib/install-deps.sh installs it"
done
busybox=$(command -v busybox) || die "busybox is missing: apt-get install busybox-static"
if ldd "$busybox" >/dev/null 2>&1; then
	die "$busybox is dynamically linked, and the guest has no libraries: apt-get install busybox-static"
fi

tools=()
for tool in ethtool iperf3; do
	# A user's PATH may lack /usr/sbin.
	! path=$(PATH=$PATH:/usr/sbin:/sbin command -v "$tool") || tools+=("$path")
done

# The metapackage names the kernel of the day, which is what is downloaded.
kernel=
for meta in linux-image-cloud-amd64 linux-image-virtual; do # Debian, Ubuntu
	kernel=$(apt-cache depends "$meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ {print $2; exit}')
	[ -z "$kernel" ] || break
done
[ -n "$kernel" ] || die "apt knows no cloud kernel; run apt-get update as root"
# Ubuntu keeps the modules in a package of their own.
packages=("$kernel")
mods=${kernel/linux-image/linux-modules}
! apt-cache show "$mods" >/dev/null 2>&1 || packages+=("$mods")
versions=$(apt-cache show --no-all-versions "${packages[@]}" | awk '/^(Package|Version):/ {print $2}')

mkdir -p "$cache"
tmp=$(mktemp -d "$cache/building.XXXXXX")
trap 'rm -rf "$tmp"' EXIT

debs=$cache/kernel-$(echo "$versions" | sha256sum | cut -c1-16)
if [ ! -d "$debs" ]; then
	mkdir "$tmp/deb"
	# As root apt would download as the user _apt, who may not write here.
	(cd "$tmp/deb" && apt-get -q -o APT::Sandbox::User=root download "${packages[@]}" >&2) ||
		die "cannot download ${packages[*]}; if apt's lists are old, run apt-get update as root"
	mv -T "$tmp/deb" "$debs" 2>/dev/null || [ -d "$debs" ]
fi
if [ "${1:-}" = -k ]; then
	echo "$debs"
	exit
fi

key=$({ echo "$versions"; go version; cat "$busybox" "${tools[@]}" "$here/build.sh" "$here/init" "$here"/guestd/*.go; } | sha256sum | cut -c1-16)
out=$cache/guest-$key
if [ -e "$out/initrd.gz" ]; then
	echo "$out"
	exit
fi

echo "guest: making $out from ${packages[*]}" >&2

mkdir "$tmp/kernel" "$tmp/out"
for deb in "$debs"/*.deb; do
	dpkg-deb -x "$deb" "$tmp/kernel"
done
cp "$tmp"/kernel/boot/vmlinuz-* "$tmp/out/vmlinuz"
chmod u+r "$tmp/out/vmlinuz"

root=$tmp/root
mkdir -p "$root"/{bin,dev,etc,proc,sys,tmp,modules,www/cgi-bin}
cp "$busybox" "$root/bin/busybox"
cp "$here/init" "$root/init"
chmod 755 "$root/init"
for tool in "${tools[@]}"; do
	cp "$tool" "$root/bin/"
	# Its libraries, and the loader, where it will look for them.
	while read -r so; do
		mkdir -p "$root${so%/*}"
		cp -L "$so" "$root$so"
	done < <(ldd "$tool" | grep -o '/[^ ]*')
done
(cd "$here/guestd" && CGO_ENABLED=0 GOOS=linux GOARCH=amd64 go build -trimpath -ldflags='-s -w' -o "$root/bin/guestd" .)

lib=
for dir in "$tmp"/kernel/lib/modules/* "$tmp"/kernel/usr/lib/modules/*; do
	[ ! -e "$dir/modules.builtin" ] || lib=$dir
done
[ -n "$lib" ] || die "$kernel holds no modules"
n=10 # init inserts them in the order of their names
for m in "${modules[@]}"; do
	if grep -q "/$m\.ko" "$lib/modules.builtin"; then
		continue
	fi
	ko=$(find "$lib" -name "$m.ko*" | head -n 1)
	to=$root/modules/$n-$m.ko
	case $ko in
	*.ko) cp "$ko" "$to" ;;
	*.ko.xz) xz -dc "$ko" >"$to" ;;
	*.ko.zst) zstd -qdc "$ko" >"$to" ;;
	'') continue ;; # a kernel of another age: the NIC's absence will tell
	*) die "do not know how to unpack ${ko##*/}" ;;
	esac
	n=$((n + 1))
done

cat >"$root/www/index.html" <<-'PAGE'
	<!doctype html>
	<title>culvert guest</title>
	<p>Hello from inside the VM.
PAGE
# 64 MiB of known bytes without 64 MiB of RAM: guestd says which.
cat >"$root/www/cgi-bin/64MiB" <<-'CGI'
	#!/bin/sh
	printf 'Content-Type: application/octet-stream\r\nContent-Length: 67108864\r\n\r\n'
	exec /bin/guestd -bytes 67108864
CGI
chmod 755 "$root/www/cgi-bin/64MiB"

(cd "$root" && find . | LC_ALL=C sort | cpio --quiet -o -H newc -R 0:0 | gzip -1) >"$tmp/out/initrd.gz"

# Whoever was first wins; a half-made guest is never seen.
mv -T "$tmp/out" "$out" 2>/dev/null || [ -e "$out/initrd.gz" ] || die "cannot write $out"
echo "$out"
