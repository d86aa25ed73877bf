#!/usr/bin/env bash
#
# Builds the kube-apiserver of the tests and prints the directory that holds it.
# No release is downloaded: Kubernetes is a Go module like any other, and a
# machine that can build culvert can build it, in 5 to 15 minutes the first time.
#
# The result is cached by a hash of everything that goes into it, outside the
# tree: $CULVERT_CACHE, else $XDG_CACHE_HOME/culvert, else ~/.cache/culvert.
# Needs no root. The tests also want etcd: contrib/install-deps.sh installs it.
#
#	build.sh -n	only says where it is, and fails when it is not there
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/apiserver
cache=${CULVERT_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/culvert}

die() { echo "kube: $*" >&2; exit 1; }

command -v go >/dev/null || die "go is missing; contrib/install-deps.sh installs it"
key=$({ cd "$here" && go version && cat ../build.sh main.go go.mod go.sum; } | sha256sum | cut -c1-16)
out=$cache/kube-$key
if [ -x "$out/kube-apiserver" ]; then
	echo "$out"
	exit
fi
[ "${1:-}" != -n ] || die "no kube-apiserver has been built; run contrib/kube/build.sh"

mkdir -p "$cache"
tmp=$(mktemp -d "$cache/building.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
echo "kube: making $out, which takes some minutes" >&2
(cd "$here" && CGO_ENABLED=0 GOFLAGS=-mod=readonly nice go build -buildvcs=false -trimpath -ldflags='-s -w' -o "$tmp/out/kube-apiserver" .)

# Whoever was first wins; a half-made one is never seen.
mv -T "$tmp/out" "$out" 2>/dev/null || [ -x "$out/kube-apiserver" ] || die "cannot write $out"
echo "$out"
