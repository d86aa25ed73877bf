#!/usr/bin/env bash
#
# Makes the cluster of the tests, as far as there is one, and prints the
# directory that holds it:
#
#	kube-apiserver	Kubernetes' own, built from its Go module: 6 minutes of
#		processor time, the first time
#	etcd	this machine's, or the distribution's, unpacked and not
#		installed: its package would start a service
#
# The result is cached by a hash of everything that goes into it, outside the
# tree: $CULVERT_CACHE, else $XDG_CACHE_HOME/culvert, else ~/.cache/culvert.
# Needs no root.
#
#	build.sh -n	only says where it is, and fails when it is not there
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CULVERT_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/culvert}
build=(env CGO_ENABLED=0 GOFLAGS=-mod=readonly go build -buildvcs=false -trimpath '-ldflags=-s -w')

die() { echo "kube: $*" >&2; exit 1; }

command -v go >/dev/null || die "go is missing; contrib/install-deps.sh installs it"
cd "$here/apiserver"
key=$({ go version; echo "${build[@]}"; cat main.go go.mod go.sum; } | sha256sum | cut -c1-16)
out=$cache/kube-$key
if [ -x "$out/kube-apiserver" ] && [ -x "$out/etcd" ]; then
	echo "$out"
	exit
fi
[ "${1:-}" != -n ] || die "no API server has been built; run contrib/kube/build.sh"

mkdir -p "$out"
tmp=$(mktemp -d "$cache/building.XXXXXX")
trap 'rm -rf "$tmp"' EXIT

# A half-made file is never seen, and whoever is last changes nothing.
if [ ! -x "$out/kube-apiserver" ]; then
	echo "kube: building $out/kube-apiserver, which takes some minutes" >&2
	nice "${build[@]}" -o "$tmp/kube-apiserver" .
	mv "$tmp/kube-apiserver" "$out/"
fi
if ! etcd=$(command -v etcd); then
	for tool in apt-get dpkg-deb; do
		command -v "$tool" >/dev/null || die "etcd is missing, and so is $tool, which would fetch it"
	done
	# As root apt would download as the user _apt, who may not write here.
	(cd "$tmp" && apt-get -q -o APT::Sandbox::User=root download etcd-server >&2) ||
		die "cannot download etcd-server; if apt's lists are old, run apt-get update as root"
	dpkg-deb -x "$tmp"/etcd-server_*.deb "$tmp/etcd-server"
	etcd=$tmp/etcd-server/usr/bin/etcd
fi
cp "$etcd" "$tmp/etcd"
mv "$tmp/etcd" "$out/"
echo "$out"
