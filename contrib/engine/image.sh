#!/usr/bin/env bash
#
# Writes the image of the tests' containers, busybox and guestd, to a tar for
# `docker import`. Needs no root.
#
#	image.sh FILE.tar
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
busybox=$(command -v busybox) || { echo "image: busybox is missing: apt-get install busybox-static" >&2; exit 1; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp"/{bin,etc,tmp,www}
cp "$busybox" "$tmp/bin/busybox"
for applet in $("$busybox" --list); do
	[ "$applet" = busybox ] || ln -s busybox "$tmp/bin/$applet"
done
(cd "$here/../guest/guestd" && CGO_ENABLED=0 GOOS=linux GOARCH=amd64 go build -trimpath -ldflags='-s -w' -o "$tmp/bin/guestd" .)
tar -C "$tmp" --owner=0 --group=0 -cf "$1" .
