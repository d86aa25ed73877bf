package bench

import (
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// patience is how long a client waits for an answer before it counts as none.
const patience = 5 * time.Second

// roleEcho ADDR...: answers every byte, for any number of connections.
func roleEcho(addrs []string) error {
	for _, addr := range addrs {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					b := make([]byte, 1024)
					for {
						n, err := c.Read(b)
						if err != nil {
							return
						}
						if _, err := c.Write(b[:n]); err != nil {
							return
						}
					}
				}()
			}
		}()
	}
	fmt.Println("ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// roleHold N ADDR...: opens N connections, by turns to each ADDR, passes a byte over
// each both ways, and holds them.
func roleHold(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	addrs := args[1:]
	conns := make([]net.Conn, n)
	next := make(chan int)
	failed := make(chan error, n)
	var opening sync.WaitGroup
	for range 16 {
		opening.Go(func() {
			for i := range next {
				c, err := net.DialTimeout("tcp", addrs[i%len(addrs)], patience)
				if err == nil {
					conns[i] = c
					_ = c.SetDeadline(time.Now().Add(patience))
					err = bounce(c)
				}
				if err != nil {
					failed <- fmt.Errorf("connection %d: %w", i, err)
				}
			}
		})
	}
	for i := range conns {
		if len(failed) > 0 {
			break
		}
		next <- i
	}
	close(next)
	opening.Wait()
	if len(failed) > 0 {
		return <-failed
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	for _, c := range conns {
		_ = c.Close()
	}
	return err
}

func bounce(c net.Conn) error {
	b := [1]byte{'x'}
	if _, err := c.Write(b[:]); err != nil {
		return err
	}
	_, err := io.ReadFull(c, b[:])
	return err
}

// rolePingPong ADDR SECONDS: passes a byte to and fro over and over and prints the
// median, the 99th and the 99.9th percentile in microseconds.
func rolePingPong(args []string) error {
	secs, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	c, err := net.Dial("tcp", args[0])
	if err != nil {
		return err
	}
	defer c.Close()
	start := time.Now()
	end := start.Add(time.Duration(secs) * time.Second)
	if err := c.SetDeadline(end.Add(patience)); err != nil {
		return err
	}
	var took []time.Duration
	for start.Before(end) {
		if err := bounce(c); err != nil {
			return err
		}
		now := time.Now()
		took = append(took, now.Sub(start))
		start = now
	}
	slices.Sort(took)
	fmt.Println("ready")
	for _, permille := range []int{500, 990, 999} {
		fmt.Print(float64(took[len(took)*permille/1000].Nanoseconds())/1e3, " ")
	}
	fmt.Println()
	return nil
}

// roleConnect ADDR CLIENTS SECONDS: connects, passes a byte to and fro and
// closes, over and over, and prints how often a second, and how many failed.
func roleConnect(args []string) error {
	clients, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	secs, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	var done, failed atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(time.Duration(secs) * time.Second)
	for range clients {
		wg.Go(func() {
			for time.Now().Before(end) {
				c, err := net.DialTimeout("tcp", args[0], patience)
				if err == nil {
					_ = c.SetDeadline(time.Now().Add(patience))
					err = bounce(c)
					_ = c.Close()
				}
				if err != nil {
					failed.Add(1)
					continue
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println("ready")
	fmt.Println(float64(done.Load())/float64(secs), failed.Load())
	return nil
}
