package main

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/daemon"
)

// newLogger returns the daemon's log.
func newLogger(w io.Writer, c daemon.LogConfig) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Level)) // checked with the config
	opts := &slog.HandlerOptions{Level: level}
	var h slog.Handler = slog.NewTextHandler(w, opts)
	if c.Format == "json" {
		h = slog.NewJSONHandler(w, opts)
	}
	return slog.New(newBoundedLog(h))
}

const (
	// logBurst is how many lines one VM may cause at once: what a guest with a
	// thousand published ports has to say when it comes and goes, twice.
	logBurst = 5000
	// logRefill is in how long it has as many again. That is 8 lines a second, or
	// some 100 MB a day, of a VM whose guest does all it can.
	logRefill = 10 * time.Minute
)

// A boundedLog keeps a guest from filling the host's disk: what becomes of its
// containers, Services and resets is logged, and it may make them come and go
// without end. It leaves out lines, other than errors, of a VM that has had too
// many, and says how many with the next that it hands on. Other VMs, and the
// daemon itself, have their own.
type boundedLog struct {
	slog.Handler
	vm   string // that With has named; empty for none
	said *logLedger
}

// A logLedger has what each VM has left. VMs are named in the config alone, so
// it does not grow.
type logLedger struct {
	mu  sync.Mutex
	vms map[string]*logCredit
}

type logCredit struct {
	lines   float64 // at the time at
	at      time.Time
	leftOut int // since the last line that was handed on
}

func newBoundedLog(h slog.Handler) *boundedLog {
	return &boundedLog{Handler: h, said: &logLedger{vms: make(map[string]*logCredit)}}
}

// Handle implements slog.Handler.
func (h *boundedLog) Handle(ctx context.Context, r slog.Record) error {
	vm := h.vm
	r.Attrs(func(a slog.Attr) bool {
		vm = vmOf(a, vm)
		return true
	})
	if r.Level >= slog.LevelError || vm == "" {
		return h.Handler.Handle(ctx, r)
	}
	leftOut, ok := h.said.take(vm, time.Now())
	if !ok {
		return nil
	}
	if leftOut > 0 {
		note := slog.NewRecord(r.Time, slog.LevelWarn, "log lines left out", 0)
		note.Add("lines", leftOut)
		if h.vm == "" {
			note.Add("vm", vm)
		}
		if err := h.Handler.Handle(ctx, note); err != nil {
			return err
		}
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *boundedLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	vm := h.vm
	for _, a := range attrs {
		vm = vmOf(a, vm)
	}
	return &boundedLog{h.Handler.WithAttrs(attrs), vm, h.said}
}

// WithGroup implements slog.Handler.
func (h *boundedLog) WithGroup(name string) slog.Handler {
	return &boundedLog{h.Handler.WithGroup(name), h.vm, h.said}
}

func vmOf(a slog.Attr, otherwise string) string {
	if a.Key == "vm" {
		return a.Value.String()
	}
	return otherwise
}

// take takes a line of a VM's. It is false when the VM has none left; else
// leftOut is how many were refused before.
func (l *logLedger) take(vm string, now time.Time) (leftOut int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.vms[vm]
	if c == nil {
		c = &logCredit{lines: logBurst, at: now}
		l.vms[vm] = c
	}
	c.lines = min(logBurst, c.lines+logBurst*float64(now.Sub(c.at))/float64(logRefill))
	c.at = now
	if c.lines < 1 {
		c.leftOut++
		return 0, false
	}
	c.lines--
	leftOut, c.leftOut = c.leftOut, 0
	return leftOut, true
}
