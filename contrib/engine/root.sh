#!/usr/bin/env bash
#
# Installs this machine's own distribution with its docker.io into a directory of
# its own, and prints the tar that it made of it: what build.sh begins with, kept
# by itself because it is what takes minutes. Needs root, and asks the mirror that
# apt is set up with.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CULVERT_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/culvert}

packages=(docker.io iproute2 iptables busybox-static kmod)

die() { echo "engine: $*" >&2; exit 1; }

suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
versions=$(apt-cache show --no-all-versions "${packages[@]}" | awk '/^(Package|Version):/ {print $2}')
[ -n "$versions" ] || die "apt knows no docker.io; run apt-get update as root"
out=$cache/engine-root-$({ echo "$suite $versions"; cat "$here/root.sh"; } | sha256sum | cut -c1-16).tar
if [ -e "$out" ]; then
	echo "$out"
	exit
fi
[ "${1:-}" != -n ] || die "the VM's disk has not been made; run contrib/engine/build.sh as root"
[ "$(id -u)" = 0 ] || die "debootstrap needs root"

# What apt itself asks for this release: "URI COMPONENT", a line for each.
targets=$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT)' 'Identifier: Packages' "Codename: $suite")
mirror=$(awk '{print $1; exit}' <<<"$targets")
[ -n "$mirror" ] || die "apt is set up with no mirror of $suite"
components=$(awk -v m="$mirror" '$1 == m {print $2}' <<<"$targets" | sort -u | paste -sd,)

mkdir -p "$cache"
tmp=$(mktemp -d "$cache/building.XXXXXX")
# debootstrap takes away what it mounts; ended in the middle it does not.
trap 'umount "$tmp"/root/proc "$tmp"/root/sys 2>/dev/null || true; rm -rf --one-file-system "$tmp"' EXIT
echo "engine: installing ${packages[*]} from $suite" >&2
include=$(IFS=,; echo "${packages[*]}")
debootstrap --variant=minbase --components="$components" --include="$include" "$suite" "$tmp/root" "$mirror" >"$tmp/log" 2>&1 ||
	die "debootstrap: $(tail -n 5 "$tmp/log")"
# The engine's rules in the form that every kernel has.
for ip in iptables ip6tables; do
	chroot "$tmp/root" update-alternatives --set $ip /usr/sbin/$ip-legacy >/dev/null
done
rm -rf "$tmp"/root/usr/share/{doc,info,locale,man} "$tmp"/root/var/{cache/apt,lib/apt/lists}/*
tar -C "$tmp/root" --one-file-system -cf "$tmp/root.tar" .
mv "$tmp/root.tar" "$out"
echo "$out"
