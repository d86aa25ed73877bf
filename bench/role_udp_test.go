package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/net/ipv4"
)

// A datagram starts with the time of its sending, in nanoseconds.
const udpHeader = 8

// roleSink ADDR: counts the datagrams that come to ADDR until its standard input ends
// and prints how many, over how many seconds, and their jitter in microseconds: the
// mean difference between the times that one and the one before were under way
// (RFC 3550, 6.4.1, not smoothed).
func roleSink(args []string) error {
	c, err := net.ListenPacket("udp4", args[0])
	if err != nil {
		return err
	}
	return sink(c)
}

// roleAsk ADDR: is a sink for what a roleAnswer at ADDR sends it.
func roleAsk(args []string) error {
	to, err := net.ResolveUDPAddr("udp4", args[0])
	if err != nil {
		return err
	}
	c, err := net.ListenPacket("udp4", ":0")
	if err != nil {
		return err
	}
	if _, err := c.WriteTo(make([]byte, udpHeader), to); err != nil {
		return err
	}
	return sink(c)
}

func sink(c net.PacketConn) error {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = c.Close()
	}()
	fmt.Println("ready")
	msgs := make([]ipv4.Message, 64)
	for i := range msgs {
		msgs[i].Buffers = [][]byte{make([]byte, 2048)}
	}
	batches := ipv4.NewPacketConn(c)
	var count int
	var first, last time.Time
	var before, jitter float64
	for {
		n, err := batches.ReadBatch(msgs, 0)
		if errors.Is(err, net.ErrClosed) {
			break
		}
		if err != nil {
			return err
		}
		last = time.Now()
		for _, m := range msgs[:n] {
			transit := float64(last.UnixNano() - int64(binary.BigEndian.Uint64(m.Buffers[0])))
			if count == 0 {
				first = last
			} else {
				jitter += math.Abs(transit - before)
			}
			before = transit
			count++
		}
	}
	fmt.Println(count, last.Sub(first).Seconds(), jitter/float64(max(count-1, 1))/1e3)
	return nil
}

// roleBlast ADDR SIZE RATE SECONDS: sends datagrams of SIZE bytes, RATE a second in
// one burst a millisecond, or with 0 as many as it can, and prints how many it sent.
func roleBlast(args []string) error {
	c, err := net.Dial("udp4", args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	fmt.Println("ready")
	return blast(c, c.Write, args[1:])
}

// roleAnswer ADDR SIZE RATE SECONDS: does so to who sends ADDR the first datagram.
func roleAnswer(args []string) error {
	c, err := net.ListenPacket("udp4", args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	fmt.Println("ready")
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	_, from, err := c.ReadFrom(make([]byte, udpHeader))
	if err != nil {
		fmt.Println(0)
		return err
	}
	return blast(c, func(b []byte) (int, error) { return c.WriteTo(b, from) }, args[1:])
}

func blast(c interface{ SetDeadline(time.Time) error }, write func([]byte) (int, error), args []string) error {
	var n [3]int
	for i := range n {
		var err error
		if n[i], err = strconv.Atoi(args[i]); err != nil {
			return err
		}
	}
	size, rate, length := n[0], float64(n[1]), time.Duration(n[2])*time.Second
	payload := make([]byte, max(size, udpHeader))
	sent := 0
	start := time.Now()
	if err := c.SetDeadline(start.Add(length)); err != nil { // it blocks on a relay that has stopped reading
		return err
	}
	for now := start; now.Sub(start) < length; now = time.Now() {
		if rate > 0 && float64(sent) >= now.Sub(start).Seconds()*rate {
			time.Sleep(time.Millisecond)
			continue
		}
		binary.BigEndian.PutUint64(payload, uint64(now.UnixNano()))
		if _, err := write(payload); err == nil { // an ICMP error of an earlier one is a loss like any
			sent++
		}
	}
	fmt.Println(sent)
	return nil
}
