package bench

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/vishvananda/netlink"
)

// longest is that of a frame: MTU and Ethernet header.
const longest = mtu + 14

// roleNIC PREFIX stream PATH, or PREFIX dgram PATH OURS: is what a VMM without
// offloads does for a guest. It joins tap0, with the address PREFIX in the namespace
// it runs in, to culvert's socket at PATH: one datagram a frame, from a socket at
// OURS, or QEMU's length of four bytes before each. It waits for nothing but input,
// on either side.
func roleNIC(args []string) error {
	tap := &netlink.Tuntap{
		LinkAttrs: netlink.LinkAttrs{Name: "tap0"}, Mode: iffTAP, Flags: netlink.TuntapFlag(iffNoPI), Queues: 1, NonPersist: true,
	}
	if err := netlink.LinkAdd(tap); err != nil {
		return fmt.Errorf("tap: %w", err)
	}
	frames := tap.Fds[0]
	addr, err := netlink.ParseAddr(args[0])
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(tap, addr); err != nil {
		return err
	}
	var wire net.Conn
	header := 0 // bytes before a frame
	if args[1] == "stream" {
		wire, err = net.Dial("unix", args[2])
		header = 4
	} else {
		wire, err = net.DialUnix("unixgram", &net.UnixAddr{Name: args[3], Net: "unixgram"}, &net.UnixAddr{Name: args[2], Net: "unixgram"})
	}
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(tap); err != nil {
		return err
	}
	ended := make(chan error, 3)
	go func() { ended <- fromGuest(frames, wire, header) }()
	go func() {
		if header > 0 {
			ended <- toGuestStream(wire, frames)
		} else {
			ended <- toGuestDatagrams(wire, frames)
		}
	}()
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		ended <- err
	}()
	fmt.Println("ready")
	return <-ended
}

func fromGuest(tap io.Reader, wire io.Writer, header int) error {
	b := make([]byte, header+longest)
	for {
		n, err := tap.Read(b[header:])
		if err != nil {
			return err
		}
		if header > 0 {
			binary.BigEndian.PutUint32(b, uint32(n))
		}
		if _, err := wire.Write(b[:header+n]); err != nil {
			return err
		}
	}
}

func toGuestStream(wire io.Reader, tap io.Writer) error {
	in := bufio.NewReaderSize(wire, 256<<10)
	var length [4]byte
	b := make([]byte, longest)
	for {
		if _, err := io.ReadFull(in, length[:]); err != nil {
			return err
		}
		n := binary.BigEndian.Uint32(length[:])
		if n > longest {
			return fmt.Errorf("a frame of %d bytes", n)
		}
		if _, err := io.ReadFull(in, b[:n]); err != nil {
			return err
		}
		if _, err := tap.Write(b[:n]); err != nil {
			return err
		}
	}
}

func toGuestDatagrams(wire io.Reader, tap io.Writer) error {
	b := make([]byte, longest)
	for {
		n, err := wire.Read(b)
		if err != nil {
			return err
		}
		if _, err := tap.Write(b[:n]); err != nil {
			return err
		}
	}
}
