package main

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

// redrawEvery is how often a terminal's listing is read again without an event,
// for its counters.
const redrawEvery = time.Second

// A kind is what watch must know of what it lists.
type kind[T any] struct {
	table func([]T) *table
	name  func(T) string    // tells one from another, over time
	same  func(a, b T) bool // says that b is as a was, its counters aside
	gone  func(T) T         // what is said of one that has left
	bytes func(T) api.Traffic
	// silent says that no event tells of changes: it is looked at every second.
	silent bool
}

// watch follows what list lists, until interrupted or the daemon ends.
func watch[T any](cmd *cobra.Command, c *api.Client, k kind[T], list func(context.Context) ([]T, error)) error {
	jsonWanted, err := asJSON(cmd)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	show := (&changes[T]{kind: k, out: out, json: jsonWanted}).show
	_, terminal := terminalWidth(out)
	terminal = terminal && !jsonWanted
	if terminal {
		show = (&screen[T]{kind: k, out: out}).show
	}
	var tick <-chan time.Time
	if terminal || k.silent {
		ticker := time.NewTicker(redrawEvery)
		defer ticker.Stop()
		tick = ticker.C
	}

	ctx, cancel := context.WithCancel(cmd.Context())
	changed, ended := make(chan struct{}, 1), make(chan error, 1)
	poke := func() error {
		select {
		case changed <- struct{}{}:
		default: // it will be read again anyway
		}
		return nil
	}
	var following sync.WaitGroup
	following.Go(func() { ended <- c.Events(ctx, poke, func(api.Event) error { return poke() }) })
	defer following.Wait()
	defer cancel()
	for {
		select {
		case <-changed:
		case <-tick:
		case err := <-ended:
			if cmd.Context().Err() != nil {
				return nil
			}
			if err == nil {
				err = &failedError{"the daemon has ended"}
			}
			return err
		}
		rows, err := list(ctx)
		if cmd.Context().Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if err := show(rows); err != nil {
			return err
		}
	}
}

// A screen is a terminal that shows a list as it is, and how fast bytes pass.
type screen[T any] struct {
	kind[T]
	out   io.Writer
	rates rates
}

func (s *screen[T]) show(rows []T) error {
	now := make(map[string]api.Traffic, len(rows))
	for _, r := range rows {
		now[s.name(r)] = s.bytes(r)
	}
	s.rates.read(time.Now(), now)
	t := s.table(rows)
	width, _ := terminalWidth(s.out)
	addRates(t, func(i int) (toGuest, toHost string) { return s.rates.texts(s.name(rows[i])) })
	text := t.text(width, os.Getenv("NO_COLOR") == "")
	_, err := io.WriteString(s.out, "\x1b[H\x1b[2J"+text) // home, clear
	return err
}

// addRates puts two columns beside those that count bytes.
func addRates(t *table, of func(row int) (toGuest, toHost string)) {
	at := slices.Index(t.head, "TO HOST") + 1
	t.head = slices.Insert(t.head, at, "GUEST/S", "HOST/S")
	for i := range t.rows {
		toGuest, toHost := of(i)
		t.rows[i] = slices.Insert(t.rows[i], at, toGuest, toHost)
	}
}

// rates is how fast bytes pass, from two readings of their counters. Readings that
// events cause may follow each other at once: of those the rates are not taken.
type rates struct {
	at     time.Time
	before map[string]api.Traffic
	took   time.Duration          // between the two readings
	passed map[string]api.Traffic // in that time; of those that were in both
}

// rateOver is the shortest time that a rate is taken over.
const rateOver = redrawEvery * 9 / 10

func (r *rates) read(at time.Time, now map[string]api.Traffic) {
	took := at.Sub(r.at)
	if r.before != nil && took < rateOver {
		return
	}
	if r.before != nil {
		r.took, r.passed = took, make(map[string]api.Traffic, len(now))
		for name, n := range now {
			was, ok := r.before[name]
			if !ok || n.ToGuest < was.ToGuest || n.ToHost < was.ToHost {
				continue // new, or another of that name: its counters begin anew
			}
			r.passed[name] = api.Traffic{ToGuest: n.ToGuest - was.ToGuest, ToHost: n.ToHost - was.ToHost}
		}
	}
	r.at, r.before = at, now
}

// texts returns a row's rates for people; "-" where there are not two readings.
func (r *rates) texts(name string) (toGuest, toHost string) {
	n, ok := r.passed[name]
	if !ok {
		return "-", "-"
	}
	text := func(n uint64) string { return bytesText(uint64(float64(n)/r.took.Seconds())) + "/s" }
	return text(n.ToGuest), text(n.ToHost)
}

// changes prints a list once, and then what has changed in it.
type changes[T any] struct {
	kind[T]
	out    io.Writer
	json   bool
	before map[string]T // by name; nil before the first
	widths []int        // of the table so far
}

func (c *changes[T]) show(rows []T) error {
	now := make(map[string]T, len(rows))
	var changed []T
	for _, r := range rows {
		name := c.name(r)
		now[name] = r
		if old, ok := c.before[name]; !ok || !c.same(old, r) {
			changed = append(changed, r)
		}
	}
	for _, name := range sortedKeys(c.before) {
		if _, ok := now[name]; !ok {
			changed = append(changed, c.gone(c.before[name]))
		}
	}
	first := c.before == nil
	c.before = now
	if c.json {
		lines := json.NewEncoder(c.out)
		for _, r := range changed {
			if err := lines.Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	if !first && len(changed) == 0 {
		return nil
	}
	t := c.table(changed)
	t.widths, t.headless = c.widths, !first
	err := t.write(c.out)
	c.widths = t.widths
	return err
}
