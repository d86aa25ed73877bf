#!/usr/bin/env bash
#
# Installs what building, the demo or the tests need on Debian 12 or newer and
# Ubuntu 24.04, and nothing that is there already: a second run asks for no
# password and no network.
#
#	install-deps.sh build|demo|test|bench
set -euo pipefail

# Keep in step with go.mod.
go_version=1.26.8
gvproxy_version=v0.8.9
cache=${CULVERT_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/culvert}

die() { echo "install-deps: $*" >&2; exit 1; }

# Debian packages of each step. The kernel is no part: contrib/guest/build.sh
# downloads it without installing it.
build=(make ca-certificates)
demo=(qemu-system-x86 busybox-static cpio gzip xz-utils zstd curl)
# The race detector needs a C compiler; testpmd is DPDK's; the engine is a guest's.
test=(gcc libc6-dev iproute2 dpdk-dev ethtool tshark docker.io iptables bind9-dnsutils debootstrap e2fsprogs)
# The last four are what bench-peers compares with, beside docker.io.
bench=(git iperf3 nftables socat passt slirp4netns)

case ${1:-} in
build) packages=("${build[@]}") ;;
demo) packages=("${build[@]}" "${demo[@]}") ;;
test) packages=("${build[@]}" "${demo[@]}" "${test[@]}") ;;
bench) packages=("${build[@]}" "${demo[@]}" "${test[@]}" "${bench[@]}") ;;
*) die "usage: install-deps.sh build|demo|test|bench" ;;
esac

command -v apt-get >/dev/null || die "this is no Debian or Ubuntu; install by hand: Go $go_version ${packages[*]}"

sudo=
[ "$(id -u)" = 0 ] || sudo=sudo

updated=
apt_install() {
	[ -z "$sudo" ] || command -v sudo >/dev/null || die "missing $*; become root, or install sudo"
	[ -n "$updated" ] || $sudo apt-get -q update
	updated=yes
	$sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends "$@"
}

missing=()
for p in "${packages[@]}"; do
	dpkg-query -W -f '${db:Status-Status}\n' "$p" 2>/dev/null | grep -qx installed || missing+=("$p")
done
[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"

# The guest's kernel is looked up in apt's lists, which a fresh image has not.
if [[ $1 != build ]] && [ -z "$(apt-cache depends linux-image-cloud-amd64 linux-image-virtual 2>/dev/null)" ]; then
	$sudo apt-get -q update
fi

# Go from 1.21 fetches the toolchain that go.mod asks for by itself. Debian
# 12's 1.19 does not, but it can download and verify it like any module; what
# is left to do is what 1.21 would do: permissions, and _go.mod's real name.
go_minor() { go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p'; }
PATH=$cache/go/bin:/usr/local/go/bin:$PATH
if ! command -v go >/dev/null; then
	apt_install golang-go
	hash -r
fi
if [ "$(go_minor)" -lt 21 ]; then
	arch=$(dpkg --print-architecture)
	module=golang.org/toolchain@v0.0.1-go$go_version.linux-$arch
	echo "install-deps: $(go env GOVERSION) is too old; fetching Go $go_version to $cache/go"
	mkdir -p "$cache"
	tmp=$(mktemp -d "$cache/go.XXXXXX")
	trap 'chmod -R u+w "$tmp"; rm -rf "$tmp"' EXIT
	(cd "$tmp" && GOFLAGS=-modcacherw GOMODCACHE=$tmp/mod go mod download "$module") ||
		die "cannot fetch $module; install Go $go_version from https://go.dev/dl/ instead"
	go=$tmp/mod/$module
	chmod +x "$go"/bin/* "$go"/pkg/tool/*/*
	find "$go" -name _go.mod -execdir mv {} go.mod ';'
	rm -rf "$cache/go"
	mv -T "$go" "$cache/go"
fi

# gvproxy, a peer, and its forwarder in the guest are no package of Debian 12.
if [ "$1" = bench ] && [[ $("$cache/bin/gvproxy" -version 2>/dev/null) != *" $gvproxy_version" || ! -x $cache/bin/vm ]]; then
	tools=github.com/containers/gvisor-tap-vsock/cmd
	GOBIN=$cache/bin go install "$tools/gvproxy@$gvproxy_version" "$tools/vm@$gvproxy_version" ||
		echo "install-deps: cannot build gvproxy $gvproxy_version; it will be left out" >&2
fi
