// Guestd is the test servers of the guest: one program that answers, stays
// silent, half-closes and resets, each on a port of its own.
//
// It is no part of culvert, which needs nothing inside a guest. It runs as the
// only servers of the VM that build.sh makes, and directly in a network
// namespace where that plays the guest.
//
//	port      tcp                                    udp
//	7         echo                                   echo
//	8080      HTTP with keep-alive for 60 s
//	9000      asks what an observer saw (below)
//	9001      reads to the end, answers "SHA256 LENGTH\n"
//	9002      reads "N\n", sends N known bytes
//	9003      reads to the end, answers "OK LENGTH\n" 50 ms later
//	9004      the same 500 ms later
//	9005      the same 5 s later
//	9006      the same 90 s later
//	9007      sends 64 KiB of known bytes after 200 ms, reads nothing
//	9008      reads one byte and closes with the rest unread: a reset
//	9009      never reads
//	9010      reads nothing for 3 s, then as 9001
//	9011      writes without end
//	9012      reads a line, writes it back, closes
//	9013      closes after 300 ms
//	9014      observer: reads "ID\n" and to the end
//	9015      observer that sends "hello\n" and a FIN first
//	9053                                             echo from another port
//
// Known bytes are the ChaCha8 stream (math/rand/v2) of the seed that is 32
// zero bytes, so the other end compares without being told. An observer keeps
// how its flow ended; 9000 reads "ID\n", waits for that at most a minute, and
// answers "END LENGTH SHA256\n", END being eof, reset or error.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"time"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("guestd: ")
	listen := flag.String("listen", "", "address to listen on; none means every one")
	ready := flag.String("ready", "", "file to make once everything listens")
	bytes := flag.Int64("bytes", 0, "write that many known bytes to standard output and leave")
	flag.Parse()

	if *bytes > 0 {
		if _, err := io.CopyN(os.Stdout, known(), *bytes); err != nil {
			log.Fatal(err)
		}
		return
	}

	obs := newObservations()
	for port, serve := range map[int]func(*net.TCPConn){
		7:    echo,
		9000: obs.report,
		9001: sink,
		9002: source,
		9003: answerAfter(50 * time.Millisecond),
		9004: answerAfter(500 * time.Millisecond),
		9005: answerAfter(5 * time.Second),
		9006: answerAfter(90 * time.Second),
		9007: greet,
		9008: resetUnread,
		9009: neverRead,
		9010: readLate,
		9011: flood,
		9012: line,
		9013: closeFirst,
		9014: obs.observe,
		9015: obs.closeThenObserve,
	} {
		must(listenTCP(*listen, port, serve))
	}
	must(listenHTTP(*listen, 8080))
	must(listenUDP(*listen, 7, echoUDP))
	must(listenUDP(*listen, 9053, echoOtherPort))

	if *ready != "" {
		must(os.WriteFile(*ready, []byte(fmt.Sprintln(os.Getpid())), 0o644))
	}
	select {}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
