package main

import (
	"log"
	"net"
	"strconv"
)

// maxDatagram is the longest UDP payload over IPv4: 65535 − 20 − 8.
const maxDatagram = 65507

// listenUDP gives each datagram of a port to answer, one after the other.
func listenUDP(host string, port int, answer func(c net.PacketConn, data []byte, from net.Addr)) error {
	c, err := net.ListenPacket("udp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return err
	}
	// A burst of the longest datagrams must fit; the kernel caps what it will
	// not give.
	c.(*net.UDPConn).SetReadBuffer(4 << 20)
	go func() {
		buf := make([]byte, maxDatagram)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				// An earlier answer to a client that has left comes back
				// as an error here.
				log.Printf("read udp port %d: %v", port, err)
				continue
			}
			answer(c, buf[:n], from)
		}
	}()
	return nil
}

func echoUDP(c net.PacketConn, data []byte, from net.Addr) { c.WriteTo(data, from) }

// echoOtherPort answers as a TFTP server does, from a port of its own
// (RFC 1350, 4), and once more from the one that was asked, so that the client
// can tell which of the two a relay lets through.
func echoOtherPort(c net.PacketConn, data []byte, from net.Addr) {
	other, err := net.ListenPacket("udp", net.JoinHostPort(host(c), "0"))
	if err != nil {
		return
	}
	defer other.Close()
	other.WriteTo(append([]byte("other "), data...), from)
	c.WriteTo(append([]byte("same "), data...), from)
}

func host(c net.PacketConn) string {
	h, _, _ := net.SplitHostPort(c.LocalAddr().String())
	return h
}
