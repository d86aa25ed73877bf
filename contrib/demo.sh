#!/usr/bin/env bash
#
# A real VM's ports on this host, in a minute: builds culvert and the guest,
# boots it under QEMU, publishes a TCP and a UDP port, goes through both, shows
# the ledger, and stops what it started. Needs no root: contrib/install-deps.sh
# demo, which `make demo` runs first, does where packages are missing.
#
# ATTACH says how the VM is attached: stream, as without it, or vhost-user.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
[ -t 1 ] && [ -z "${NO_COLOR:-}" ] || step() { printf '\n== %s\n' "$*"; }
show() { printf '$ %s\n' "$*"; "$@"; }

attach=${ATTACH:-stream}
case $attach in
stream | vhost-user) ;;
*)
	echo "demo: ATTACH=$attach: want stream or vhost-user" >&2
	exit 2
	;;
esac

run=$(mktemp -d "${TMPDIR:-/tmp}/culvert-demo.XXXXXX")
daemon= vm=

# fail says what went wrong and shows the two logs that know why.
fail() {
	echo "demo: $*" >&2
	for log in "$run"/*.log; do
		[ -s "$log" ] || continue
		echo "--- last lines of ${log##*/}" >&2
		tail -n 15 "$log" >&2
	done
	exit 1
}

# stop ends what this script started, by process id, and nothing else.
stop() {
	trap - EXIT
	for pid in $vm $daemon; do
		kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null
	done
	rm -rf "$run"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# free_port prints the first number from $1 on that no TCP server of this host answers.
free_port() {
	local p=$1
	while (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null; do p=$((p + 1)); done
	echo "$p"
}

step "Build"
make --no-print-directory build || fail "the build failed"
PATH=$PWD/bin:$PATH
guest=$(contrib/guest/build.sh) || fail "the guest could not be made"
accel=${GUEST_ACCEL:-$(contrib/guest/accel.sh "$guest")}
case $accel in
kvm*) echo "The VM runs under KVM." ;;
*) echo "KVM does not boot a guest here; the VM runs under software emulation." ;;
esac

export CULVERT_API=$run/culvert.sock
http=$(free_port 8080)
echo=$(free_port $((http + 1)))

sock=$run/vm.sock
case $attach in
stream)
	spec=qemu:unix:$sock
	nic=(-netdev "stream,id=n0,server=off,addr.type=unix,addr.path=$sock")
	shown="${nic[*]} -device virtio-net-pci,netdev=n0"
	;;
vhost-user) # boot.sh shares the memory
	spec=vhost-user:$sock
	nic=("$spec")
	shown="-object memory-backend-memfd,id=m,size=512M,share=on -numa node,memdev=m \\
    -chardev socket,id=c0,path=$sock,reconnect=1 -netdev vhost-user,id=n0,chardev=c0 -device virtio-net-pci,netdev=n0"
	case $accel in tcg*) shown+=,vectors=0 ;; esac # see boot.sh
	;;
esac

step "Start the daemon, with one VM and two ports published"
printf '$ culvert daemon --attach demo=%s -p %s:80 -p %s:7/udp\n' "$spec" "$http" "$echo"
culvert daemon --attach "demo=$spec" -p "$http:80" -p "$echo:7/udp" >"$run/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 100); do # 10 s
	[ ! -S "$CULVERT_API" ] || [ ! -S "$sock" ] || break
	kill -0 "$daemon" 2>/dev/null || fail "the daemon ended"
	sleep 0.1
done
[ -S "$sock" ] || fail "the daemon does not listen on $sock"
show culvert ls

step "Boot the VM"
printf '$ qemu-system-x86_64 … %s\n' "$shown"
GUEST_ACCEL=$accel contrib/guest/boot.sh "$guest" "${nic[@]}" </dev/null >"$run/vm.log" 2>&1 &
vm=$!
show culvert wait --timeout 60s || fail "the VM did not become ready"

step "Fetch a page from the VM's port 80"
# The node answers before its servers listen: give them a moment.
for _ in $(seq 100); do # 10 s
	grep -aq 'guest ready' "$run/vm.log" && break
	kill -0 "$vm" 2>/dev/null || fail "the VM ended"
	sleep 0.1
done
show curl -sS --fail --max-time 10 "http://localhost:$http/" || fail "no page came through port $http"

step "Send a datagram to the VM's UDP echo and back"
exec 3<>"/dev/udp/127.0.0.1/$echo"
printf 'hello over UDP' >&3
answer=$(timeout 10 head -c 14 <&3) || true
exec 3>&-
[ "$answer" = 'hello over UDP' ] || fail "no echo came back through UDP port $echo"
echo "$answer"

step "What is published, and by whom"
show culvert ls
show culvert vms

step "Stop"
stop
echo "The VM and the daemon have ended; ports $http and $echo are free again."
