package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

// redrawEvery is how often a terminal's listing is read again without an event,
// for its counters.
const redrawEvery = time.Second

// watch follows what list lists, until interrupted or the daemon ends.
func watch(cmd *cobra.Command, c *api.Client, list func(context.Context) ([]api.Listener, error)) error {
	jsonWanted, err := asJSON(cmd)
	if err != nil {
		return err
	}
	var tick <-chan time.Time
	show := (&changes{out: cmd.OutOrStdout(), json: jsonWanted}).show
	if _, terminal := terminalWidth(cmd.OutOrStdout()); terminal && !jsonWanted {
		ticker := time.NewTicker(redrawEvery)
		defer ticker.Stop()
		tick = ticker.C
		show = func(rows []api.Listener) error {
			if _, err := io.WriteString(cmd.OutOrStdout(), "\x1b[H\x1b[2J"); err != nil { // home, clear
				return err
			}
			return listenerTable(rows).write(cmd.OutOrStdout())
		}
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

// changes prints a ledger once, and then what has changed in it.
type changes struct {
	out    io.Writer
	json   bool
	before map[string]api.Listener // by rowName; nil before the first
	widths []int                   // of the table so far
}

func (c *changes) show(rows []api.Listener) error {
	now := make(map[string]api.Listener, len(rows))
	var changed []api.Listener
	for _, r := range rows {
		name := rowName(r)
		now[name] = r
		if old, ok := c.before[name]; !ok || !sameRow(old, r) {
			changed = append(changed, r)
		}
	}
	for _, name := range sortedKeys(c.before) {
		if _, ok := now[name]; !ok {
			gone := c.before[name]
			gone.State, gone.Detail, gone.Bound = "gone", "", []string{}
			changed = append(changed, gone)
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
	t := listenerTable(changed)
	t.widths, t.headless = c.widths, !first
	err := t.write(c.out)
	c.widths = t.widths
	return err
}

// rowName tells rows apart.
func rowName(r api.Listener) string {
	return fmt.Sprintf("%s %s %s %s/%s", r.Owner.Kind, r.Owner.ID, r.VM, r.Host, r.Protocol)
}

// sameRow reports whether b says what a said, its counters aside.
func sameRow(a, b api.Listener) bool {
	return a.State == b.State && a.Detail == b.Detail && a.Guest == b.Guest && slices.Equal(a.Bound, b.Bound)
}
