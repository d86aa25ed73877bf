package listener

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"unicode"
)

const (
	// maxProcesses and maxFDs bound the search for a socket's process: enough for
	// a big host, and some 100 ms of readlink(2) at ~1 µs each.
	maxProcesses = 16384
	maxFDs       = 1 << 17

	// stateListen is TCP_LISTEN as proc_net_tcp(5) has it.
	stateListen = "0A"
)

// holder names the process that keeps ap from being bound: "nginx (pid 123)".
// It is "another process" when the kernel does not tell: other users' files are
// closed to us, and a process in another network or pid namespace, or a socket
// that is bound and no more, is not listed.
func holder(proto Proto, ap netip.AddrPort) string {
	const unknown = "another process"
	inode := socketInode(proto, ap)
	if inode == "" {
		return unknown
	}
	pid := processWith("socket:[" + inode + "]")
	if pid == "" {
		return unknown
	}
	name := "a process"
	if comm, err := os.ReadFile("/proc/" + pid + "/comm"); err == nil {
		name = printable(strings.TrimSuffix(string(comm), "\n"))
	}
	return fmt.Sprintf("%s (pid %s)", name, pid)
}

// Bound reports whether a socket of this process is bound at ap: for TCP, listens
// there. It asks the kernel, not this package's own books.
func Bound(proto Proto, ap netip.AddrPort) bool {
	inode := socketInode(proto, ap)
	if inode == "" {
		return false
	}
	ours, _ := hasFile("/proc/self/fd", "socket:["+inode+"]", maxFDs)
	return ours
}

// Holder names the process that has ap, or would keep it from being bound; "" when
// the kernel tells of no socket there.
func Holder(proto Proto, ap netip.AddrPort) string {
	if socketInode(proto, ap) == "" {
		return ""
	}
	return holder(proto, ap)
}

// printable cleans a process name, which the process chose itself.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) && r != unicode.ReplacementChar {
			return r
		}
		return '?'
	}, s)
}

// socketInode returns the inode of a socket that ap collides with: a listening
// one rather than a connected one; "" if there is none.
func socketInode(proto Proto, ap netip.AddrPort) (inode string) {
	for _, table := range []string{proto.String(), proto.String() + "6"} {
		// The thread's own, as the caller may be in another network namespace.
		f, err := os.Open("/proc/thread-self/net/" + table)
		if err != nil {
			continue
		}
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			local, state, ino, ok := parseSocketLine(lines.Text())
			if !ok || ino == "0" || !collides(ap, local) {
				continue
			}
			if state == stateListen {
				f.Close()
				return ino
			}
			if inode == "" {
				inode = ino
			}
		}
		f.Close()
	}
	return inode
}

// collides reports whether a socket at local can be what keeps ap. A v6
// wildcard may be one for both families.
func collides(ap, local netip.AddrPort) bool {
	a, l := ap.Addr(), local.Addr().Unmap()
	if ap.Port() != local.Port() {
		return false
	}
	return a == l || l == netip.IPv6Unspecified() || a.Is4() == l.Is4() && (a.IsUnspecified() || l.IsUnspecified())
}

// parseSocketLine reads a line of /proc/net/tcp and its like: its second field
// is the local address as hexadecimal words in host byte order, a colon and the
// port; the fourth is the state, the tenth the inode (proc_net_tcp(5)).
func parseSocketLine(line string) (local netip.AddrPort, state, inode string, ok bool) {
	f := strings.Fields(line)
	if len(f) < 10 {
		return netip.AddrPort{}, "", "", false
	}
	words, port, found := strings.Cut(f[1], ":")
	b, err := hex.DecodeString(words)
	p, perr := strconv.ParseUint(port, 16, 16)
	if !found || err != nil || perr != nil || len(b) != 4 && len(b) != 16 {
		return netip.AddrPort{}, "", "", false
	}
	if _, err := strconv.ParseUint(f[9], 10, 64); err != nil {
		return netip.AddrPort{}, "", "", false
	}
	for i := 0; i < len(b); i += 4 { // host order to network order
		binary.BigEndian.PutUint32(b[i:], binary.NativeEndian.Uint32(b[i:]))
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a, uint16(p)), f[3], f[9], true
}

// processWith returns the pid of a process that has a descriptor whose link
// reads link, "" when none is seen.
func processWith(link string) string {
	proc, err := os.Open("/proc")
	if err != nil {
		return ""
	}
	defer proc.Close()
	names, _ := proc.Readdirnames(2 * maxProcesses) // what is no process is few
	seen := 0
	for _, pid := range names {
		if pid[0] < '1' || pid[0] > '9' {
			continue
		}
		has, n := hasFile("/proc/"+pid+"/fd", link, maxFDs-seen)
		if has {
			return pid
		}
		if seen += n; seen >= maxFDs {
			return ""
		}
	}
	return ""
}

// hasFile reports whether one of at most most descriptors in dir, a process's, has
// a link that reads link, and how many it has looked at.
func hasFile(dir, link string, most int) (has bool, seen int) {
	d, err := os.Open(dir)
	if err != nil {
		return false, 0 // gone, or not ours to see
	}
	defer d.Close()
	fds, _ := d.Readdirnames(most)
	for _, fd := range fds {
		if l, err := os.Readlink(dir + "/" + fd); err == nil && l == link {
			return true, len(fds)
		}
	}
	return false, len(fds)
}

// unprivilegedPortStart is the first port that needs no privilege; -1 when the
// kernel does not tell.
func unprivilegedPortStart() int {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return -1
	}
	return n
}
