package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/cmd/internal/daemon"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/spf13/cobra"
)

func newTrace() *cobra.Command {
	var o traceOptions
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Show the frames that pass a VM's link, or write them to a file",
		Long: `Shows every frame between culvert and the VMs as it passes, a line each, or writes
them as pcapng, which Wireshark and tshark read: with whose flow each belongs to, and
why a frame was dropped, as comments. "In" is what the guest sent, "Out" what goes to
it. It costs the traffic nothing while nobody looks; who looks too slowly misses
frames, and is told how many, but stops no traffic.

  culvert trace -f 'tcp port 80 and not host 10.0.2.9'
  culvert trace --drops
  culvert trace -w - | wireshark -k -i -
  culvert trace --vm vm1 -w vm1.pcapng -C 100
  culvert trace --last -w crash.pcapng

A filter is in the language of tcpdump (pcap-filter(7)), of which it knows

  [ether|ip|ip6|arp|tcp|udp|icmp|icmp6] [src|dst] [host|net|port|portrange] VALUE
  ether, ip, ip6, arp, tcp, udp, icmp, icmp6, broadcast, multicast,
  inbound, outbound, less N, greater N, and, or, not, parentheses

with numbers for hosts and ports.`,
		Args: noArgs("a filter goes behind -f, in quotes"),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&o.request.VM, "vm", "", "only frames of this VM, by `NAME`")
	flags.StringVarP(&o.file, "write", "w", "", "write pcapng to `FILE`; - is standard output")
	flags.StringVarP(&o.request.Filter, "filter", "f", "", "only frames that `FILTER` matches")
	flags.IntVarP(&o.count, "count", "c", 0, "end after `N` frames")
	flags.BoolVar(&o.request.Drops, "drops", false, "only frames that culvert dropped")
	flags.IntVarP(&o.request.Snap, "snapshot-length", "s", 0, "keep `N` bytes of a frame; 0 keeps all")
	flags.IntVarP(&o.rotateMB, "file-size", "C", 0, "begin another file after `N` million bytes")
	flags.IntVarP(&o.rotateSeconds, "rotate-seconds", "G", 0, "begin another file after `N` seconds")
	flags.BoolVar(&o.last, "last", false, "what the flight recorder holds, also after the daemon has died")
	return cmd
}

type traceOptions struct {
	request       api.TraceRequest
	file          string
	count         int
	rotateMB      int
	rotateSeconds int
	last          bool
}

func (o *traceOptions) run(cmd *cobra.Command) error {
	filter, err := o.check(cmd.OutOrStdout())
	if err != nil {
		return &usageError{err}
	}
	// What passed before the interrupt is still on its way for a moment.
	ctx, cancel := context.WithCancel(context.WithoutCancel(cmd.Context()))
	defer cancel()
	interrupted := make(chan struct{})
	defer context.AfterFunc(cmd.Context(), func() {
		close(interrupted)
		time.AfterFunc(traceGrace, cancel)
	})()
	c := client(cmd)
	defer c.Close()
	in, err := o.open(ctx, cmd, c)
	if err != nil {
		if cmd.Context().Err() != nil {
			return nil
		}
		return err
	}
	defer in.Close()
	var out traceSink = &traceLines{out: bufio.NewWriter(cmd.OutOrStdout())}
	if o.file != "" {
		out = &traceFiles{path: o.file, stdout: cmd.OutOrStdout(), size: int64(o.rotateMB) * 1e6, every: time.Duration(o.rotateSeconds) * time.Second}
	}
	t := &traced{options: o, out: out, in: trace.NewBlockReader(in), interrupted: interrupted}
	if o.last {
		t.filter = filter // of a live trace it is the daemon's work
	}
	err = t.copy()
	if closeErr := out.end(t); err == nil {
		err = closeErr
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%d frames, %d lost\n", t.frames, t.lost())
	switch {
	case cmd.Context().Err() != nil, errors.Is(err, errEnough):
		return nil
	case o.last && errors.Is(err, io.EOF):
		return nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return &failedError{"the daemon has ended"}
	}
	return err
}

// check refuses what cannot be meant, before anything is asked of the daemon.
func (o *traceOptions) check(stdout io.Writer) (filter *trace.Filter, err error) {
	if o.request.Filter != "" {
		if filter, err = trace.ParseFilter(o.request.Filter); err != nil {
			return nil, err
		}
	}
	for flag, n := range map[string]int{"-c": o.count, "-s": o.request.Snap, "-C": o.rotateMB, "-G": o.rotateSeconds} {
		if n < 0 {
			return nil, fmt.Errorf("%s %d is less than nothing", flag, n)
		}
	}
	if o.rotateMB+o.rotateSeconds > 0 && (o.file == "" || o.file == "-") {
		return nil, errors.New("-C and -G need a file, by -w")
	}
	if _, terminal := terminalWidth(stdout); terminal && o.file == "-" {
		return nil, errors.New("-w - would write pcapng to the terminal; pipe it, as in `culvert trace -w - | wireshark -k -i -`")
	}
	return filter, nil
}

// open returns the stream that is asked for.
func (o *traceOptions) open(ctx context.Context, cmd *cobra.Command, c *api.Client) (io.ReadCloser, error) {
	if !o.last {
		return c.Trace(ctx, o.request)
	}
	socket, _ := cmd.Flags().GetString("api") // root has it
	files, err := daemon.FlightFiles(socket, o.request.VM)
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, &noFlightError{socket: socket, vm: o.request.VM}
	}
	out, in := io.Pipe()
	go func() { // ends with its stream, which is closed by run
		_, err := trace.WriteFlight(in, files...)
		in.CloseWithError(err)
	}()
	return out, nil
}

