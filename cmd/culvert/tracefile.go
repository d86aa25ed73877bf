package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/culvertnet/culvert/datapath/trace"
)

// traceFiles writes pcapng to a file, or one after the other. Every one is whole:
// it begins with the section and the interfaces there are, and ends with their
// statistics.
type traceFiles struct {
	path   string
	stdout io.Writer
	size   int64
	every  time.Duration

	file    *os.File // nil when it is stdout
	out     *bufio.Writer
	files   int
	written int64
	began   time.Time
	counts  []fileCount // of this file, by interface
}

type fileCount struct {
	frames, lost uint64
	last         int64
}

func (f *traceFiles) packet(t *traced, b trace.Block, p *trace.Packet) error {
	full := f.size > 0 && f.written+int64(len(b.Raw)) > f.size || f.every > 0 && time.Since(f.began) >= f.every
	if f.out != nil && full {
		if err := f.finish(t); err != nil {
			return err
		}
	}
	if err := f.begin(t); err != nil {
		return err
	}
	c := &f.counts[p.Interface]
	c.frames++
	c.lost += p.Lost
	c.last = p.At
	return f.write(b.Raw)
}

// begin opens a file unless one is open, and writes the interfaces that are new
// to it.
func (f *traceFiles) begin(t *traced) error {
	if f.out == nil {
		var w = f.stdout
		if f.path != "-" {
			file, err := os.Create(f.name())
			if err != nil {
				return err
			}
			f.file, w = file, file
		}
		f.files++
		f.out = bufio.NewWriterSize(w, 1<<20)
		f.began, f.written, f.counts = time.Now(), 0, nil
		if err := f.write(t.section); err != nil {
			return err
		}
	}
	for _, i := range t.interfaces[len(f.counts):] {
		f.counts = append(f.counts, fileCount{})
		if err := f.write(i.raw); err != nil {
			return err
		}
	}
	return nil
}

// name returns the file's: "vm1.pcapng", "vm1-1.pcapng" and so on.
func (f *traceFiles) name() string {
	if f.files == 0 {
		return f.path
	}
	base, named := strings.CutSuffix(f.path, ".pcapng")
	if named {
		return fmt.Sprintf("%s-%d.pcapng", base, f.files)
	}
	return fmt.Sprintf("%s-%d", base, f.files)
}

func (f *traceFiles) write(b []byte) error {
	n, err := f.out.Write(b)
	f.written += int64(n)
	return err
}

// idle hands on what there is, if it is only that there are interfaces: a viewer at
// the other end of a pipe waits for it.
func (f *traceFiles) idle(t *traced) error {
	if len(t.interfaces) == 0 {
		return nil
	}
	if err := f.begin(t); err != nil {
		return err
	}
	return f.out.Flush()
}

func (f *traceFiles) end(t *traced) error {
	if len(t.section) == 0 {
		return nil // there was no stream
	}
	if err := f.begin(t); err != nil {
		return err
	}
	return f.finish(t)
}

// finish ends a file.
func (f *traceFiles) finish(t *traced) error {
	for id, c := range f.counts {
		at := c.last
		if at == 0 {
			at = time.Now().UnixNano()
		}
		if err := f.write(trace.AppendStatistics(nil, uint32(id), at, c.frames, c.lost)); err != nil {
			return err
		}
	}
	err := f.out.Flush()
	if f.file != nil {
		err = errors.Join(err, f.file.Close())
	}
	f.file, f.out = nil, nil
	return err
}
