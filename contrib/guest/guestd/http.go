package main

import (
	"fmt"
	"log"
	"net"
	"net/http"
	"strconv"
	"time"
)

// listenHTTP serves a page to clients that may stay connected for a minute.
func listenHTTP(host string, port int) error {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return err
	}
	s := &http.Server{
		IdleTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "Hello from inside the guest, %s\n", r.RemoteAddr)
		}),
	}
	go func() { log.Fatal(s.Serve(l)) }()
	return nil
}