// A noFlightError says that there is no flight recorder's file.
type noFlightError struct{ socket, vm string }

func (e *noFlightError) Error() string {
	of := ""
	if e.vm != "" {
		of = " of VM " + e.vm
	}
	return fmt.Sprintf("there is no flight recorder%s beside %s; the config's trace.flightRecorder says how many frames are to be kept", of, e.socket)
}

// errEnough says that all frames came that were wanted.
var errEnough = errors.New("enough")

// traceGrace is how long the frames that passed before an interrupt may take to
// come.
const traceGrace = 200 * time.Millisecond

// A traceSink is where frames go.
type traceSink interface {
	packet(t *traced, b trace.Block, p *trace.Packet) error
	// idle is called when nothing more has come for now.
	idle(t *traced) error
	end(t *traced) error
}

// traced is a stream on its way.
type traced struct {
	options *traceOptions
	filter  *trace.Filter
	out     traceSink
	in      *trace.BlockReader

	interrupted <-chan struct{}
	until       int64 // when it was, in nanoseconds since 1970; 0 before

	section    []byte
	interfaces []tracedInterface
	frames     int
}

// A tracedInterface is one of the stream's.
type tracedInterface struct {
	trace.Interface
	raw  []byte
	lost uint64
}

func (t *traced) lost() (n uint64) {
	for _, i := range t.interfaces {
		n += i.lost
	}
	return n
}

// copy copies until the stream ends (io.EOF) or there is enough (errEnough).
func (t *traced) copy() error {
	for {
		if !t.in.Buffered() {
			if err := t.out.idle(t); err != nil {
				return err
			}
		}
		b, err := t.in.Next()
		if err != nil {
			return err
		}
		switch b.Kind {
		case trace.BlockSection:
			t.section = slices.Clone(b.Raw)
		case trace.BlockInterface:
			i, err := b.Interface()
			if err != nil {
				return err
			}
			t.interfaces = append(t.interfaces, tracedInterface{Interface: i, raw: slices.Clone(b.Raw)})
		case trace.BlockStatistics:
			id, _, lost, err := b.Statistics()
			if err != nil {
				return err
			}
			if int(id) < len(t.interfaces) {
				t.interfaces[id].lost = lost
			}
		case trace.BlockPacket:
			if err := t.packet(b); err != nil {
				return err
			}
		}
	}
}

func (t *traced) packet(b trace.Block) error {
	p, err := b.Packet()
	if err != nil {
		return err
	}
	if int(p.Interface) >= len(t.interfaces) {
		return fmt.Errorf("packet of no interface: %w", trace.ErrNotOurs)
	}
	if t.until == 0 {
		select {
		case <-t.interrupted:
			t.until = time.Now().UnixNano()
		default:
		}
	} else if p.At > t.until {
		return errEnough
	}
	t.interfaces[p.Interface].lost += p.Lost
	if t.filter != nil && !t.filter.Match(&p) || t.options.last && t.options.request.Drops && !p.Dropped() {
		return nil
	}
	if err := t.out.packet(t, b, &p); err != nil {
		return err
	}
	t.frames++
	if t.frames == t.options.count {
		return errEnough
	}
	return nil
}

// traceLines prints a line a frame.
type traceLines struct{ out *bufio.Writer }

func (l *traceLines) packet(t *traced, _ trace.Block, p *trace.Packet) error {
	_, err := l.out.WriteString(p.Line(t.interfaces[p.Interface].Interface) + "\n")
	return err
}

func (l *traceLines) idle(*traced) error { return l.out.Flush() }
func (l *traceLines) end(*traced) error  { return l.out.Flush() }
